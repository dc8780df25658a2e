"""Rehearsals: runs on fake tensors, which have no values, and a fake process group,
which sends nothing.

All of zerokern runs on them as it runs in earnest, so that the log of collectives and
the bytes in use are those of the real run; only kernels and transfers, at the very
bottom, are announced here instead of done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Listener(Protocol):
    """Whoever rehearses, and wants to know what would be done."""

    def on_kernel(self, name: str, tensors: Sequence[Tensor]) -> None:
        """A kernel would read or write these."""

    def on_launch(
        self,
        op: str,
        group: int,
        sent: int,
    ) -> int:
        """A collective would start, in which this rank sends so many bytes. Return a
        number for it."""

    def on_wait(self, transfer: int) -> None:
        """The current stream would wait for a collective."""

    def on_scratch(self, change: int, *, gathered: bool) -> None:
        """Scratch memory was taken, or given back if negative: bytes, of gathered units
        or of buckets."""


LISTENERS: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Announce to `listener` inside."""
    LISTENERS.append(listener)
    try:
        yield
    finally:
        LISTENERS.remove(listener)


def is_rehearsed() -> bool:
    """Return whether somebody listens."""
    return bool(LISTENERS)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)


def address(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory begins: comparable, also for fake tensors."""
    if is_fake(tensor):
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
    return tensor.data_ptr(), 0


class Transfer:
    """A collective that is only announced; has `wait`, as torch.distributed.Work."""

    def __init__(
        self,
        op: str,
        group: int,
        sent: int,
    ) -> None:
        self._numbers = [
            (listener, listener.on_launch(op, group, sent)) for listener in LISTENERS
        ]

    def wait(self) -> bool:
        """Return at once."""
        for listener, number in self._numbers:
            listener.on_wait(number)
        return True


def announce_scratch(change: int, *, gathered: bool) -> None:
    """Tell of scratch memory that was taken, or given back if negative: bytes, of
    gathered units or of buckets."""
    for listener in LISTENERS:
        listener.on_scratch(change, gathered=gathered)


def _announce(name: str, tensors: Sequence[Tensor | None]) -> None:
    for listener in LISTENERS:
        listener.on_kernel(name, [tensor for tensor in tensors if tensor is not None])


# ----------------------------------------------------------------- the kernels of `ops`


def pack_(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], scale: float
) -> None:
    """Announce."""
    _announce("pack", [*destinations, *sources])


def reduce_(
    shard: Tensor, own: Tensor, received: Tensor, partials: Tensor, **options: Any
) -> None:
    """Announce."""
    _announce("reduce", [shard, own, received])


def scalars_(table: Tensor, *tensors: Tensor, **options: Any) -> None:
    """Announce."""
    _announce("scalars", [table, *tensors])


def update_(shard: Any, grad: Tensor, **options: Any) -> None:
    """Announce."""
    _announce("update", [*shard.tensors(), *shard.tensors(), grad])


def cast_(out: Tensor, source: Tensor) -> None:
    """Announce."""
    _announce("cast", [out, source])
