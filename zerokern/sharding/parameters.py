"""One bucket's parameters: where they lie in flat memory, this rank's shard of them,
and the optimizer state of that shard."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from .. import ops
from ..config import Precision
from ..layout import Bucket, Piece
from ..pretend import is_fake
from .handles import ParamHandle


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which autograd accumulates a parameter's gradient: its own,
    or what `param.grad_dtype` says (torch 2.10)."""
    dtype: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if dtype is None else dtype


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """Return a parameter's strides inside a flat buffer: its own if it is dense
    (channels_last), else row major."""
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
        if is_fake(view) or not view.numel():
            return view
        try:
            return torch.utils.dlpack.from_dlpack(view)
        except BufferError:  # a dtype that DLPack does not know
            return view

    return [own(view) for view in views]


class ParameterBucket:
    """One bucket's parameters and optimizer state on one rank."""

    def __init__(
        self,
        layout: Bucket,
        handles: Sequence[ParamHandle],
        rank: int,
        *,
        sharded: bool,
        precision: Precision,
        moments: Mapping[str, str],
    ) -> None:
        """Copy the parameters into a flat buffer, and create the state of the shard.

        Args:
            layout: of the bucket.
            handles: its parameters, in slot order.
            rank: whose shard to keep.
            sharded: stage 3: keep the shard only. Else `own` is a part of `flat`.
            precision: the formats of the state.
            moments: the rule's states, by torch's names, and which tensors of `shard`
                they are.
        """
        self.layout = layout
        self.handles = list(handles)
        self.rank = rank
        self.name = f"{layout.unit or 'bucket'} {layout.index}"
        self.params: list[nn.Parameter] = [handle.param for handle in handles]
        self._pieces = {piece.param: piece for piece in layout.pieces(rank)}
        self.strides = [dense_stride(param) for param in self.params]
        self.places = [
            (tuple(param.shape), stride, slot.start)
            for param, stride, slot in zip(
                self.params, self.strides, layout.slots, strict=True
            )
        ]
        """Shape, strides and offset of each parameter in a flat buffer, as of
        `Tensor.as_strided`."""
        device = self.params[0].device
        self.dtype = self.params[0].dtype
        dtypes = [gradient_dtype(param) for param in self.params]
        self.gradient_dtype = functools.reduce(torch.promote_types, dtypes)
        """In which autograd accumulates; the widest, if parameters differ."""
        flat = torch.zeros(layout.numel, dtype=self.dtype, device=device)
        for param, view in zip(self.params, self.views_of(flat), strict=True):
            view.copy_(param.detach())
        part = flat[layout.shard(rank)]
        self.own = part.clone() if sharded else part
        """[S], this rank's part of the parameters."""
        self.flat = None if sharded else flat
        """[W * S], all of them, where they are not sharded."""
        self.is_hidden = False
        """They are placeholders until a reader waits for them."""
        self.moments = dict(moments) if layout.trainable else {}
        mixed = layout.trainable and self.dtype != torch.float32
        kept = set(self.moments.values())
        first, second, largest = (
            ops.empty_moment(self.own, precision.moments) if name in kept else None
            for name in ("first", "second", "largest")
        )
        master = ops.empty_master(self.own, precision.master if mixed else "none")
        self.shard = ops.Shard(self.own, master, first, second, largest)
        """Parameters and optimizer state of this rank, in their formats."""
        self.refresh_master()

    def hide(self) -> None:
        """They are placeholders from now on."""
        self.is_hidden = True

    def show(self) -> None:
        """They are not any more."""
        self.is_hidden = False

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return a parameter-shaped view of a buffer of this layout for each slot."""
        return [flat.as_strided(*place) for place in self.places]

    def zero_slots(self, shard: Tensor, slots: Sequence[int]) -> None:
        """Zero what a shard of this layout has of some slots."""
        for number in slots:
            piece = self.piece_of(self.handles[number])
            shard[piece.start : piece.start + piece.numel].zero_()

    def zero_padding(self, flat: Tensor, *, of_shard: bool = False) -> None:
        """Zero what a buffer of this layout has between parameters: it takes part in
        sums.

        Args:
            flat: [W * S], or this rank's [S] if it is `of_shard`.
        """
        first = self.rank * self.layout.shard_numel if of_shard else 0
        views = [
            flat[max(start - first, 0) : max(end - first, 0)]
            for start, end in self.layout.padding
        ]
        if views:
            torch._foreach_zero_(views)

    def piece_of(self, handle: ParamHandle) -> Piece:
        """Return this rank's piece of a parameter, perhaps empty."""
        return self._pieces.get(handle.index, Piece(handle.index, 0, 0, 0))

    def refresh_master(self) -> None:
        """Let the master follow parameters that somebody else wrote, and keep the low
        bits of those nobody did."""
        ops.refresh_master_(self.shard)

    # ---------------------------------------------------------------- optimizer state

    def states(self) -> dict[str, str]:
        """Return the optimizer's states by torch's names, and which tensors of `shard`
        they are."""
        master = {} if self.shard.master is None else {"master": "master"}
        return {**self.moments, **master}

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
