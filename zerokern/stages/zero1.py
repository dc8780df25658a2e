"""ZeRO-1: every rank holds all parameters and gradients, and the optimizer state of its
shards only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import config, ops
from ..buffers import ParameterBucket, Scratch
from ..comm import Comm, Work
from ..lane import Lane
from ..layout import Bucket, Layout
from ..rules import UpdateRule
from ..scalars import StepScalars
from .arriving import Arriving
from .gradients import GradientBucket
from .initial import Initial, make_equal
from .join import Join
from .rounds import Rounds


class Place(NamedTuple):
    """Where a parameter stands in the optimizer's param groups."""

    group: int
    position: int
    """Counted over all groups."""


class Zero1:
    """The coordinator: gradients in, one update per bucket, parameters out.

    Stages 2 and 3 are this with less kept: each overrides what it keeps, and nothing
    else.
    """

    gradients_resident = True
    """Gradient buckets live forever, and are reduced once per step."""
    parameters_sharded = False

    def __init__(
        self,
        layout: Layout,
        params: Sequence[nn.Parameter],
        places: Sequence[Place],
        comm: Comm,
        rule: UpdateRule,
        precision: config.Precision,
        buckets: config.Buckets,
        *,
        device: torch.device,
        initial: Initial | None = None,
    ) -> None:
        """Move parameters into buckets, create optimizer state, register hooks.

        Args:
            layout: agreed on by all ranks.
            params: in the order of `layout.params`.
            places: where each one stands in the optimizer's param groups.
            comm: the group to shard over.
            rule: how the optimizer updates.
            precision, buckets: the user's choices.
            device: where the parameters live, or will.
            initial: makes the values of parameters on the meta device.
        """
        self.layout, self.params, self.comm = layout, list(params), comm
        self.names = [spec.name for spec in layout.params]
        self.scratch = Scratch(device)
        members = [
            [self.params[slot.param] for slot in bucket.slots]
            for bucket in layout.buckets
        ]
        self.initial = initial
        present = [i for i, chosen in enumerate(members) if not chosen[0].is_meta]
        make_equal(
            {self.names[layout.buckets[i].slots[0].param]: members[i] for i in present},
            comm,
        )
        self.parameters = [
            self.place(bucket, chosen, precision, rule)
            for bucket, chosen in zip(layout.buckets, members, strict=True)
        ]
        self.trainable = [p for p in self.parameters if p.bucket.trainable]
        order = [slot.param for p in self.trainable for slot in p.bucket.slots]
        self.row_of = {param: row for row, param in enumerate(order)}
        self.row_maps = self._row_maps(len(order), device)
        counts = [ops.partials_numel(p.bucket.shard_numel) for p in self.trainable]
        partials = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        groups = [places[i].group for i in order]
        seeds = [ops.seed_of(precision.seed, places[i].position) for i in order]
        self.scalars = StepScalars(rule, groups, seeds, partials, comm)
        self.update_in_backward = buckets.update_in_backward
        self.gradients = self._gradient_buckets(partials.split(counts), precision)
        self.rounds = Rounds(
            self.gradients,
            self.names,
            overlap=buckets.overlap,
            once_per_step=self.gradients_resident and not self.update_in_backward,
        )
        if self.update_in_backward:
            self.rounds.on_reduced = self._update_one
            # Whoever reads parameters next, step() or another.
            self.rounds.on_backward_end = self._end_arriving
        self.joined: Join | None = None
        """Inside of `join`."""
        self.groups: Sequence[MutableMapping[str, Any]] = ()
        """torch's param groups, for updates in backward."""
        self.arriving = Arriving(self.trainable, in_forward=buckets.gather_in_forward)
        self._settled: list[tuple[object, ...]] = []
        """Signatures of the gradients whose norm was gathered."""

    def _gradient_buckets(
        self, partials: Sequence[Tensor], precision: config.Precision
    ) -> list[GradientBucket]:
        """Return the gradients of each trainable bucket, given where its sums of
        squares are to go."""
        lane = Lane(self.scratch.device)
        return [
            GradientBucket(
                p,
                self.comm,
                self.scratch,
                lane,
                part,
                [self.names[slot.param] for slot in p.bucket.slots],
                wire=precision.wire or p.full.dtype,
                reduced=precision.gradients,
                resident=(self.gradients_resident or self.comm.world == 1)
                and not self.update_in_backward,
                passing=self.update_in_backward,
            )
            for p, part in zip(self.trainable, partials, strict=True)
        ]

    def place(
        self,
        bucket: Bucket,
        params: Sequence[nn.Parameter],
        precision: config.Precision,
        rule: UpdateRule,
    ) -> ParameterBucket:
        """Move parameters into a bucket and create their optimizer state."""
        sharded = self.parameters_sharded
        return ParameterBucket(
            bucket,
            params,
            self.comm.rank,
            sharded=sharded,
            precision=precision,
            moments=rule.moments,
        )

    def _row_maps(self, rows: int, device: torch.device) -> list[ops.ColumnMap]:
        """Return each bucket's map. A parameter has at most one piece on a rank, so all
        share one `origin`."""
        runs = [p.runs(self.row_of) for p in self.trainable]
        origin = torch.zeros(rows, dtype=torch.int64)
        for _, _, row, first in (run for bucket in runs for run in bucket):
            origin[row] = first
        origin = origin.to(device)
        blocks = [
            [row for first, end, row, _ in bucket for _ in range(end - first)]
            for bucket in runs
        ]
        return [
            ops.ColumnMap(
                torch.tensor(rows_of_blocks, dtype=torch.int32, device=device),
                origin,
                bucket,
            )
            for rows_of_blocks, bucket in zip(blocks, runs, strict=True)
        ]

    # ------------------------------------------------------------------ the step

    def settle_gradients(self) -> bool:
        """Have all gradients reduced and the small vector exchanged. Return False if
        that was so already."""
        self.comm.phase = "step"
        self.arriving.wait_all()
        self._notice_writes()
        with torch.autograd.profiler.record_function("zerokern::settle gradients"):
            self.rounds.settle()
            settled = [bucket.signature() for bucket in self.gradients]
            if self.scalars.gathered is not None and settled == self._settled:
                return False
            self.comm.announce("norm")
            self.gather_norm()
        return True

    def gather_norm(self) -> None:
        """Exchange the small vector of settled gradients."""
        self.scalars.gather(self._used(self.gradients))
        self._settled = [bucket.signature() for bucket in self.gradients]

    def unit_titles(self) -> list[str]:
        """Return the names of the units, for messages."""
        return []

    def gather_unit(self, index: int) -> None:
        """Stage 3: take part in the gather of a unit, for the others' sake."""

    def _used(self, buckets: Sequence[GradientBucket]) -> list[bool]:
        """Return, by row, which parameters have a gradient in these buckets."""
        used = [False] * len(self.row_of)
        for bucket in buckets:
            for slot, is_used in zip(bucket.bucket.slots, bucket.used, strict=True):
                used[self.row_of[slot.param]] = is_used
        return used

    def step(
        self,
        groups: Sequence[MutableMapping[str, Any]],
        max_norm: float | Tensor | None,
        loss_scale: Tensor | None = None,
    ) -> None:
        """Update every bucket in one launch each, and send the result on its way. The
        gradients are settled.

        Args:
            groups: torch's param groups.
            max_norm: clip to this total norm.
            loss_scale: what the gradients were multiplied with.
        """
        self.comm.announce("step")
        if self.joined is not None:
            max_norm, loss_scale = self.joined.agree(groups, max_norm, loss_scale)
        if self.update_in_backward:
            self.scalars.report_norm()
        else:
            with torch.autograd.profiler.record_function("zerokern::scalars"):
                l2 = self.scalars.form(groups, max_norm, loss_scale)
            for index in reversed(range(len(self.trainable))):
                self._update(index, l2=l2)
        self.arriving.end_step()
        self.rounds.end_step()
        self.comm.end_step()
        self.comm.phase = "backward"

    def _update(self, index: int, *, l2: bool) -> None:
        parameters, scalars = self.trainable[index], self.scalars
        with torch.autograd.profiler.record_function(
            f"zerokern::update {parameters.name}"
        ):
            ops.update_(
                parameters.shard,
                self.gradients[index].shard,
                rule=scalars.rule.kernel,
                table=scalars.table,
                keys=scalars.keys,
                columns=self.row_maps[index],
                l2=l2,
            )
        self.arriving.start(parameters, self.publish(parameters))

    @torch.no_grad()
    def _update_one(self, gradients: GradientBucket) -> None:
        """In backward: update a bucket that has just been reduced, and let its
        gradients go.

        Only its parameters count as used here, so that the scalar table leaves all
        others as they are.
        """
        index = next(i for i, known in enumerate(self.gradients) if known is gradients)
        # If nobody has read it since its last update.
        self.arriving.wait(self.trainable[index])
        self.trainable[index].follow_writes()
        self.scalars.gather(self._used([gradients]), guarded=False)
        l2 = self.scalars.form(self.groups, None, None)
        self._update(index, l2=l2)
        self._tell_autograd(self.trainable[index])
        gradients.spend()

    def _end_arriving(self) -> None:
        self.arriving.end_step()

    def _tell_autograd(self, parameters: ParameterBucket) -> None:
        """Let a backward that still needs the old values fail, as torch lets it after
        any write."""
        torch.autograd.graph.increment_version(parameters.params)
        parameters.note_versions()

    def publish(self, parameters: ParameterBucket) -> Work:
        """Start sending an updated shard to the ranks that need it."""
        return self.comm.all_gather(parameters.full, parameters.name)

    def _notice_writes(self) -> None:
        """Let master weights follow parameters that were loaded or edited since the
        last step."""
        for parameters in self.parameters:
            parameters.check_views(self.names)
        for parameters in self.trainable:
            parameters.follow_writes()

    # --------------------------------------------------------------- what users ask for

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Make every parameter whole. Edits made inside, the same on all ranks, are
        kept."""
        self.arriving.wait_all()
        try:
            yield
        finally:
            for parameters in self.trainable:
                parameters.refresh_master()

    def refuse_passing(self, what: str) -> None:
        """Refuse what needs all gradients before the first update.

        Raises:
            ValueError: updates are made in backward.
        """
        if self.update_in_backward:
            raise ValueError(
                f"{what} needs all gradients before the first update, and"
                " Buckets(update_in_backward=True) makes updates during backward;"
                " leave one of them out"
            )

    @contextmanager
    def join(self) -> Iterator[None]:
        """Follow the ranks that have more batches than this one."""
        self.refuse_passing("join()")
        if self.comm.world == 1:
            yield
            return
        self.joined = Join(self)
        try:
            with self.joined.ranks():
                yield
        finally:
            self.joined = None

    def register_forward_method(
        self, module: nn.Module, name: str
    ) -> Callable[..., Any]:
        """Stage 3: gather around a method as around a forward. Return the method.

        Raises:
            ValueError: there is no such method.
        """
        method = getattr(module, name, None)
        if not callable(method):
            raise ValueError(
                f"register_forward_method: {type(module).__name__} has no method"
                f" {name!r}; pass the module that has it"
            )
        return method  # type: ignore[no-any-return]

    def detach(self) -> None:
        """Let go of the parameters: remove the hooks, leave every parameter whole."""
        self.arriving.wait_all()
        self.rounds.detach()
