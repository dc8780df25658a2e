"""The update: sums of squares and used bits of all ranks become the scalar table, and
every bucket's shard is updated by it in one launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..rules import MAXIMIZE, UpdateRule
from ..transport import Transport
from .handles import ParamHandle, ParamHandles
from .parameters import ParameterBucket

WORD_BITS = 32
"""Used bits per int64 word: half of it, so that no shift meets the sign."""

Groups = Sequence[Mapping[str, Any]]
"""torch's param groups: numbers, or 0-d tensors."""

DECAY = ops.HYPER.index("weight_decay")
DECOUPLED = ops.HYPER.index("decoupled")


def _groups_of(handles: Sequence[ParamHandle]) -> list[int]:
    """Return the param group of each parameter; of one that is in none, which is never
    updated, the first."""
    return [max(handle.group, 0) for handle in handles]


class Updater:
    """One rule for all buckets; scalar table, step counters and random keys on the
    device, with a column for each trainable parameter."""

    def __init__(
        self,
        rule: UpdateRule,
        handles: ParamHandles,
        buckets: Sequence[ParameterBucket],
        transport: Transport,
        *,
        seed: int,
    ) -> None:
        """Set up a column per parameter.

        Args:
            rule: whose numbers the table holds.
            handles: of all parameters.
            buckets: the trainable ones.
            transport: of the ranks that share the norm.
            seed: what the random bits derive from.
        """
        device = transport.device
        num_columns = handles.num_columns
        self.rule = rule
        self._seed = seed
        self._transport = transport
        self.buckets = list(buckets)
        sizes = [ops.partials_numel(b.layout.shard_numel) for b in buckets]
        self._all_partials = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self.partials = list(self._all_partials.split(sizes))
        """fp64, the sums of squares of each bucket's reduced gradients."""
        # Whatever torch's default dtype is: kernels read fp32.
        shape = len(ops.TABLE), num_columns
        self.table = torch.zeros(shape, dtype=torch.float32, device=device)
        self.keys = torch.zeros(num_columns, dtype=torch.int64, device=device)
        self.steps = torch.zeros(num_columns, dtype=torch.int64, device=device)
        """Updates that each parameter has had."""
        self.report = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=device)
        """Total gradient norm before clipping, clip coefficient, steps skipped for
        non-finite gradients."""
        trained = sorted((h for h in handles if h.column >= 0), key=lambda h: h.column)
        groups = _groups_of(trained)
        seeds = [ops.seed_of(seed, handle.position) for handle in trained]
        self._group_of_column = torch.tensor(groups, device=device)
        self._seeds = torch.tensor(seeds, device=device)
        self.gathered: Tensor | None = None
        """The words of this step, once exchanged."""
        self._staged: dict[str, Tensor] = {}
        """The last step's numbers for the GPU, in pinned memory; a CUDA graph reads it
        from there at every replay."""
        self._form_table = ops.prepared_scalars(
            self.table,
            self.keys,
            self.steps,
            self.report,
            rule=rule.kernel,
            group_of_column=self._group_of_column,
            seeds=self._seeds,
        )
        self._maps = self._column_maps(handles)
        self._launch = [
            ops.prepared_update(
                bucket.shard,
                rule=rule.kernel,
                table=self.table,
                keys=self.keys,
                columns=columns,
            )
            for bucket, columns in zip(buckets, self._maps, strict=True)
        ]

    def grown(
        self,
        handles: ParamHandles,
        buckets: Sequence[ParameterBucket],
    ) -> Updater:
        """Return one for more parameters, which goes on from here.

        Args:
            handles: of all parameters; the columns so far are as they were.
            buckets: the trainable ones, those so far first.
        """
        grown = Updater(
            self.rule,
            handles,
            buckets,
            self._transport,
            seed=self._seed,
        )
        for theirs, ours in (
            (grown.steps, self.steps),
            (grown._seeds, self._seeds),
            (grown._all_partials, self._all_partials),
            (grown.report, self.report),
        ):
            theirs[: ours.numel()].copy_(ours)
        return grown

    def regroup(self, handles: ParamHandles) -> None:
        """Follow parameters into other param groups."""
        trained = sorted((h for h in handles if h.column >= 0), key=lambda h: h.column)
        numbers = torch.tensor(_groups_of(trained), device="cpu")
        self._group_of_column.copy_(numbers)

    def _column_maps(self, handles: ParamHandles) -> list[ops.ColumnMap]:
        """Return each bucket's map. A parameter has at most one piece on a rank, so all
        share one `origin`."""
        device = self.table.device
        origin = torch.zeros(handles.num_columns, dtype=torch.int64, device="cpu")
        of_buckets = []
        for bucket in self.buckets:
            of_bucket = []
            for first, end, param, start in bucket.layout.runs(bucket.rank):
                column = handles[param].column
                of_bucket.append((first, end, column, start))
                origin[column] = start
            of_buckets.append(tuple(of_bucket))
        origin = origin.to(device)
        maps = []
        for runs in of_buckets:
            blocks = [
                column for first, end, column, _ in runs for _ in range(end - first)
            ]
            block_column = torch.tensor(blocks, dtype=torch.int32, device=device)
            maps.append(ops.ColumnMap(block_column, origin, runs))
        return maps

    # ---------------------------------------------------------------- the small vector

    def gather_norm(
        self,
        used: Iterable[int],
        mark: int = 0,
        *,
        guarded: bool = True,
    ) -> None:
        """Exchange sums of squares and used bits.

        Args:
            used: the columns of parameters that have a gradient here.
            mark: of 31 bits, for `marks_differ`.
            guarded: skip the step if the sum is not finite; else zero is sent in its
                place.
        """
        words = [0] * (1 - (-self.steps.numel() // WORD_BITS))
        for column in used:
            words[1 + column // WORD_BITS] |= 1 << column % WORD_BITS
        if len(words) > 1:
            words[1] |= mark << WORD_BITS  # where kernels do not look
        sent = self._upload("words", words, torch.int64)
        if guarded:
            square_sum = self._all_partials.sum()
            sent[:1].copy_(square_sum.view(1).view(torch.int64))
        self.gathered = self._transport.all_gather_words(sent)

    def marks_differ(self) -> bool:
        """Return whether the ranks have sent different marks. A host does not wait for
        its GPU to know; on a CPU the memory is read."""
        gathered, group = self.gathered, self._transport.groups.agrees
        if gathered is None or group.size == 1 or group.is_fake or gathered.is_cuda:
            return False
        width = gathered.shape[1]
        words = (ctypes.c_int64 * gathered.numel()).from_address(gathered.data_ptr())
        marks = {word >> WORD_BITS for word in words[1::width]}
        return width > 1 and len(marks) > 1

    def norm(self, loss_scale: Tensor | None = None) -> Tensor:
        """Return the fp64 total norm of the gathered gradients, a 0-d tensor, with the
        loss scale divided out."""
        assert self.gathered is not None
        square_sums = self.gathered[:, 0].contiguous().view(torch.float64)
        norm = square_sums.sum().sqrt()
        if loss_scale is None:
            return norm
        return norm / loss_scale.to(norm.device, torch.float64)

    def was_used(self, column: int) -> bool:
        """Return whether any rank has a gathered gradient of a parameter. The host
        waits for the answer."""
        assert self.gathered is not None
        words = self.gathered[:, 1 + column // WORD_BITS]
        return bool(((words >> column % WORD_BITS) & 1).any())

    def report_norm(self) -> None:
        """Note the gathered norm, without an update."""
        self.report[:1].copy_(self.norm())
        self.gathered = None

    def amend_report(
        self,
        norm: Tensor | None,
        multiplied: Tensor | None,
    ) -> None:
        """Note what was done to the gradients before the table was formed.

        Args:
            norm: their total norm before that; None as it is in the report.
            multiplied: what they were multiplied with, if they were.
        """
        if norm is not None:
            self.report[:1].copy_(norm)
        if multiplied is not None:
            self.report[1:2].mul_(multiplied)

    # ---------------------------------------------------------------- the update

    def form_table(
        self,
        groups: Groups,
        max_norm: float | Tensor | None = None,
        loss_scale: Tensor | None = None,
    ) -> bool:
        """Fill the table for one update and advance the counters.

        Args:
            groups: torch's param groups.
            max_norm: clip the gradients to this total norm.
            loss_scale: what the gradients were multiplied with.

        Returns:
            Whether a group adds decay to its gradients instead of decaying the weight:
            `l2` of `update`.
        """
        assert self.gathered is not None
        numbers = self._numbers(groups)
        width = len(self.rule.entries)
        adds_decay = False
        for start in range(0, len(numbers), width):
            decay = numbers[start + DECAY]
            if not numbers[start + DECOUPLED]:
                adds_decay |= isinstance(decay, Tensor) or decay != 0
        numbers.append(math.inf if max_norm is None else max_norm)
        numbers.append(1.0 if loss_scale is None else loss_scale)
        with torch.autograd.profiler.record_function("zerokern::scalars"):
            sent = self._send(numbers)
            self._form_table(
                hyper=sent[:-2].view(-1, width),
                gathered=self.gathered,
                limits=sent[-2:],
            )
        self.gathered = None
        return adds_decay

    def update(
        self,
        index: int,
        gradient: Tensor,
        *,
        l2: bool,
    ) -> None:
        """Update a bucket's shard in one launch.

        Args:
            index: of the bucket, among the trainable ones.
            gradient: [S], reduced.
            l2: what `form_table` has returned.
        """
        name = f"zerokern::update {self.buckets[index].name}"
        with torch.autograd.profiler.record_function(name):
            self._launch[index](gradient, l2=l2)

    def tables(self) -> list[Tensor]:
        """Return the tensors that live as long as the optimizer, beside its state."""
        tables = [self.table, self.keys, self.steps, self.report, self._all_partials]
        tables += [self._group_of_column, self._seeds]
        for columns in self._maps:
            tables += [columns.block_column, columns.origin]
        return tables

    def _numbers(self, groups: Groups) -> list[float | Tensor]:
        """Return the numbers of every param group in the order of `ops.HYPER`."""
        rule = self.rule
        if not groups:
            return [0.0] * len(rule.entries)
        numbers: list[float | Tensor] = []
        for group in groups:
            for key, fixed in rule.fixed.items():
                if isinstance(group[key], Tensor) or group[key] != fixed:
                    rule.refuse(key, group[key])
            for entry in rule.entries:
                if isinstance(entry, float):
                    numbers.append(entry)
                    continue
                value = group[entry.key]
                if entry.key == MAXIMIZE:
                    value = -1.0 if value else 1.0
                numbers.append(value if entry.part is None else value[entry.part])
        return numbers

    def _send(self, numbers: Sequence[float | Tensor]) -> Tensor:
        """Return fp64 values on the device; tensors among them are copied there without
        a detour over the host."""
        plain = []
        tensors = []
        for index, number in enumerate(numbers):
            if isinstance(number, Tensor):
                tensors.append((index, number))
                number = 0.0
            plain.append(float(number))
        sent = self._upload("numbers", plain, torch.float64)
        for index, tensor in tensors:
            sent[index].copy_(tensor.detach().reshape(()))
        return sent

    def _upload(
        self,
        name: str,
        values: Any,
        dtype: torch.dtype,
    ) -> Tensor:
        # The user's default device may be another one.
        host = torch.tensor(values, dtype=dtype, device="cpu")
        if not self.table.is_cuda:
            return host
        if not torch.cuda.is_current_stream_capturing():
            # Memory of its own for every step: the copy of the last one may still be
            # under way.
            self._staged[name] = host.pin_memory()
        elif name in self._staged:
            # A capture must not allocate pinned memory.
            self._staged[name].copy_(host)
        else:
            raise RuntimeError(
                "a step was captured in a CUDA graph before any was run; run one as a"
                " warm-up first"
            )
        return self._staged[name].to(self.table.device, non_blocking=True)
