"""What a coordinator is made from, and the buckets that are made of it: at first, and
when more parameters are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..config import Buckets, Precision
from ..layout import Bucket, Layout
from ..rules import UpdateRule
from ..transport import Transport
from .gradients import GradientBucket
from .handles import ParamHandles
from .initial import Initial, make_equal
from .parameters import ParameterBucket
from .replicated import ReplicatedParameters
from .sharded import ShardedParameters


@dataclass(frozen=True)
class Sharding:
    """Which tensors are sharded beside optimizer states, which always are.

    Over the one axis that there is. With a mesh, each field will say over which axes.
    """

    gradients: bool
    """Every backward reduces each bucket into this rank's shard, and the bucket's
    memory goes back at once: A micro-batches send A x P + P elements, or 2P with the
    first A - 1 under `no_sync`, where gradients stay at full size until they are
    reduced. Otherwise buckets live forever, and are reduced once per step."""
    parameters: bool
    """Parameters are gathered unit by unit around their use."""

    @classmethod
    def of_stage(cls, stage: int, world: int) -> Sharding:
        """Return what a ZeRO stage shards; in a world of one, nothing."""
        return cls(
            gradients=stage >= 2 and world > 1, parameters=stage == 3 and world > 1
        )


@dataclass(frozen=True)
class Blueprint:
    """The parts that a coordinator is made from: all ranks have agreed on them."""

    layout: Layout
    handles: ParamHandles
    transport: Transport
    sharding: Sharding
    rule: UpdateRule
    precision: Precision
    buckets: Buckets
    model: nn.Module | None
    initial: Initial | None
    """Makes the values of parameters on the meta device."""

    def store(
        self, modules: Mapping[str, nn.Module]
    ) -> ReplicatedParameters | ShardedParameters:
        """Return where the parameters will be kept.

        Args:
            modules: of every unit, by name.
        """
        if not self.sharding.parameters:
            in_forward = self.buckets.gather_in_forward
            return ReplicatedParameters(self.transport, in_forward=in_forward)
        used = {bucket.unit for bucket in self.layout.buckets}
        return ShardedParameters(self.transport, [n for n in modules if n in used])

    def parameter_buckets(
        self,
        buckets: Sequence[Bucket],
        handles: ParamHandles,
        store: ReplicatedParameters | ShardedParameters | None,
    ) -> list[ParameterBucket]:
        """Make values equal on all ranks, then move them into buckets one by one.

        Args:
            buckets: which to make.
            handles: of all parameters.
            store: takes each as soon as it is made. None: nobody does yet.
        """
        initial = self.initial
        if initial is not None and not self.sharding.parameters:
            initial.make(list(initial.model.parameters()))
        members = {}
        for bucket in buckets:
            members[bucket.index] = [handles[slot.param] for slot in bucket.slots]
        present = [chosen for chosen in members.values() if not chosen[0].param.is_meta]
        make_equal({c[0].name: [h.param for h in c] for c in present}, self.transport)
        made = []
        for bucket in buckets:
            chosen = members[bucket.index]
            if any(handle.param.is_meta for handle in chosen):
                self._make_unit(bucket, handles)
            parameters = ParameterBucket(
                bucket,
                chosen,
                self.transport.groups.shards.rank,
                sharded=self.sharding.parameters,
                precision=self.precision,
                moments=self.rule.moments,
            )
            if store is not None:
                store.add(parameters)
            made.append(parameters)
        return made

    def _make_unit(self, bucket: Bucket, handles: ParamHandles) -> None:
        """Make the parameters of a bucket's unit, which are on the meta device."""
        assert self.initial is not None
        theirs = {}
        for other in self.layout.buckets:
            if other.unit == bucket.unit:
                chosen = [handles[slot.param] for slot in other.slots]
                theirs[chosen[0].name] = [handle.param for handle in chosen]
        self.initial.make([param for params in theirs.values() for param in params])
        make_equal(theirs, self.transport)

    def gradient_buckets(
        self,
        parameters: Sequence[ParameterBucket],
        partials: Sequence[Tensor],
        first_index: int = 0,
    ) -> list[GradientBucket]:
        """Return buckets for the gradients of some parameters.

        Args:
            parameters: trainable ones.
            partials: for their sums of squares.
            first_index: of the first one, among all trainable buckets.
        """
        in_backward = self.buckets.update_in_backward
        resident = not (self.sharding.gradients or in_backward)
        made = []
        for number, (bucket, sums) in enumerate(zip(parameters, partials, strict=True)):
            gradients = GradientBucket(
                bucket,
                self.transport,
                sums,
                index=first_index + number,
                wire=self.precision.wire or bucket.gradient_dtype,
                reduced=self.precision.gradients,
                resident=resident,
                update_in_backward=in_backward,
            )
            made.append(gradients)
        return made
