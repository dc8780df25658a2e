"""Flat storage for a layout: parameters as views, optimizer state as shards, scratch memory on a ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import ops
from .layout import Bucket


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that one rank holds for the model state, by role."""

    parameters: int
    gradients: int
    """Full or sharded gradients that outlive the backward pass."""
    master: int
    """fp32 master weights of 16-bit parameters."""
    moments: int
    buffers: int
    """Scratch memory in use now: gathered units, buckets and chunks under way. 0 between steps."""
    tables: int
    """Scalar tables, block maps, step counters."""

    @property
    def total(self) -> int:
        """Bytes of all roles."""
        return self.parameters + self.gradients + self.master + self.moments + self.buffers + self.tables


class Scratch:
    """Temporary buffers: taken, used, given back. Knows what is out, so that a leak is a number and not a feeling."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.poison = False
        """Fill with NaN on the way out and back, to make every use of stale memory visible (tests)."""
        self.live_bytes = 0
        self.peak_bytes = 0
        if device.type == "cpu":
            # glibc maps a block afresh, page fault by page fault, unless a larger one was freed before; its limit is
            # 32 MiB.
            torch.empty(31 * 2**20, dtype=torch.uint8)

    def take(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if self.poison:
            tensor.fill_(math.nan)
        self._count(tensor.nbytes)
        return tensor

    def give(self, tensor: Tensor) -> None:
        """End the life of a tensor from `take`; the caller drops its references."""
        if self.poison:
            tensor.fill_(math.nan)
        self._count(-tensor.nbytes)

    def allocate_storage(self, tensor: Tensor) -> None:
        """Give a tensor whose storage was emptied its memory back; views of it come to life again."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        self._count(tensor.nbytes)

    def free_storage(self, tensor: Tensor) -> None:
        """Empty a tensor's storage. The tensor, its views and autograd's saved views of it stay valid objects."""
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        self._count(-tensor.nbytes)
        tensor.untyped_storage().resize_(0)

    def _count(self, change: int) -> None:
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """Return a parameter's strides inside a flat buffer: its own if it is dense (channels_last), else rows."""
    return torch.empty_like(param, device="meta").stride()


def view_in(flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a parameter-shaped view of a flat tensor."""
    return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset() + start)


class ParameterBucket:
    """One bucket's parameters and optimizer state on one rank.

    `full` is the gather buffer: every parameter is a view of it, and `own` is this rank's slot in it. In stages 1
    and 2 it lives forever; in stage 3 its storage is emptied between uses and `own` is a separate tensor.
    """

    def __init__(self, bucket: Bucket, params: Sequence[nn.Parameter], rank: int, *, sharded: bool) -> None:
        """Copy the parameters (in slot order) into the bucket and make them views of it.

        Args:
            bucket: its layout.
            params: one for each slot.
            rank: whose shard to keep.
            sharded: stage 3: keep only the shard. The caller releases `full` when all is set up.
        """
        self.bucket = bucket
        self.params = list(params)
        self.rank = rank
        first = params[0]
        self.full = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        self.strides = [dense_stride(param) for param in self.params]
        self.views = self.views_of(self.full)
        for param, view in zip(self.params, self.views, strict=True):
            view.copy_(param.detach())
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view
        own = self.full[bucket.shard(rank)]
        self.own = own.clone() if sharded else own
        self.sharded = sharded
        self.master: Tensor | None = None
        self.exp_avg = self.exp_avg_sq = self.own.new_empty(0)
        if bucket.trainable:
            self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.own, dtype=torch.float32) for _ in range(2))
            if first.dtype != torch.float32:
                self.master = torch.empty_like(self.own, dtype=torch.float32)
                ops.cast_(self.master, self.own)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return a parameter-shaped view of a buffer of this layout for each slot."""
        return [
            view_in(flat, slot.start, param.shape, stride)
            for slot, param, stride in zip(self.bucket.slots, self.params, self.strides, strict=True)
        ]

    def row_map(self, row_of: dict[int, int]) -> ops.RowMap:
        """Return which scalar-table row each block of the shard uses, given the row of each parameter."""
        runs = tuple((first, end, row_of[param]) for first, end, param in self.bucket.runs(self.rank))
        rows = [row for first, end, row in runs for _ in range(end - first)]
        return ops.RowMap(torch.tensor(rows, dtype=torch.int32, device=self.full.device), runs)

    def state_pieces(self) -> dict[str, Tensor]:
        """Return the shards of optimizer state by torch's names; `master` where there is one."""
        pieces = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.master is not None:
            pieces["master"] = self.master
        return pieces

    def refresh_master(self) -> None:
        """Make master weights follow parameters that somebody else wrote, and keep the low bits of those nobody did."""
        if self.master is not None:
            rounded = torch.empty_like(self.own)
            ops.cast_(rounded, self.master)
            self.master.copy_(torch.where(rounded == self.own, self.master, self.own.float()))

    def check_views(self, name_of: Sequence[str]) -> None:
        """Raise if a parameter no longer is its view of the bucket, as after `model.to(...)`.

        Raises:
            RuntimeError: names the parameter and the remedy.
        """
        for slot, param, view in zip(self.bucket.slots, self.params, self.views, strict=True):
            if param.data_ptr() != view.data_ptr() or param.dtype != view.dtype:
                raise RuntimeError(
                    f"parameter {name_of[slot.param]!r} no longer lives in the optimizer's flat buffer: it "
                    "was moved, cast or its .data was replaced. Move and cast the model before the optimizer is built, "
                    "or build a new optimizer"
                )
