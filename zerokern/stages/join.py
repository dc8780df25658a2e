"""Uneven numbers of batches: ranks that have run out take part in what the others still
do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .zero1 import Zero1

EVENTS = ("idle", "reduce", "gather", "norm", "step")
"""What a rank announces before it does it."""
INDICES = 2**32


class Join:
    """Before each collective, ranks tell each other what it is; those without batches
    then do the same, with nothing.

    As in torch's Join, the mean stays one over all ranks: a rank that has run out
    contributes zeros. What it still holds of gradients that no step has used is
    contributed once.
    """

    def __init__(self, zero: Zero1) -> None:
        """Use the buckets and units of a coordinator."""
        self.zero, self.comm, self.device = zero, zero.comm, zero.scratch.device
        self._active: list[bool] = []
        """Ranks that announced something last."""

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Run the body, then follow the ranks whose body has not ended.

        Raises:
            RuntimeError: two ranks are about to do different things; on all ranks.
        """
        self.comm.listener = self._announce
        try:
            yield
            self.comm.listener = None
            while (event := self._hear("idle", 0))[0] != "idle":
                self._follow(*event)
        finally:
            self.comm.listener = None

    def agree(
        self,
        groups: Sequence[MutableMapping[str, Any]],
        max_norm: float | Tensor | None,
        loss_scale: Tensor | None,
    ) -> tuple[float, Tensor]:
        """Give ranks that have run out the hyper-parameters of the first rank that has
        not.

        Args:
            groups: torch's param groups. Numbers in them are replaced on ranks that
                have run out.
            max_norm, loss_scale: of the step to be made.

        Returns:
            The same largest norm and loss scale on all ranks.
        """
        limits = [
            math.inf if max_norm is None else float(max_norm),
            1.0 if loss_scale is None else float(loss_scale),
        ]
        mine = torch.tensor(
            [*limits, *_numbers(groups)], dtype=torch.float64, device=self.device
        )
        of_ranks = self.comm.all_gather_words(mine.view(torch.int64)).view(
            torch.float64
        )
        values = of_ranks[self._active.index(True)].tolist()
        if not self._active[self.comm.rank]:
            _replace(groups, values[2:])
        return values[0], torch.tensor(
            values[1], dtype=torch.float32, device=self.device
        )

    def _announce(self, event: str, index: int) -> None:
        self._hear(event, index)

    def _hear(self, event: str, index: int) -> tuple[str, int]:
        """Say what comes next here, and return what comes next on the ranks that have
        batches."""
        word = EVENTS.index(event) * INDICES + index
        words = (
            self.comm.all_gather_words(torch.tensor([word], device=self.device))
            .flatten()
            .tolist()
        )
        self._active = [bool(said) for said in words]
        heard = sorted({said for said in words if said})
        if len(heard) > 1:
            said = "; ".join(
                f"rank {rank}: {self._describe(word)}"
                for rank, word in enumerate(words)
            )
            raise RuntimeError(
                f"inside join() the ranks part ways ({said}): as long as a rank has"
                " batches it must run the same steps and, in stage 3, the same units"
                " as the others"
            )
        kind, index = divmod(heard[0] if heard else 0, INDICES)
        return EVENTS[kind], index

    def _describe(self, word: int) -> str:
        kind, index = divmod(word, INDICES)
        names = {
            "reduce": [b.exchange.name for b in self.zero.gradients],
            "gather": self.zero.unit_titles(),
        }
        return " ".join([EVENTS[kind], *names.get(EVENTS[kind], [])[index : index + 1]])

    def _follow(self, event: str, index: int) -> None:
        follow: dict[str, Callable[[], None]] = {
            "reduce": self.zero.rounds.launch_next,
            "gather": lambda: self.zero.gather_unit(index),
            "norm": self.zero.gather_norm,
            "step": self._step,
        }
        with torch.no_grad():
            follow[event]()

    def _step(self) -> None:
        self.zero.step(self.zero.groups, None)
        for param in self.zero.params:
            param.grad = None
        self.zero.rounds.drop_zeroed()


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return every number of param groups, in a fixed order."""
    return [
        float(x) for group in groups for key in _keys(group) for x in _parts(group[key])
    ]


def _keys(group: Mapping[str, Any]) -> list[str]:
    return sorted(
        key
        for key in group
        if key != "params" and all(_is_number(x) for x in _parts(group[key]))
    )


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _replace(
    groups: Sequence[MutableMapping[str, Any]], values: Sequence[float]
) -> None:
    """Write numbers back to where `_numbers` has read them."""
    left = iter(values)
    for group in groups:
        for key in _keys(group):
            old = group[key]
            new = [next(left) for _ in _parts(old)]
            if isinstance(old, Tensor):
                old.fill_(new[0])
            else:
                group[key] = (
                    type(old)(new)
                    if isinstance(old, list | tuple)
                    else type(old)(new[0])
                )
