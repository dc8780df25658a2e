"""One bucket's gradients, from autograd to the reduced shard.

    LOCAL       this rank's gradients, accumulating in `local`
    TRAVELLING  `local` is being exchanged; nobody touches it
    REDUCED     `shard` holds the average over ranks; `local` is gone (stages 2, 3) or
                stale (stage 1)

p.grad tells whether the user still wants a gradient: it is a `ReducedGradient`, without
memory (in a world of one, a view of `local`). If it is missing, or was zeroed, somebody
called zero_grad.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import ops
from ..buffers import ParameterBucket, Scratch
from ..comm import Comm
from ..lane import Lane
from .exchange import Exchange
from .local import LocalGradients
from .tally import Tally


class State(enum.Enum):
    """Where a bucket's gradients are."""

    LOCAL = enum.auto()
    TRAVELLING = enum.auto()
    REDUCED = enum.auto()


class GradientBucket(LocalGradients):
    """The gradients of one bucket on one rank."""

    def __init__(
        self,
        parameters: ParameterBucket,
        comm: Comm,
        scratch: Scratch,
        lane: Lane,
        partials: Tensor,
        names: Sequence[str],
        *,
        wire: torch.dtype,
        reduced: torch.dtype,
        resident: bool,
        passing: bool = False,
    ) -> None:
        """Set up storage.

        Args:
            parameters: whose gradients these are.
            comm: the group to reduce over.
            scratch: where chunks, and in stages 2 and 3 the bucket, come from.
            lane: where sums are formed.
            partials: fp64, the sums of squares of this bucket's shard. Written by every
                reduction.
            names: of the parameters, by slot.
            wire, reduced: dtypes of `local` and of `shard`.
            resident: stage 1: `local` lives forever; if the dtypes are one, the shard
                is this rank's part of it.
            passing: the shard lives from its reduction to its update only (`spend`).
        """
        super().__init__(parameters, scratch, names, wire, resident=resident)
        self.comm, self.partials, self.reduced, self.passing = (
            comm,
            partials,
            reduced,
            passing,
        )
        self.state = State.LOCAL
        self.exchange = Exchange(comm, scratch, lane, parameters.name)
        bucket, device = self.bucket, scratch.device
        in_local = (
            self.local[bucket.shard(comm.rank)]
            if self.local is not None and wire == reduced
            else None
        )
        size = 0 if passing else bucket.shard_numel
        self.shard = (
            torch.zeros(size, dtype=reduced, device=device)
            if in_local is None
            else in_local
        )
        """[S], the reduced gradient."""
        self.tally = Tally(len(self.params))
        self.used = [False] * len(self.params)
        """Parameters whose gradient is in `shard`."""
        self.sealed = False
        """Passing: the gradients of this step are under way to their update, or
        used."""
        self.continues = [False] * len(self.params)
        """Gradients on their way are to be added to the one in `local`, which p.grad
        does not show."""
        self.dropped = False
        """REDUCED: all gradients were zeroed since."""
        self.carry: Tensor | None = None
        """A reduced gradient that nobody zeroed: the next reduction adds to it."""
        self.accumulates: Callable[[], bool] = lambda: False
        """Whether a reduced bucket of which this rank has used nothing is added to."""
        self.reductions = self.arrivals = 0
        self._reduced: tuple[object, ...] = ()

    # --------------------------------------------------------------- a gradient arrives

    def before(self, index: int) -> None:
        """Prepare for autograd's accumulation into p.grad of parameter `index`.

        Raises:
            RuntimeError: the step's update of this bucket is done.
        """
        if self.sealed:
            raise RuntimeError(
                f"a gradient of {self.traces.placeholders[index].of_param!r} arrived"
                " after its update: with update_in_backward the last backward before"
                " step() updates; run those before it inside optimizer.no_sync()"
            )
        if self.state is not State.LOCAL:
            self.reopen()
        self.filled[index] &= self.params[index].grad is not None
        if self.filled[index]:
            self.pack()  # what autograd adds to must be there
        self._notice_writes(index)
        self.continues[index] = self.filled[index] and self.traces.is_placeholder(index)
        if self.traces.is_placeholder(index):
            self.params[
                index
            ].grad = None  # autograd would add in place to a tensor that has no memory

    def take(self, index: int) -> None:
        """Take the gradient that autograd left in p.grad."""
        param, grad = self.params[index], self.params[index].grad
        if grad is None:
            return
        self._ensure_local()
        view = self.views[index]
        if grad is not view:
            if self.continues[index]:
                view.add_(grad)
            elif self.pack_at_once:
                self._waiting[index] = grad
            else:
                view.copy_(grad)  # while it is in the cache
        # Of several ranks none has the gradient, and a part of it must not pass for the
        # whole.
        alone = self.comm.world == 1 and self.wire == param.dtype and not self.passing
        self.traces.leave(index, view) if alone else self.traces.take_away(index)
        self.filled[index] = True
        self.arrivals += 1
        self.tally.count(index)

    def adopt(self, index: int) -> None:
        """Take a gradient that was assigned to p.grad by hand, or was there before the
        optimizer."""
        grad = self.params[index].grad
        if grad is not None and not self._is_ours(index, grad):
            self.before(index)
            self.take(index)

    # ------------------------------------------------------------------ over the ranks

    def launch(self) -> None:
        """Start the exchange. Parameters without a gradient contribute zeros, so no
        rank waits for another."""
        if self.state is not State.LOCAL:
            self.reopen()
        self.pack()
        local = self._ensure_local()
        self._clear_unfilled()
        if self.passing:
            self.shard = self.scratch.take(self.bucket.shard_numel, self.reduced)
        self.exchange.start(local, self._reduce)
        self.state = State.TRAVELLING

    def finish(self) -> None:
        """Wait for the exchange and reduce; in stages 2 and 3 the bucket's memory
        goes."""
        if self.state is not State.TRAVELLING:
            return
        self.exchange.finish()
        self.used = [
            used or filled for used, filled in zip(self.used, self.filled, strict=True)
        ]
        self.filled = [False] * len(self.params)
        if not self.resident:
            self._close()
        self.state, self.dropped = State.REDUCED, False
        self.reductions += 1

    def spend(self) -> None:
        """Passing: the gradients were used, or are not wanted any more. Their memory
        goes."""
        self.finish()
        if self.state is State.REDUCED:
            for index, param in enumerate(self.params):
                if self.traces.is_placeholder(index):
                    param.grad = None
            self.used = [False] * len(self.params)
            self.scratch.give(self.shard)
            self.shard = self.shard.new_empty(0)
            self.state, self.sealed = State.LOCAL, True

    def drop_carry(self) -> None:
        """Forget what was to be added to."""
        if self.carry is not None and self.passing:
            self.scratch.give(self.carry)
        self.carry = None

    def drop_zeroed(self) -> None:
        """All gradients were zeroed: forget what was reduced, also for other ranks, and
        memory that nobody looks at."""
        self.finish()
        self.sealed, self.dropped = False, self.state is State.REDUCED
        if self.carry is not None:
            for index in range(len(self.params)):
                self._notice_writes(index)
            self.drop_carry()
        if (
            self.state is State.LOCAL
            and not self.resident
            and all(param.grad is None for param in self.params)
        ):
            self._waiting.clear()
            self.filled = [False] * len(self.params)
            self._close()

    def reduce_alone(self) -> None:
        """World of one: the local gradient is the reduced one. A captured step runs
        again, on other gradients."""
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
        return self.reductions, self.arrivals, *self.traces.signature()

    def reopen(self) -> None:
        """Make the bucket LOCAL again. What was reduced and not zeroed since is carried
        into the next reduction."""
        self.finish()
        accumulates = not self.dropped and self.accumulates() and not any(self.used)
        if any(self.forget_zeroed(reopening=True)) or accumulates:
            self.carry = (
                self.shard.clone()
                if self.resident and self.wire == self.reduced
                else self.shard
            )
        self.state = State.LOCAL

    def forget_zeroed(self, *, reopening: bool = False) -> list[bool]:
        """REDUCED: drop gradients whose p.grad was zeroed (they are zero) or set to
        None (there is none). Return which are kept."""
        traces = self.traces
        kept = [
            used and traces.is_kept(index) and not self.dropped
            for index, used in enumerate(self.used)
        ]
        dropped = [
            index for index, used in enumerate(self.used) if used and not kept[index]
        ]
        for index in dropped:
            self.used[index] = traces.is_placeholder(index)
            traces.forget_writes(index)
        if (dropped or self.dropped) and not (reopening and not any(kept)):
            (
                self.shard.zero_()
                if self.dropped
                else self.parameters.zero_segments(self.shard, dropped)
            )
            nothing = self.shard.new_empty(0, self.shard.numel())
            ops.reduce_(
                self.shard, self.shard, nothing, self.partials, rank=0, scale=1.0
            )
        self.dropped = False
        return kept

    # ------------------------------------------------------------------ details

    def _reduce(self, received: Tensor) -> None:
        assert self.local is not None
        own = self.local[self.bucket.shard(self.comm.rank)]
        carries, rank = (
            self.carry is not None,
            self.comm.rank if received.shape[0] else 0,
        )
        out = self.shard if self.carry is None else self.carry
        ops.reduce_(
            out,
            own,
            received,
            self.partials,
            rank=rank,
            scale=1.0 / self.comm.world,
            accumulate=carries,
        )
        if out is not self.shard:
            self.shard.copy_(out)
        self.drop_carry()

    def _clear_unfilled(self) -> None:
        """Zero the slots of parameters without a gradient, and of those that were set
        to None since."""
        for index, param in enumerate(self.params):
            self._notice_writes(index)
            self.filled[index] &= param.grad is not None and self._is_ours(
                index, param.grad
            )
            if not self.filled[index] and self.views:
                self.views[index].zero_()

    def _notice_writes(self, index: int) -> None:
        """LOCAL: follow what was done to p.grad since we left something there."""
        if self.is_wanted(index):
            return
        was_used, self.used[index] = self.used[index], False
        if was_used and self.carry is not None:
            self.parameters.zero_segments(self.carry, [index])
            if not any(self.used):
                self.drop_carry()  # with what other ranks have contributed
        # Zeroed in place: a gradient of zero.
        if self.traces.is_placeholder(index) and (self.filled[index] or was_used):
            self._ensure_local()
            self.views[index].zero_()
            self.filled[index] = True
            self.traces.forget_writes(index)
