"""ZeRO-1: every rank holds all parameters and gradients, and the optimizer state of its shards only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import config, ops
from ..buffers import Memory, ParameterBucket, Scratch
from ..comm import Comm, Work
from ..layout import Layout
from ..rules import UpdateRule
from ..scalars import StepScalars
from .gradients import GradientBucket
from .rounds import Rounds


class Place(NamedTuple):
    """Where a parameter stands in the optimizer's param groups."""

    group: int
    position: int
    """Counted over all groups."""


class Zero1:
    """The coordinator: gradients in, one update per bucket, parameters out.

    Stages 2 and 3 are this with less kept: each overrides what it keeps, and nothing else.
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
    ) -> None:
        """Move parameters into buckets, create optimizer state, register hooks.

        Args:
            layout: agreed on by all ranks.
            params: in the order of `layout.params`.
            places: where each one stands in the optimizer's param groups.
            comm: the group to shard over.
            rule: how the optimizer updates.
            precision, buckets: the user's choices.
        """
        self.layout, self.params, self.comm = layout, list(params), comm
        self.names = [spec.name for spec in layout.params]
        device = params[0].device
        self.scratch = Scratch(device)
        members = [[self.params[slot.param] for slot in bucket.slots] for bucket in layout.buckets]
        self._make_equal(members)
        self.parameters = [
            ParameterBucket(
                bucket, chosen, comm.rank,
                sharded=self.parameters_sharded, precision=precision, moments=rule.moments,
            )
            for bucket, chosen in zip(layout.buckets, members, strict=True)
        ]  # fmt: skip
        self.trainable = [p for p in self.parameters if p.bucket.trainable]
        order = [slot.param for p in self.trainable for slot in p.bucket.slots]
        self.row_of = {param: row for row, param in enumerate(order)}
        self.row_maps = self._row_maps(len(order), device)
        counts = [ops.partials_numel(p.bucket.shard_numel) for p in self.trainable]
        partials = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        groups = [places[i].group for i in order]
        seeds = [ops.seed_of(precision.seed, places[i].position) for i in order]
        self.scalars = StepScalars(rule, groups, seeds, partials, comm)
        self.gradients = [
            GradientBucket(
                p, comm, self.scratch, part,
                wire=precision.wire or p.full.dtype, reduced=precision.gradients,
                resident=self.gradients_resident or comm.world == 1,
            )
            for p, part in zip(self.trainable, partials.split(counts), strict=True)
        ]  # fmt: skip
        self.rounds = Rounds(self.gradients, self.names, overlap=buckets.overlap, once_per_step=self.gradients_resident)
        self.versions = [p._version for p in self.params]
        self._settled: list[tuple[object, ...]] = []
        """Signatures of the gradients whose norm was gathered."""

    def _row_maps(self, rows: int, device: torch.device) -> list[ops.RowMap]:
        """Return each bucket's map. A parameter has at most one piece on a rank, so all share one `origin`."""
        runs = [p.runs(self.row_of) for p in self.trainable]
        origin = torch.zeros(rows, dtype=torch.int64)
        for _, _, row, first in (run for bucket in runs for run in bucket):
            origin[row] = first
        origin = origin.to(device)
        blocks = [[row for first, end, row, _ in bucket for _ in range(end - first)] for bucket in runs]
        return [
            ops.RowMap(torch.tensor(rows_of_blocks, dtype=torch.int32, device=device), origin, bucket)
            for rows_of_blocks, bucket in zip(blocks, runs, strict=True)
        ]

    def _make_equal(self, members: Sequence[Sequence[nn.Parameter]]) -> None:
        """Give every rank the initial values of rank 0, as DDP does; nothing is sent if they are equal already."""
        if self.comm.world == 1:
            return
        with torch.no_grad():
            sums = [sum(checksum(p) for p in chosen) for chosen in members]
            gathered = self.comm.all_gather_words(torch.stack([torch.as_tensor(s) for s in sums]))
            for bucket, chosen in enumerate(members):
                if (gathered[:, bucket] != gathered[0, bucket]).any():
                    for param in chosen:
                        value = param.detach().contiguous()
                        self.comm.broadcast(value, self.names[self.layout.buckets[bucket].slots[0].param])
                        param.copy_(value)

    # ------------------------------------------------------------------ the step

    def settle_gradients(self) -> bool:
        """Have all gradients reduced and the small vector exchanged. Return False if that was so already."""
        self.comm.phase = "step"
        self._notice_writes()
        with torch.autograd.profiler.record_function("zerokern::settle_gradients"):
            self.rounds.settle()
            settled = [bucket.signature() for bucket in self.gradients]
            if self.scalars.gathered is not None and settled == self._settled:
                return False
            used = [False] * len(self.row_of)
            for bucket in self.gradients:
                for slot, is_used in zip(bucket.bucket.slots, bucket.used, strict=True):
                    used[self.row_of[slot.param]] = is_used
            self.scalars.gather(used)
            self._settled = settled
        return True

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        max_norm: float | Tensor | None,
        loss_scale: Tensor | None = None,
    ) -> None:
        """Update every bucket in one launch each, and send the result on its way. The gradients are settled.

        Args:
            groups: torch's param groups.
            max_norm: clip to this total norm.
            loss_scale: what the gradients were multiplied with.
        """
        scalars = self.scalars
        l2 = scalars.form(groups, max_norm, loss_scale)
        works = []
        for parameters, gradients, rows in reversed(
            list(zip(self.trainable, self.gradients, self.row_maps, strict=True))
        ):
            with torch.autograd.profiler.record_function("zerokern::update"):
                ops.update_(
                    parameters.shard, gradients.shard,
                    rule=scalars.rule.kernel, table=scalars.table, keys=scalars.keys, rows=rows, l2=l2,
                )  # fmt: skip
            works.append(self.publish(parameters))
        for work in works:
            work.wait()
        self.rounds.end_step()
        self.comm.step += 1
        self.comm.phase = "backward"

    def publish(self, parameters: ParameterBucket) -> Work:
        """Start sending an updated shard to the ranks that need it."""
        return self.comm.all_gather(parameters.full, f"bucket {parameters.bucket.index}")

    def _notice_writes(self) -> None:
        """Let master weights follow parameters that were loaded or edited since the last step."""
        for parameters in self.parameters:
            parameters.check_views(self.names)
        versions = [p._version for p in self.params]
        if versions != self.versions:
            for parameters in self.trainable:
                parameters.refresh_master()
            self.versions = versions

    # ------------------------------------------------------------------ what users ask for

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Make every parameter whole. Edits made inside, the same on all ranks, are kept."""
        try:
            yield
        finally:
            for parameters in self.trainable:
                parameters.refresh_master()

    def memory(self) -> Memory:
        """Return the bytes this rank holds, by role, counted from the tensors themselves."""
        tables = [*self.scalars.tables(), *(t for rows in self.row_maps for t in (rows.block_row, rows.origin))]
        moments = [t for p in self.parameters for moment in p.shard[2:] if moment is not None for t in moment]
        return Memory(
            parameters=self._parameter_bytes(),
            gradients=_storage_bytes([t for g in self.gradients for t in (g.shard, g.local if g.resident else None)]),
            master=_storage_bytes([p.shard.master for p in self.parameters]),
            moments=_storage_bytes(moments),
            buffers=self.scratch.live_bytes,
            tables=_storage_bytes(tables),
        )

    def _parameter_bytes(self) -> int:
        return _storage_bytes([p.full for p in self.parameters])

    def detach(self) -> None:
        """Let go of the parameters: remove the hooks, leave every parameter whole."""
        self.rounds.detach()


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 sum of a tensor's bytes as words: equal tensors have equal sums."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return words.sum(dtype=torch.int64)


def _storage_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Return the bytes of distinct storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
