"""What both sides of a soak do, on a rank and alone, and what they see of it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soak.script import Micro


class Fault(Exception):
    """The user's code failed."""


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices, which decay, and the rest, which does not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def rows(micro: Micro, batch: int, of_rank: int) -> list[Tensor]:
    """Return one rank's tokens and targets of a batch."""
    return [models.share(t, of_rank, len(micro.uses)) for t in models.batch(batch)]


def run_micro(
    model: Any, micro: Micro, of_rank: int, fault: tuple[str, str] | None
) -> float:
    """Run forward and backward of one rank's rows. Return the loss."""
    model.checkpoint = micro.checkpoint
    tokens, targets = rows(micro, micro.batch, of_rank)
    with broken(model, fault):
        logits = model(tokens, micro.order, micro.uses[of_rank])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if fault is not None and fault[0] == "loss":
            raise Fault
        infinite = micro.infinite_on == of_rank
        (loss * float("inf") if infinite else loss).backward()
    return loss.item()


def evaluate(model: Any, micro: Micro, of_rank: int) -> float:
    """Return the loss of other rows, without a graph."""
    model.checkpoint = None
    tokens, targets = rows(micro, micro.batch + 7, of_rank)
    with torch.no_grad():
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@contextmanager
def broken(model: Any, fault: tuple[str, str] | None) -> Iterator[None]:
    """Let a module raise in its forward, in backward, or in its recomputation."""
    kind, place = fault if fault is not None else ("", "")
    if kind in ("", "loss"):
        yield
        return
    module = model.blocks.get_submodule(place)

    def fail(*_: Any) -> None:
        if kind != "recompute" or torch._C._current_graph_task_id() != -1:
            raise Fault

    def fail_later(_: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    if kind == "backward":
        handle = module.register_forward_hook(fail_later)
    else:
        handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of the bits."""
    value = 0
    for tensor in tensors:
        # An array of the memory itself would pin it.
        value = zlib.crc32(tensor.detach().clone().numpy(), value)
    return value


@contextmanager
def deterministic() -> Iterator[None]:
    """Run in torch's deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass
class Life:
    """What was seen of a run, on one rank."""

    seen: list[tuple[int, str, float]] = field(default_factory=list)
    """(step, what, value): losses, checksums of parameters. The same bits on both
    sides."""
    norms: list[float] = field(default_factory=list)
    whole: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Parameters and state after some steps."""
    skipped: int = 0
    faults: int = 0

    def note(self, step: int, what: str, value: float) -> None:
        self.seen.append((step, what, value))


def losses_differ(ours: Life, theirs: Life) -> tuple[Any, ...]:
    """Return the first observations that differ; () if none do."""
    pairs = itertools.zip_longest(ours.seen, theirs.seen)
    return next((pair for pair in pairs if pair[0] != pair[1]), ())
