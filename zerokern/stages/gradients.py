"""One bucket's gradients, from autograd to the reduced shard.

    LOCAL       this rank's gradients, accumulating in `local` (p.grad is a view of it)
    TRAVELLING  `local` is being exchanged; nobody touches it
    REDUCED     `shard` holds the average over ranks; `local` is gone (stages 2, 3) or stale (stage 1)

p.grad tells whether the user still wants a gradient. While it is LOCAL, p.grad is the view; once it has left, p.grad
is a placeholder that holds no memory and reads as NaN. If either is missing, or was zeroed, somebody called zero_grad.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..buffers import ParameterBucket, Scratch
from ..comm import Comm, Work


class State(enum.Enum):
    """Where a bucket's gradients are."""

    LOCAL = enum.auto()
    TRAVELLING = enum.auto()
    REDUCED = enum.auto()


class GradientBucket:
    """The gradients of one bucket on one rank."""

    def __init__(
        self,
        parameters: ParameterBucket,
        comm: Comm,
        scratch: Scratch,
        partials: Tensor,
        *,
        wire: torch.dtype,
        reduced: torch.dtype,
        resident: bool,
    ) -> None:
        """Set up storage.

        Args:
            parameters: whose gradients these are.
            comm: the group to reduce over.
            scratch: where chunks, and in stages 2 and 3 the bucket, come from.
            partials: fp64, the sums of squares of this bucket's shard. Written by every reduction.
            wire, reduced: dtypes of `local` and of `shard`.
            resident: stage 1: `local` lives forever; if the dtypes are one, the shard is this rank's part of it.
        """
        self.bucket, self.params, self._views_of = parameters.bucket, parameters.params, parameters.views_of
        self.comm, self.scratch, self.partials = comm, scratch, partials
        self.wire, self.resident, self.state = wire, resident, State.LOCAL
        bucket, device = self.bucket, self.params[0].device
        self.pack_at_once = device.type == "cuda"  # one launch for the whole bucket
        self.local: Tensor | None = None
        self.views: list[Tensor] = []
        if resident:
            self._open(torch.zeros(bucket.numel, dtype=wire, device=device))
        in_local = self.local[bucket.shard(comm.rank)] if self.local is not None and wire == reduced else None
        self.shard = torch.zeros(bucket.shard_numel, dtype=reduced, device=device) if in_local is None else in_local
        """[S], the reduced gradient."""
        self.shard_in_local = in_local is not None
        # A scalar seen with the parameter's shape; each has storage of its own, since views share a version counter.
        self.placeholders = [
            torch.full((), math.nan, dtype=p.dtype, device=device).expand(p.shape) for p in self.params
        ]
        self.versions = [0] * len(self.params)
        """Version counters of what we left in p.grad: another number means that somebody wrote to it."""
        self.filled = [False] * len(self.params)
        """Slots of `local` that hold a gradient."""
        self.used = [False] * len(self.params)
        """Parameters whose gradient is in `shard`."""
        self.fired = [0] * len(self.params)
        """Gradients received in this backward pass."""
        self.expected = [1] * len(self.params)
        """Most gradients that any backward pass has brought: a parameter in two reentrant checkpoints has two."""
        self._missing = len(self.params)
        self.continues = [False] * len(self.params)
        """Gradients on their way add to the one in `local`."""
        self.carry: Tensor | None = None
        """A reduced gradient that nobody zeroed: the next reduction adds to it."""
        self.reductions = self.arrivals = 0
        self._waiting: dict[int, Tensor] = {}
        self._work = Work()
        self._received: Tensor | None = None
        self._reduced: tuple[object, ...] = ()

    # ------------------------------------------------------------------ a gradient arrives

    def before(self, index: int) -> None:
        """Prepare for autograd's accumulation into p.grad of parameter `index`."""
        if self.state is not State.LOCAL:
            self.reopen()
        grad = self.params[index].grad
        self.continues[index] = self.filled[index] = self.filled[index] and grad is not None
        if self.filled[index]:
            self.pack()  # what autograd adds to must be there
        self._notice_writes(index)
        if grad is self.placeholders[index]:
            self.params[index].grad = None  # autograd would add in place to a tensor that has no memory

    def take(self, index: int) -> None:
        """Take the gradient that autograd left in p.grad."""
        param = self.params[index]
        grad = param.grad
        if grad is None:
            return
        self._ensure_local()
        view = self.views[index]
        if grad is not view:
            if self.continues[index] and self.wire != param.dtype:
                view.add_(grad)
            elif self.pack_at_once:
                self._waiting[index] = grad
            else:
                view.copy_(grad)  # while it is in the cache
        self._leave(index, view if self.wire == param.dtype else self.placeholders[index])
        self.filled[index] = True
        self.arrivals += 1
        self.fired[index] += 1
        self._missing -= self.fired[index] == self.expected[index]

    def pack(self) -> None:
        """Copy gradients that wait into the bucket."""
        if self._waiting:
            ops.pack_([self.views[index] for index in self._waiting], list(self._waiting.values()))
            self._waiting.clear()
            self.versions = [0 if p.grad is None else p.grad._version for p in self.params]

    def adopt(self, index: int) -> None:
        """Take a gradient that was assigned to p.grad by hand, or was there before the optimizer."""
        grad = self.params[index].grad
        if grad is not None and not self._is_ours(index, grad):
            self.before(index)
            self.take(index)

    def complete(self) -> bool:
        """Return whether every parameter has brought as many gradients as it ever has."""
        return self._missing == 0

    def end_backward(self) -> None:
        """Remember how many gradients a pass brings, and start counting anew."""
        self.expected = [max(pair) for pair in zip(self.fired, self.expected, strict=True)]
        self.fired = [0] * len(self.params)
        self._missing = len(self.params)

    # ------------------------------------------------------------------ over the ranks

    def launch(self) -> None:
        """Start the exchange. Parameters without a gradient contribute zeros, so no rank waits for another."""
        if self.state is not State.LOCAL:
            self.reopen()
        self.pack()
        local = self._ensure_local()
        self._clear_unfilled()
        for index, filled in enumerate(self.filled):
            if filled:
                self._leave(index, self.placeholders[index])
        self._received = self.scratch.take((self.comm.world - 1, self.bucket.shard_numel), self.wire)
        name = f"{self.bucket.unit or 'bucket'} {self.bucket.index}"
        self._work = self.comm.exchange(local, self._received, name)
        self.state = State.TRAVELLING

    def finish(self) -> None:
        """Wait for the exchange and reduce; in stages 2 and 3 the bucket's memory goes."""
        if self.state is not State.TRAVELLING:
            return
        assert self.local is not None and self._received is not None
        self._work.wait()
        self._reduce(self._received)
        self.scratch.give(self._received)
        self._received = None
        self.used = [used or filled for used, filled in zip(self.used, self.filled, strict=True)]
        self.filled = [False] * len(self.params)
        if not self.resident:
            self._close()
        self.state = State.REDUCED
        self.reductions += 1

    def reduce_alone(self) -> None:
        """World of one: the local gradient is the reduced one. A captured step runs again, on other gradients."""
        captured = self.shard.is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and self.signature() == self._reduced:
            return
        self.pack()
        self._clear_unfilled()
        if self.local is None or not any(self.filled):
            self.partials.zero_()
        else:
            self._reduce(self.local.new_empty(0, self.bucket.shard_numel))
        self.used = list(self.filled)
        self.reductions += 1
        self._reduced = self.signature()

    def signature(self) -> tuple[object, ...]:
        """Return a value that changes when a gradient comes, goes or is written to."""
        seen = [(id(p.grad), p.grad._version) if p.grad is not None else None for p in self.params]
        return self.reductions, self.arrivals, *seen

    def reopen(self) -> None:
        """Make the bucket LOCAL again. What was reduced and not zeroed since is carried into the next reduction."""
        self.finish()
        if any(self.forget_zeroed(reopening=True)):
            self.carry = self.shard.clone() if self.shard_in_local else self.shard
        self.state = State.LOCAL

    def forget_zeroed(self, *, reopening: bool = False) -> list[bool]:
        """REDUCED: drop gradients whose p.grad was zeroed or set to None since. Return which are kept.

        As in torch, a zeroed gradient is a gradient of zero, and None is none: the parameter is left alone.
        """
        left = zip(self.params, self.placeholders, self.versions, strict=True)
        untouched = [
            param.grad is placeholder and placeholder._version == version for param, placeholder, version in left
        ]
        kept = [used and same for used, same in zip(self.used, untouched, strict=True)]
        dropped = [index for index, used in enumerate(self.used) if used and not kept[index]]
        for index in dropped:
            self.used[index] = self.params[index].grad is self.placeholders[index]
            self.versions[index] = self.placeholders[index]._version
        if dropped and not (reopening and not any(kept)):
            self._zero_segments(self.shard, dropped)
            empty = self.shard.new_empty(0, self.shard.numel())
            ops.reduce_(self.shard, self.shard, empty, self.partials, rank=0, scale=1.0)
        return kept

    # ------------------------------------------------------------------ details

    def _reduce(self, received: Tensor) -> None:
        assert self.local is not None
        own = self.local[self.bucket.shard(self.comm.rank)]
        out = self.shard if self.carry is None else self.carry
        accumulate = self.carry is not None
        rank = self.comm.rank if received.shape[0] else 0
        ops.reduce_(out, own, received, self.partials, rank=rank, scale=1.0 / self.comm.world, accumulate=accumulate)
        if out is not self.shard:
            self.shard.copy_(out)
        self.carry = None

    def _ensure_local(self) -> Tensor:
        if self.local is None:
            local = self.scratch.take(self.bucket.numel, self.wire)
            self._open(local)
            for slot, following in zip(self.bucket.slots, [*self.bucket.slots[1:], None], strict=True):
                end = following.start if following else self.bucket.numel
                if slot.end < end:
                    local[slot.end : end].zero_()  # the padding takes part in sums
            return local
        return self.local

    def _open(self, local: Tensor) -> None:
        self.local = local
        # .data: each view has a version counter of its own.
        self.views = [view.data for view in self._views_of(local)]

    def _close(self) -> None:
        assert self.local is not None
        self.scratch.give(self.local)
        self.local, self.views = None, []

    def _clear_unfilled(self) -> None:
        """Zero the slots of parameters without a gradient, and of those that were set to None since."""
        for index, param in enumerate(self.params):
            self._notice_writes(index)
            if param.grad is None or not self._is_ours(index, param.grad):
                self.filled[index] = False
            if not self.filled[index] and self.views:
                self.views[index].zero_()

    def _notice_writes(self, index: int) -> None:
        """LOCAL: follow what was done to p.grad since we left something there."""
        grad = self.params[index].grad
        if grad is not None and self._is_ours(index, grad) and grad._version == self.versions[index]:
            return
        if self.used[index] and self.carry is not None:
            self._zero_segments(self.carry, [index])
        self.used[index] = False
        if grad is self.placeholders[index] and self.filled[index]:
            self.views[index].zero_()  # zeroed in place: a gradient of zero
            self.versions[index] = grad._version

    def _leave(self, index: int, grad: Tensor) -> None:
        self.params[index].grad = grad
        self.versions[index] = grad._version

    def _zero_segments(self, shard: Tensor, indices: Sequence[int]) -> None:
        params = {self.bucket.slots[index].param for index in indices}
        for piece in self.bucket.pieces(self.comm.rank):
            if piece.param in params:
                shard[piece.start : piece.start + piece.numel].zero_()

    def _is_ours(self, index: int, grad: Tensor) -> bool:
        return grad is self.placeholders[index] or (bool(self.views) and grad is self.views[index])
