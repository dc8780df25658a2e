"""When gradients are reduced: hooks, backward passes, rounds.

A round launches every bucket once, in the same order on every rank, whatever arrived
where: a gradient that did not come is zeros. A bucket is launched early when it is
complete and its predecessors are under way; the rest at the end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..eager import eager
from .gradients import GradientBucket, State
from .hooks import PassEnd

MAX_TRAVELLING = 2
"""Buckets under way at a time; each holds a buffer of chunks."""


class Rounds:
    """Feeds gradients from autograd into buckets, and launches these."""

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        names: Sequence[str],
        *,
        overlap: bool,
        once_per_step: bool,
    ) -> None:
        """Register hooks on every parameter.

        Args:
            buckets: in launch order.
            names: of the parameters, by index in the layout.
            overlap: launch buckets during backward.
            once_per_step: stage 1: reduce in the last backward of a step only, which is
                foreseen to be the same one as in the step before, and the first one in
                the first step.
        """
        self.buckets = list(buckets)
        self.names = names
        self.overlap = overlap
        self.once_per_step = once_per_step
        self.synchronise = True
        """False within no_sync."""
        self.alone = (
            bool(buckets) and buckets[0].comm.world == 1 and not buckets[0].passing
        )
        self.ready: Callable[[GradientBucket], bool] = lambda bucket: (
            bucket.tally.complete()
        )
        """Whether a bucket may be launched. In stage 3, where gathers go between, all
        ranks must agree on it."""
        self.on_bucket_done: Callable[[GradientBucket], None] = lambda bucket: None
        """Called in backward when a bucket's gradients have all arrived."""
        self.on_reduced: Callable[[GradientBucket], None] = lambda bucket: None
        """Called when a bucket was reduced for the last time before its update, in
        launch order."""
        self.on_backward_end: Callable[[], None] = lambda: None
        self.backwards = 0
        """Backward passes outside no_sync since the last step."""
        self.foreseen: int | None = 1
        self.rounds = 0
        """Rounds since the last step."""
        self._learned = False
        """A backward has ended, so it is known how many gradients each parameter
        brings; until then no reduction can be told to be the last one."""
        self._next = 0
        self._travelling: deque[GradientBucket] = deque()
        self._passes: list[weakref.ref[PassEnd]] = []
        """Backward passes under way, outermost first: reentrant checkpoints nest
        them."""
        self._handles: list[RemovableHandle] = []
        self._accumulates: bool | None = None
        """What was reduced last is to be added to; known when the first bucket is
        opened again."""
        self._zeroed = True
        """zero_grad was called since the last round."""
        for bucket in self.buckets:
            bucket.accumulates = self._accumulating
            for index, param in enumerate(bucket.params):
                self._hook(bucket, index, param)

    def _hook(self, bucket: GradientBucket, index: int, param: nn.Parameter) -> None:
        # Weak: a parameter must not keep an optimizer alive that its user has dropped.
        this, weak_bucket = weakref.ref(self), weakref.ref(bucket)

        @eager
        def before(grad: Tensor) -> None:
            rounds, gradients = this(), weak_bucket()
            if rounds is not None and gradients is not None:
                rounds._refuse_sparse(gradients, index, grad)
                if not rounds._passes:
                    rounds._notice_zeroing()
                gradients.before(index)

        @eager
        def after(_: Tensor) -> None:
            rounds, gradients = this(), weak_bucket()
            if rounds is not None and gradients is not None:
                gradients.take(index)
                rounds._arrived(gradients)

        self._handles += [
            param.register_hook(before),
            param.register_post_accumulate_grad_hook(after),
        ]

    def _refuse_sparse(
        self, bucket: GradientBucket, index: int, grad: Tensor | None
    ) -> None:
        if grad is not None and grad.layout != torch.strided:
            name = self.names[bucket.bucket.slots[index].param]
            raise TypeError(
                f"the gradient of {name!r} is sparse; zerokern reduces dense gradients"
                " only: build the embedding with sparse=False"
            )

    # ------------------------------------------------------------------ during backward

    def enter_pass(self) -> None:
        """Notice, from inside of a hook, which backward pass is under way, to be told
        of its end."""
        passes = [alive() for alive in self._passes]
        if None in passes:
            self.abort()
        task = torch._C._current_graph_task_id()
        if all(known is None or known.task != task for known in passes):
            new, this = PassEnd(self, Rounds.pass_ended, task), weakref.ref(self)

            def died(reference: weakref.ref[PassEnd]) -> None:
                rounds = this()
                if rounds is not None and any(
                    reference is known for known in rounds._passes
                ):
                    rounds._abort_quietly()

            self._passes.append(weakref.ref(new, died))
            torch.autograd.Variable._execution_engine.queue_callback(new)

    def _arrived(self, bucket: GradientBucket) -> None:
        self.enter_pass()
        if bucket.tally.complete():
            bucket.pack()
            self.on_bucket_done(bucket)
            self.launch_ready()

    def launch_ready(self) -> None:
        """Launch the buckets that are ready, as far as their order allows."""
        if self.overlap and self._reducing():
            while self._next < len(self.buckets) and self.ready(
                self.buckets[self._next]
            ):
                self._launch_next()

    def _reducing(self) -> bool:
        """Return whether the backward pass under way ends in a round."""
        if not self.synchronise or self.alone:
            return False
        return not self.once_per_step or self.backwards + 1 == self.foreseen

    def abort(self) -> None:
        """Forget a pass that ended in an exception: its gradients stay as far as they
        came, as in torch."""
        self._passes.clear()
        while self._travelling:
            self._travelling.popleft().finish()
        self._next = 0
        for bucket in self.buckets:
            bucket.tally.end_backward()
            if bucket.passing:
                bucket.drop_carry()
                bucket.spend()
                bucket.sealed = False
        self.on_backward_end()

    def _abort_quietly(self) -> None:
        """Abort as soon as the engine has dropped a pass, while the user's exception is
        on its way.

        A rank that never took part fails the next use of what it left behind, too, and
        is reported there.
        """
        with suppress(RuntimeError):
            self.abort()

    def pass_ended(self, task: int) -> None:
        """Called by the engine at the end of a graph task."""
        self._passes = [
            alive
            for alive in self._passes
            if (known := alive()) is not None and known.task != task
        ]
        if not self._passes:
            self._end_backward()

    def _end_backward(self) -> None:
        if self._reducing():
            self._finish_round()
        self.backwards += self.synchronise
        self._learned = True
        for bucket in self.buckets:
            bucket.pack()
            bucket.tally.end_backward()
        self.on_backward_end()

    def _accumulating(self) -> bool:
        """Return whether a bucket of which this rank has used nothing goes on from what
        other ranks have contributed.

        It has no p.grad that could tell. If another bucket's gradients were kept, so
        are these.
        """
        if self._accumulates is None:
            used = [
                (b, i)
                for b in self.buckets
                for i, is_used in enumerate(b.used)
                if is_used
            ]
            self._accumulates = (
                any(b.traces.is_kept(i) for b, i in used) if used else not self._zeroed
            )
        return self._accumulates

    # ------------------------------------------------------------------ launching

    def launch_next(self) -> None:
        """Launch the next bucket in order, with zeros for what is not there; the last
        one ends the round.

        Ranks without batches, in `join`, call it when the others do; nobody else
        outside of here.
        """
        self._launch_next()
        if self._next == len(self.buckets):
            self._finish_round()

    def _launch_next(self) -> None:
        self.buckets[self._next].comm.announce("reduce", self._next)
        if len(self._travelling) >= MAX_TRAVELLING:
            self._finish_first()
        bucket = self.buckets[self._next]
        bucket.sealed = bucket.passing and self._learned
        bucket.launch()
        self._travelling.append(bucket)
        self._next += 1

    def _finish_first(self) -> None:
        bucket = self._travelling.popleft()
        bucket.finish()
        if self._learned:
            self.on_reduced(bucket)

    def _finish_round(self) -> None:
        while self._next < len(self.buckets):
            self._launch_next()
        while self._travelling:
            self._finish_first()
        self._next = 0
        self.rounds += 1
        self._accumulates, self._zeroed = None, False

    # ------------------------------------------------------------------ at the step

    def settle(self) -> None:
        """Leave every gradient reduced: of passes under no_sync, assigned by hand,
        late, or of no pass at all.

        Every rank runs at least one round per step, so a rank whose loss touched no
        parameter does not leave the others waiting. In a world of one nothing travels,
        and p.grad stays as it is.
        """
        if self._passes:
            self.abort()
        for bucket in self.buckets:
            for index, param in enumerate(bucket.params):
                self._refuse_sparse(bucket, index, param.grad)
        for bucket in self.buckets:
            for index in range(len(bucket.params)):
                bucket.adopt(index)
        if self.alone:
            for bucket in self.buckets:
                bucket.reduce_alone()
            return
        self._notice_zeroing()
        if (
            self.rounds == 0
            or self._next
            or any(b.state is State.LOCAL and not b.sealed for b in self.buckets)
        ):
            self._finish_round()
        for bucket in self.buckets:
            if not bucket.sealed:
                bucket.forget_zeroed()
                self.on_reduced(bucket)

    def end_step(self) -> None:
        """Start counting passes and rounds anew."""
        self.foreseen = self.backwards or None
        self._zeroed |= not any(any(bucket.used) for bucket in self.buckets)
        self.backwards = self.rounds = 0
        for bucket in self.buckets:
            bucket.tally.end_backward()  # gradients set by hand are of no pass
            bucket.sealed = False

    def drop_zeroed(self) -> None:
        """After zero_grad: forget what was reduced, and give the memory of local
        gradients back, in stages 2 and 3."""
        self._zeroed, self._accumulates = True, None
        for bucket in self.buckets:
            bucket.drop_zeroed()

    def _notice_zeroing(self) -> None:
        """Treat gradients that were all zeroed by somebody else, such as
        model.zero_grad, as zero_grad does."""
        used = [
            (bucket, i)
            for bucket in self.buckets
            for i, is_used in enumerate(bucket.used)
            if is_used
        ]
        if used and not any(bucket.is_wanted(i) for bucket, i in used):
            self.drop_zeroed()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, at their full size, until a backward outside of
        it or the step."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
