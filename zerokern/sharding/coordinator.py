"""The coordinator: gradients in, one update per bucket, parameters out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..transport import Gather
from .blueprint import Blueprint
from .clipping import Bound, Clipping, coefficient, tighter
from .forward_methods import ForwardMethods
from .gradient_states import HAS_REDUCED
from .gradients import GradientBucket
from .handles import ParamHandle, ParamHandles
from .initial import make_buffers_equal
from .join import Join
from .presence import Presence
from .reducer import Reducer
from .replicated import ReplicatedParameters
from .schedule import UnitSchedule
from .sharded import ShardedParameters
from .skipped import SKIPPED, SkippedSteps
from .units import ROOT, unit_modules
from .updater import Updater


class Coordinator:
    """Decides when something happens. How it is done is a matter of its parts: the
    reducer of gradients, the updater, the store of parameters and the schedule by which
    that gathers them."""

    def __init__(
        self, blueprint: Blueprint, groups: Sequence[MutableMapping[str, Any]]
    ) -> None:
        """Move parameters into buckets, create optimizer state, register hooks.

        Args:
            blueprint: what to make.
            groups: torch's param groups, read at every step.
        """
        self.transport = transport = blueprint.transport
        options = blueprint.buckets
        self.blueprint = blueprint
        self.layout = blueprint.layout
        self.handles = blueprint.handles
        self.sharding = blueprint.sharding
        self.groups = groups
        self.updates_in_backward = options.update_in_backward
        modules: dict[str, nn.Module] = {}
        if blueprint.model is not None:
            modules = unit_modules(blueprint.model, options.units)
        self.parameters = blueprint.store(modules)
        self.buckets = blueprint.parameter_buckets(
            self.layout.buckets, self.handles, self.parameters
        )  # trainable and frozen ones
        if blueprint.model is not None:
            make_buffers_equal(blueprint.model, transport)
        self.trainable = [b for b in self.buckets if b.layout.trainable]
        self.updater = Updater(
            blueprint.rule,
            self.handles,
            self.trainable,
            transport,
            seed=blueprint.precision.seed,
        )
        self.gradients = blueprint.gradient_buckets(
            self.trainable, self.updater.partials
        )
        """Of the trainable buckets, in launch order."""
        self._schedule: UnitSchedule | None = None
        self._methods: ForwardMethods | None = None
        self._replicated: ReplicatedParameters | None = None
        self._hook(modules)
        self.clipping = Clipping(self.gradients, transport)
        self.reducer = Reducer(
            self.gradients,
            transport,
            self.clipping,
            self._schedule,
            self if self.updates_in_backward else None,
            overlap=options.overlap,
            once_per_step=not (self.sharding.gradients or self.updates_in_backward),
        )
        if self._schedule is not None:
            self._schedule.begin(self.reducer)
        self.loss_scale: Tensor | None = None  # of the last step
        self._has_no_group = transport.groups.agrees.process_group is None
        self._skipped = SkippedSteps(self.updater.report)
        self._presence = Presence(blueprint.model)
        self._idle: set[int] = set()
        """Parameters that were taken out of their groups: they keep their values."""
        self._joined: Join | None = None  # inside of `join`
        self._written: dict[int, list[nn.Parameter]] = {}  # by bucket, at the step
        self._synchronized: list[int] = []
        """Generations of the gradients whose norm was gathered."""

    def _hook(self, modules: Mapping[str, nn.Module]) -> None:
        """Gather parameters around the forwards that use them."""
        options = self.blueprint.buckets
        if isinstance(self.parameters, ShardedParameters):
            self._schedule = UnitSchedule(
                self.parameters,
                modules,
                self.gradients,
                overlap=options.overlap,
            )
            self._methods = ForwardMethods(self._schedule)
            self.parameters.hook(modules[ROOT])
            return
        self._replicated = self.parameters
        if options.gather_in_forward:
            units = [module for name, module in modules.items() if name != ROOT]
            self.parameters.hook(units, self.handles)

    # ---------------------------------------------------------------- param groups

    def follow(
        self,
        layout: Layout,
        handles: ParamHandles,
        groups: Sequence[MutableMapping[str, Any]],
    ) -> None:
        """Follow param groups that were edited, and train what was added or thawed. All
        ranks do so, outside of backward.

        Args:
            layout, handles: those so far, or grown from them.
            groups: torch's param groups.
        """
        old = self.layout.buckets
        self.layout, self.handles, self.groups = layout, handles, groups
        self._idle = {handle.index for handle in handles if handle.group < 0}
        if layout.buckets == old:
            self.updater.regroup(handles)
            return
        gone = [b for b in self.buckets if b.layout not in layout.buckets]
        fresh = [bucket for bucket in layout.buckets if bucket not in old]
        self.parameters.open(gone)
        made = self.blueprint.parameter_buckets(fresh, handles, None)
        self.parameters.replace(gone, made)
        self.buckets = [b for b in self.buckets if b not in gone] + made
        trainable = [bucket for bucket in made if bucket.layout.trainable]
        known = len(self.trainable)
        self.trainable += trainable
        self.updater = self.updater.grown(handles, self.trainable)
        self._skipped.watch(self.updater.report)
        for bucket, partials in zip(
            self.gradients, self.updater.partials[:known], strict=True
        ):
            bucket.sum_squares_into(partials)
        added = self.blueprint.gradient_buckets(
            trainable, self.updater.partials[known:], known
        )
        self.gradients += added
        if self._schedule is not None:
            self._schedule.add(added)
        self.reducer.add(added)

    # --------------------------------------------------------------- update_in_backward

    @torch.no_grad()
    def reduced(self, bucket: GradientBucket) -> None:
        """Update a bucket that has just been reduced, and let its gradients go. Only
        its parameters count as used: the scalar table leaves all others as they are."""
        self.parameters.prepare_update(bucket.parameters)
        self.updater.gather_norm(self._used([bucket]), guarded=False)
        adds_decay = self.updater.form_table(self.groups)
        self.updater.update(bucket.index, bucket.shard, l2=adds_decay)
        self.parameters.updated(bucket.parameters, self._written[bucket.index])
        bucket.release()

    def end_backward(self) -> None:
        """Whoever reads parameters next has to wait for their updates."""
        if self._replicated:
            self._replicated.end_step()

    # ---------------------------------------------------------------- the step

    def synchronize(self) -> bool:
        """Have all gradients reduced and their norm; return False if it was known."""
        if self._has_no_group:
            self.transport.groups.check_current()
        self.parameters.prepare_step()
        with torch.autograd.profiler.record_function("zerokern::synchronize gradients"):
            self.reducer.synchronize()
            if self.clipping.is_stale:
                self.clipping.multiply()
            if self.updater.gathered is not None:
                generations = [bucket.generation for bucket in self.gradients]
                if generations == self._synchronized:
                    return False
            announcements = self.transport.announcements
            if announcements.are_heard:
                announcements.announce("norm")
            self.gather_norm()
        return True

    def total_norm(self, norm_type: float, loss_scale: Tensor | None) -> Tensor:
        """Return the total norm of all gradients as they are now, clipped or not: fp64,
        0-d, the same on all ranks.

        Args:
            norm_type: positive, or infinity.
            loss_scale: what the gradients were multiplied with.
        """
        self.synchronize()
        if norm_type == 2.0:
            return self.clipping.left(self.updater.norm(loss_scale))
        norm = self.clipping.left(self.clipping.total(norm_type))
        return norm if loss_scale is None else norm / loss_scale.double()

    def clip_norm(
        self, norm: Tensor, max_norm: Bound, norm_type: float, loss_scale: Tensor | None
    ) -> None:
        """Clip the total norm of the coming step, which `total_norm` has returned for
        the same norm type and loss scale."""
        if norm_type == 2.0:
            self.clipping.tighten(self.updater.norm(loss_scale), max_norm)
            return
        self.clipping.multiply()
        self.clipping.scale(coefficient(norm, max_norm))

    def clip_value(self, limit: Bound, loss_scale: Tensor | None) -> None:
        """Clamp each element of all gradients to [-limit, limit], with the loss scale
        divided out."""
        self.synchronize()
        self.clipping.multiply()
        self.clipping.clamp(limit if loss_scale is None else limit * loss_scale)

    def gather_norm(self) -> None:
        """Exchange the small vector of reduced gradients."""
        used = self._used(self.gradients)
        if len(used) < self.handles.num_columns:
            self._presence.check(used, self.handles)
        store = self._replicated
        self.updater.gather_norm(used, store.mark if store else 0)
        if store and self.updater.marks_differ():
            store.compare()

    def _used(self, buckets: Sequence[GradientBucket]) -> list[int]:
        """Return the columns of the parameters that have a gradient in these buckets,
        and remember how these are."""
        columns = []
        self._synchronized.clear()
        for bucket in buckets:
            self._synchronized.append(bucket.generation)
            self._written[bucket.index] = written = []
            for slot in bucket.slots:
                if slot.state in HAS_REDUCED and slot.handle.index not in self._idle:
                    columns.append(slot.handle.column)
                    written.append(slot.param)
        return columns

    def step(
        self,
        max_norm: float | Tensor | None = None,
        loss_scale: Tensor | None = None,
    ) -> None:
        """Update every bucket in one launch each, and send the result on its way.

        Args:
            max_norm: clip to this total norm.
            loss_scale: what the reduced gradients were multiplied with.
        """
        if self.parameters.shows_all:
            raise RuntimeError(
                "step() was called inside full_params() (stage 3), whose parameters"
                " would be written back over the update; leave it first. Nothing was"
                " updated"
            )
        clipping = self.clipping
        if clipping.is_used:
            max_norm = tighter(max_norm, clipping.bound)
        if self._joined is not None:
            self.transport.announcements.announce("step")
            max_norm, loss_scale = self._joined.agree(max_norm, loss_scale)
        if self.updates_in_backward:
            self.updater.report_norm()
        else:
            adds_decay = self.updater.form_table(self.groups, max_norm, loss_scale)
            if clipping.is_used:
                self.updater.amend_report(clipping.norm, clipping.multiplied)
            for bucket in reversed(self.gradients):
                self.updater.update(bucket.index, bucket.shard, l2=adds_decay)
                self.parameters.updated(bucket.parameters, self._written[bucket.index])
        skipped = self._skipped
        if not skipped.said and (skipped.is_remote or skipped.counts[SKIPPED]):
            number, group = self.transport.step, self.transport.groups.agrees
            scaled = loss_scale is not None
            skipped.look(number, self.gradients, group, scaled=scaled)
        if self._replicated:
            self._replicated.end_step()
        self.reducer.end_step()
        self.transport.end_step()
        self.loss_scale = loss_scale

    def gradients_of(self, handle: ParamHandle) -> GradientBucket:
        """Return the bucket of a parameter's gradient."""
        return next(b for b in self.gradients if b.layout.index == handle.bucket)

    def gather_gradient(self, index: int) -> Tensor:
        """Return a parameter's reduced gradient, whole, fp32. All ranks must do so."""
        handle = self.handles[index]
        bucket = self.gradients_of(handle)
        title = f"gradient {bucket.transfer.title}"
        gather = Gather(self.transport, bucket.layout, title, "step")
        gather.start(bucket.shard)
        view = bucket.parameters.views_of(gather.wait())[handle.slot]
        gradient = view.to(torch.float32, copy=True)
        gather.free()
        return gradient

    def refuse_in_join(self, what: str) -> None:
        """Refuse what ranks that have run out of batches would not take part in.

        Raises:
            RuntimeError: inside of `join`.
        """
        if self.transport.announcements.are_heard:
            raise RuntimeError(
                f"{what} cannot be used inside join(): ranks that have run out of"
                " batches would not take part in it; do it before or after"
            )

    def refuse_in_backward(self, what: str) -> None:
        """Refuse what needs all gradients before the first update.

        Raises:
            ValueError: updates are made in backward.
        """
        if self.updates_in_backward:
            raise ValueError(
                f"{what} needs all gradients before the first update, and"
                " Buckets(update_in_backward=True) makes updates during backward; leave"
                " one of them out"
            )

    @contextmanager
    def join(self) -> Iterator[None]:
        """Follow the ranks that have more batches than this one."""
        self.refuse_in_backward("join()")
        if self.transport.groups.alone:
            yield
            return
        self._joined = Join(
            self.transport, self.groups, self.reducer, self.parameters, self
        )
        try:
            with self._joined.ranks():
                yield
        finally:
            self._joined = None

    def zero_grad(self, *, all_of: bool) -> None:
        """Gradients were zeroed or set to None: `all_of` them, or some were just taken
        out of their groups, which keep theirs."""
        self.parameters.recover()
        if all_of and not self._idle:
            self.reducer.drop_zeroed()

    def forget_gradients(self) -> None:
        """Set every p.grad to None."""
        for handle in self.handles:
            handle.param.grad = None
        self.reducer.drop_zeroed()

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Stage 3: gather around a method as around a forward.

        Raises:
            ValueError: there is no such method.
        """
        method = getattr(module, name, None)
        if not callable(method):
            raise ValueError(
                f"register_forward_method: {type(module).__name__} has no method"
                f" {name!r}; pass the module that has it"
            )
        if self._methods is not None:
            self._methods.add(module, name, method)

    def is_at_rest(self) -> bool:
        """Return whether nothing of a backward pass is left."""
        at_rest = self._schedule is None or self._schedule.is_at_rest()
        return at_rest and self.reducer.is_at_rest()

    def detach(self) -> None:
        """Let go of the parameters: remove the hooks, leave every parameter whole. All
        ranks must do so."""
        self.reducer.detach()
        if self._schedule is not None:
            self._schedule.detach()
        if self._methods is not None:
            self._methods.remove()
        self.parameters.detach()
