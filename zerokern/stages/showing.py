"""Stage 3: all parameters whole for the body of a `with`, whose edits are kept if it
succeeds everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..comm import Comm
from .units import Unit


@contextmanager
def showing(
    units: Sequence[Unit], comm: Comm, device: torch.device, name_of: Sequence[str]
) -> Iterator[None]:
    """Show every unit; afterwards keep the edits, unless the body raised on any rank.

    Args:
        units: the same on all ranks.
        comm: their group.
        device: where they live.
        name_of: of parameters, for messages.

    Raises:
        RuntimeError: the body raised on another rank, or a parameter was replaced.
    """
    error: Exception | None = None
    try:
        for unit in units:
            unit.show()
        try:
            yield
        except Exception as raised:
            error = raised
        words = comm.all_gather_words(
            torch.tensor([error is not None], dtype=torch.int64, device=device)
        )
        # any() first: a rehearsal answers it, and cannot know how much nonzero() would
        # return.
        raised_on = words.flatten().nonzero().flatten().tolist() if words.any() else []
        if not raised_on:
            for unit in units:
                unit.keep_edits(name_of)
    finally:
        for unit in units:
            unit.hide()
    if error is not None:
        raise error
    if raised_on:
        raise RuntimeError(
            f"the body of full_params raised on rank {raised_on[0]}, so edits were"
            " dropped on every rank"
        )
