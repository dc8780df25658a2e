"""Flat storage for a layout: parameters as views, optimizer state as shards, scratch
memory on a ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from . import ops
from .config import Precision
from .layout import Bucket
from .pretend import address, announce_scratch, is_fake, is_rehearsed


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that one rank holds for the model state, by role."""

    parameters: int
    gradients: int
    """Full or sharded gradients that outlive the backward pass."""
    master: int
    """What makes 16-bit parameters precise: fp32 masters, or the low bits of split
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
        return (
            self.parameters
            + self.gradients
            + self.master
            + self.moments
            + self.buffers
            + self.tables
        )


class Scratch:
    """Temporary buffers: taken, used, given back. Knows what is out, so that a leak is
    a number and not a feeling."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.poison = False
        """Fill with NaN on the way out and back, to make every use of stale memory
        visible (tests)."""
        self.live_bytes = 0
        self.peak_bytes = 0
        if device.type == "cpu" and not is_rehearsed():
            # glibc maps a block afresh, page fault by page fault, unless a larger one
            # was freed before; its limit is 32 MiB.
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

    def lend(self, tensor: Tensor) -> None:
        """End the life of a tensor from `take` to which users may have references: it
        lives on as long as these."""
        self._count(-tensor.nbytes)

    def allocate_storage(self, tensor: Tensor) -> None:
        """Give a tensor whose storage was emptied its memory back; views of it come to
        life again."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        self._count(tensor.nbytes, gathered=True)

    def free_storage(self, tensor: Tensor) -> None:
        """Empty a tensor's storage. The tensor, its views and autograd's saved views of
        it stay valid objects."""
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        self._count(-tensor.nbytes, gathered=True)
        tensor.untyped_storage().resize_(0)

    def _count(self, change: int, *, gathered: bool = False) -> None:
        self.live_bytes += change
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        announce_scratch(change, gathered=gathered)


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """Return a parameter's strides inside a flat buffer: its own if it is dense
    (channels_last), else rows."""
    return torch.empty_like(param, device="meta").stride()


def view_in(
    flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Return a parameter-shaped view of a flat tensor."""
    return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset() + start)


def storages_of(views: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors over the same memory, each with a storage of its own size.

    safetensors refuses parts of a larger storage, and torch.save and deepcopy would
    take all of it.
    """

    def own(view: Tensor) -> Tensor:
        if is_fake(view):
            return view
        try:
            return torch.utils.dlpack.from_dlpack(view)
        except BufferError:  # a dtype that DLPack does not know
            return view

    return [own(view) if view.numel() else view for view in views]


class ParameterBucket:
    """One bucket's parameters and optimizer state on one rank.

    `full` is the gather buffer: every parameter is a view of it, and `own` is this
    rank's slot in it. In stages 1 and 2 it lives forever; in stage 3 its storage is
    emptied between uses and `own` is a separate tensor.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[nn.Parameter],
        rank: int,
        *,
        sharded: bool,
        precision: Precision,
        moments: Mapping[str, str],
    ) -> None:
        """Copy the parameters (in slot order) into the bucket and make them views of
        it.

        Args:
            bucket: its layout.
            params: one for each slot.
            rank: whose shard to keep.
            sharded: stage 3: keep only the shard. The caller releases `full` when all
                is set up.
            precision: the formats of the state.
            moments: the rule's states, by torch's names, and which tensors of `shard`
                they are.
        """
        self.bucket = bucket
        self.name = f"{bucket.unit or 'bucket'} {bucket.index}"
        self.params = list(params)
        self.rank = rank
        first = params[0]
        self.full = torch.zeros(bucket.numel, dtype=first.dtype, device=first.device)
        self.strides = [dense_stride(param) for param in self.params]
        self.views = self.views_of(self.full)
        if not sharded:  # stage 3 empties the storage, and views of it must be views
            self.views = storages_of(self.views)
        for param, view in zip(self.params, self.views, strict=True):
            view.copy_(param.detach())
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view
        own = self.full[bucket.shard(rank)]
        self.own = own.clone() if sharded else own
        self.sharded = sharded
        self.moments = moments if bucket.trainable else {}
        mixed = bucket.trainable and first.dtype != torch.float32
        states = set(self.moments.values())
        self.shard = ops.Shard(
            self.own,
            ops.empty_master(self.own, precision.master if mixed else "none"),
            *(
                ops.empty_moment(self.own, precision.moments)
                if name in states
                else None
                for name in ("first", "second", "largest")
            ),
        )
        """Parameters and optimizer state of this rank, in their formats."""
        ops.refresh_master_(self.shard)
        self.note_versions()

    def empty(self) -> None:
        """Stage 3: let go of the whole parameters; the shard stays."""
        self.full.untyped_storage().resize_(0)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return a parameter-shaped view of a buffer of this layout for each slot."""
        return [
            view_in(flat, slot.start, param.shape, stride)
            for slot, param, stride in zip(
                self.bucket.slots, self.params, self.strides, strict=True
            )
        ]

    def zero_segments(self, shard: Tensor, indices: Sequence[int]) -> None:
        """Zero what a shard of this layout has of some slots."""
        params = {self.bucket.slots[index].param for index in indices}
        for piece in self.bucket.pieces(self.rank):
            if piece.param in params:
                shard[piece.start : piece.start + piece.numel].zero_()

    def runs(self, row_of: Mapping[int, int]) -> tuple[tuple[int, int, int, int], ...]:
        """Return the shard's runs as `ops.ColumnMap` wants them, given the row of each
        parameter."""
        return tuple(
            (first, end, row_of[param], origin)
            for first, end, param, origin in self.bucket.runs(self.rank)
        )

    def states(self) -> dict[str, str]:
        """Return the optimizer's states by torch's names, and which tensors of `shard`
        they are."""
        return {
            **self.moments,
            **({} if self.shard.master is None else {"master": "master"}),
        }

    def stored(self) -> dict[str, tuple[Tensor, int]]:
        """Return the tensors that hold the state as they are, and of how many elements
        each of their entries is."""
        tensors = {}
        if self.shard.master is not None:
            tensors["master"] = self.shard.master, 1
        for name, field in self.moments.items():
            moment: ops.Moment = getattr(self.shard, field)
            tensors[name] = moment.values, 1
            if moment.scale is not None:
                tensors[f"{name}_scale"] = moment.scale, ops.BLOCK
        return tensors

    def is_plain(self) -> bool:
        """Return whether every state is stored as fp32."""
        return all(
            tensor.dtype == torch.float32 for tensor, _ in self.stored().values()
        )

    def follow_writes(self) -> None:
        """If somebody has written to a parameter since the last time, let the master
        follow."""
        before = self._versions
        self.note_versions()
        if self._versions != before:
            self.refresh_master()

    def note_versions(self) -> None:
        """Take the parameters as they are for what was written last."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for param in self.params]
            """What torch counts of writes to the parameters. Our kernels are not
            counted."""

    def refresh_master(self) -> None:
        """Let the master follow parameters that somebody else wrote, and keep the low
        bits of those nobody did."""
        ops.refresh_master_(self.shard)

    def check_views(
        self, name_of: Sequence[str], views: Sequence[Tensor] | None = None
    ) -> None:
        """Raise if a parameter no longer is its view of the bucket, or of other memory,
        as after `model.to(...)`.

        Raises:
            RuntimeError: names the parameter and the remedy.
        """
        for slot, param, view in zip(
            self.bucket.slots, self.params, views or self.views, strict=True
        ):
            if address(param) != address(view) or param.dtype != view.dtype:
                raise RuntimeError(
                    f"parameter {name_of[slot.param]!r} no longer lives in the"
                    " optimizer's flat buffer: it was moved, cast or its .data was"
                    " replaced. Move and cast the model before the optimizer is built,"
                    " or build a new optimizer"
                )
