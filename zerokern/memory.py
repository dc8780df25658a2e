"""Bytes that one rank holds, by role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that one rank holds for the model state, by role."""

    parameters: int
    gradients: int
    """Full or sharded gradients that outlive the backward pass."""
    master: int
    """Bytes that make 16-bit parameters precise: fp32 masters, or the low bits of split
    ones."""
    moments: int
    buffers: int
    """Scratch memory in use now: gathered units, buckets and chunks under way. 0
    between steps."""
    tables: int
    """Scalar tables, block maps, step counters."""

    @property
    def total(self) -> int:
        """Bytes of all roles."""
        model = self.parameters + self.gradients + self.master + self.moments
        return model + self.buffers + self.tables


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of distinct storages."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
