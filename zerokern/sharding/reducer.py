"""When gradients are reduced.

A round launches the reduction of every bucket once, in the same order on every rank,
whatever arrived where: a gradient that did not come is zeros. A bucket is launched
early when it is complete and its predecessors are under way; the rest at the end of
backward.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..eager import eager
from ..transport import Transport
from .accumulation import node_of
from .clipping import Clipping
from .gradient_states import HAS_REDUCED, BucketState, Seen
from .gradients import GradientBucket
from .hooks import BackwardPasses, Handles
from .listeners import Schedule, Updates
from .placeholders import without_placeholders
from .slots import GradientSlot

MAX_IN_FLIGHT = 2
"""Reductions under way at a time; each holds a buffer of chunks."""


class Reducer:
    """Feeds gradients from autograd into buckets, and launches these."""

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        transport: Transport,
        clipping: Clipping,
        schedule: Schedule | None,
        updates: Updates | None,
        *,
        overlap: bool,
        once_per_step: bool,
    ) -> None:
        """Register hooks on every parameter.

        Args:
            buckets: in launch order.
            transport: the optimizer's.
            clipping: of these gradients.
            schedule, updates: are told how far the reductions are. Held weakly.
            overlap: launch buckets during backward.
            once_per_step: stage 1: reduce in the last backward of a step only, foreseen
                to be the same one as in the step before; at first, the first one.
        """
        self._buckets: list[GradientBucket] = []
        self._transport, self._clipping = transport, clipping
        self._schedule = None if schedule is None else weakref.ref(schedule)
        self._updates = None if updates is None else weakref.ref(updates)
        self._overlap, self._once_per_step = overlap, once_per_step
        self._alone = transport.groups.alone and updates is None
        """Nothing travels, and p.grad stays as it is."""
        self._synchronises = True  # except within no_sync
        self._backwards = self._rounds = 0
        """Backward passes outside no_sync, and rounds, since the last step."""
        self._foreseen: int | None = 1
        """Backward passes of this step, if it is as the last one."""
        self._learned = False
        """A step has ended, on every rank: it is known which reduction is the last."""
        self._next = 0
        """The bucket to be launched next."""
        self._in_flight: deque[GradientBucket] = deque()
        self._passes = BackwardPasses(self)
        self._brings_gradients = False
        """The passes under way accumulate into some p.grad."""
        self._accumulates: bool | None = None
        """Gradients add to what was reduced last; known once a bucket is reopened."""
        self._zeroed = True
        """zero_grad was called since the last round."""
        self._handles = Handles()
        self._nodes: list[Node] = []
        """The nodes of autograd that accumulate into each parameter's p.grad."""
        self.add(buckets)

    def add(self, buckets: Sequence[GradientBucket]) -> None:
        """Take further buckets, to be launched last. What is in p.grad of their
        parameters is adopted before the next step."""
        for bucket in buckets:
            self._buckets.append(bucket)
            for slot in bucket.slots:
                self._hook(len(self._buckets) - 1, slot)

    def _hook(self, number: int, slot: GradientSlot) -> None:
        # Weak: a parameter must not keep an optimizer alive that its user has dropped.
        this, place = weakref.ref(self), slot.handle.slot

        @eager
        def before(grads: tuple[Tensor | None, ...]) -> None:
            reducer = this()
            if reducer is not None:
                reducer._before(reducer._buckets[number], place, grads[0])

        @eager
        def after(_: Tensor) -> None:
            reducer = this()
            if reducer is not None:
                reducer._after(reducer._buckets[number], place)

        param = slot.param
        node = node_of(param)
        # Not a hook on the parameter: that runs for autograd.grad, too, which leaves
        # p.grad alone.
        self._nodes.append(node)
        self._handles.add(
            node.register_prehook(before),
            param.register_post_accumulate_grad_hook(after),
        )

    # ---------------------------------------------------------------- during backward

    def _before(self, bucket: GradientBucket, place: int, grad: Tensor | None) -> None:
        """A gradient is about to be accumulated into p.grad; None if there is none,
        which leaves p.grad as it is."""
        slot = bucket.slots[place]
        if grad is None:
            slot.expect_none()
            return
        if grad.layout != torch.strided:
            slot.refuse_sparse()
        if bucket.parameters.is_hidden:
            slot.refuse_unseen()
        with without_placeholders():
            if not self._passes.running:
                self._notice_zeroing(look=True)
            if bucket.is_final:
                slot.refuse_late()
            if bucket.state is not BucketState.LOCAL:
                self._reopen(bucket)
            bucket.prepare(slot)

    def _after(self, bucket: GradientBucket, place: int) -> None:
        """A gradient was accumulated into p.grad."""
        with without_placeholders():
            self.enter_pass(accumulating=True)
            bucket.take(bucket.slots[place])
            if not bucket.is_complete:
                return
            if bucket.packs_at_once:
                bucket.pack()
            if self._schedule is None:
                bucket.set_ready(True)
                self.launch_ready()
                return
            schedule = self._schedule()
            if schedule is not None:
                schedule.gradients_complete(bucket)

    def enter_pass(self, *, accumulating: bool = False) -> None:
        """Notice in a hook which backward pass is under way, to be told of its end. One
        that brings no gradients reduces nothing; `accumulating` if it brings some."""
        if self._passes.task != torch._C._current_graph_task_id():
            comes_to_any = self._passes.enter(self._nodes)
            self._brings_gradients |= accumulating or comes_to_any

    def launch_ready(self) -> None:
        """Launch the buckets that are ready, as far as their order allows."""
        if not self._overlap or not self._reducing():
            return
        with without_placeholders():
            while self._next < len(self._buckets):
                if not self._buckets[self._next].is_ready:
                    return
                self._launch_next()

    def _reducing(self) -> bool:
        """Return whether the backward pass under way ends in a round."""
        if not self._synchronises or self._alone or not self._brings_gradients:
            return False
        return not self._once_per_step or self._backwards + 1 == self._foreseen

    def backward_ended(self) -> None:
        """The outermost backward pass has ended."""
        with without_placeholders():
            if self._reducing():
                self._finish_round()
            if self._brings_gradients:
                self._backwards += self._synchronises
            for bucket in self._buckets:
                bucket.end_backward()
            self._brings_gradients = False
            self._tell_end()

    def backward_failed(self) -> None:
        """A pass ended in an exception: gradients stay as far as they came."""
        self._passes.forget()
        self._brings_gradients, self._next = False, 0
        with without_placeholders():
            while self._in_flight:
                self._in_flight.popleft().finish()
            for bucket in self._buckets:
                bucket.end_backward()
                if bucket.updates_in_backward:
                    bucket.abandon()
            self._tell_end()

    def _tell_end(self) -> None:
        for reference in (self._schedule, self._updates):
            listener = None if reference is None else reference()
            if listener is not None:
                listener.end_backward()

    def _reopen(self, bucket: GradientBucket) -> None:
        """Let gradients into a bucket that was launched before."""
        if bucket.state is BucketState.REDUCING:
            bucket.finish()
        accumulate = bucket.state is BucketState.REDUCED and self._accumulating()
        if accumulate and self._clipping.is_used:
            self._clipping.multiply()  # what is added now is not clipped
        bucket.reopen(accumulate=accumulate)

    def _accumulating(self) -> bool:
        """Return whether a bucket of which this rank has used nothing, and that has no
        p.grad to tell, goes on from what other ranks have contributed: as others do."""
        if self._accumulates is None:
            used = kept = False
            for bucket in self._buckets:
                for slot in bucket.slots:
                    if slot.state in HAS_REDUCED:
                        used = True
                        kept |= slot.look() is Seen.KEPT and slot.shows_placeholder
            self._accumulates = kept if used else not self._zeroed
        return self._accumulates

    # ---------------------------------------------------------------- launching

    def launch_next(self) -> None:
        """Launch the next bucket in order, with zeros for what is not there; the last
        one ends the round. For ranks without batches, in `join`."""
        with without_placeholders():
            self._launch_next()
            if self._next == len(self._buckets):
                self._finish_round()

    def _launch_next(self) -> None:
        announcements = self._transport.announcements
        if announcements.are_heard:
            announcements.announce("reduce", self._next)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish_first()
        bucket = self._buckets[self._next]
        if bucket.state is not BucketState.LOCAL:
            self._reopen(bucket)
        bucket.launch(is_final=bucket.updates_in_backward and self._learned)
        self._in_flight.append(bucket)
        self._next += 1

    def _finish_first(self) -> None:
        bucket = self._in_flight.popleft()
        bucket.finish()
        if self._learned and self._updates is not None:
            self._tell_reduced(bucket)

    def _tell_reduced(self, bucket: GradientBucket) -> None:
        updates = self._updates and self._updates()
        if updates and bucket.state is BucketState.REDUCED:
            updates.reduced(bucket)

    def _finish_round(self) -> None:
        while self._next < len(self._buckets):
            self._launch_next()
        while self._in_flight:
            self._finish_first()
        if self._clipping.is_stale:
            self._clipping.forget()  # what is left of the last step was not wanted
        self._next = 0
        self._rounds += 1
        self._accumulates, self._zeroed = None, False

    # ---------------------------------------------------------------- at the step

    def synchronize(self) -> None:
        """Leave every gradient reduced, wherever it has come from.

        Every rank runs at least one round per step, so a rank whose loss touched no
        parameter does not leave the others waiting.
        """
        if self._passes.running:
            self.backward_failed()
        with without_placeholders():
            touched = self._adopt()
            if self._alone:
                for bucket in self._buckets:
                    bucket.follow_all()
                    bucket.reduce_alone()
                return
            self._notice_zeroing(look=False)
            pending = not self._rounds or self._next > 0
            for bucket in self._buckets:
                pending |= bucket.state is BucketState.LOCAL
            if pending:
                self._finish_round()
            for bucket in self._buckets:
                if bucket.state is BucketState.ZEROED:
                    bucket.clear_zeroed()
                elif bucket in touched and bucket.state is BucketState.REDUCED:
                    bucket.forget_zeroed()
                if self._updates is not None:
                    self._tell_reduced(bucket)

    def _adopt(self) -> set[GradientBucket]:
        """Look at every p.grad, and take what was assigned by hand or was there before
        the optimizer. Return the buckets in which somebody has done something."""
        foreign, touched = [], set()
        for bucket in self._buckets:
            for slot in bucket.slots:
                seen = slot.look()
                if seen is not Seen.KEPT:
                    touched.add(bucket)
                if seen is Seen.REPLACED:
                    grad = slot.param.grad
                    if grad is not None and grad.layout != torch.strided:
                        slot.refuse_sparse()
                    foreign.append((bucket, slot))
        for bucket, slot in foreign:
            if bucket.is_final:
                slot.refuse_late()
            if bucket.state is not BucketState.LOCAL:
                self._reopen(bucket)
            bucket.prepare(slot)
            bucket.take(slot)
            bucket.end_backward()  # it is of no pass
        return touched

    def end_step(self) -> None:
        """Start counting passes and rounds anew."""
        if self._clipping.is_used:
            self._clipping.end_step()
        self._foreseen, self._learned = self._backwards or None, True
        self._backwards = self._rounds = 0
        used = False
        for bucket in self._buckets:
            if bucket.updates_in_backward:
                bucket.end_step()
            for slot in bucket.slots:
                used |= slot.state in HAS_REDUCED
        self._zeroed |= not used

    def drop_zeroed(self) -> None:
        """After zero_grad: forget what was reduced, and give the memory of local
        gradients back, in stages 2 and 3."""
        self._zeroed, self._accumulates = True, None
        if self._clipping.is_used:
            self._clipping.forget()
        with without_placeholders():
            for bucket in self._buckets:
                bucket.drop_zeroed()

    def _notice_zeroing(self, *, look: bool) -> None:
        """Treat gradients that were all zeroed by somebody else, such as
        model.zero_grad, as zero_grad does.

        Args:
            look: at p.grad. Else what was seen is recent.
        """
        used = False
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.state in HAS_REDUCED:
                    used = True
                    if look:
                        slot.look()
                    if slot.seen is Seen.KEPT:
                        return
        if used:
            self.drop_zeroed()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally until a backward outside of it, or the step."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def titles(self) -> list[str]:
        """Return the names of the buckets in launch order, for messages."""
        return [bucket.transfer.title for bucket in self._buckets]

    def detach(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    def is_at_rest(self) -> bool:
        """Return whether no pass, round or reduction is under way."""
        return not (self._passes.running or self._in_flight or self._next)
