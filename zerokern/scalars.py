"""The one small vector of a step: sums of squares and used bits go in, the scalar table
comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .comm import Comm
from .rules import UpdateRule, is_nonzero

WORD_BITS = 32
"""Used bits per int64 word: half of it, so that no shift meets the sign."""


class StepScalars:
    """Scalar table, step counters, random keys and report of one optimizer on one
    rank."""

    def __init__(
        self,
        rule: UpdateRule,
        group_of_column: Sequence[int],
        seeds: Sequence[int],
        partials: Tensor,
        comm: Comm,
    ) -> None:
        """Set up a counter per row.

        Args:
            rule: whose numbers the table holds.
            group_of_column: the param group of each trainable parameter.
            seeds: what its random bits derive from.
            partials: fp64, every bucket's sums of squares, one after the other.
            comm: the group whose ranks share the norm.
        """
        device, num_columns = partials.device, len(group_of_column)
        self.rule, self.comm, self.partials = rule, comm, partials
        self.table = torch.zeros(
            len(ops.TABLE), num_columns, dtype=torch.float32, device=device
        )
        self.keys = torch.zeros(num_columns, dtype=torch.int64, device=device)
        self.steps = torch.zeros(num_columns, dtype=torch.int64, device=device)
        self.report = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=device)
        """Total gradient norm before clipping, clip coefficient, steps skipped for
        non-finite gradients."""
        self.group_of_column = torch.tensor(
            group_of_column, dtype=torch.int64, device=device
        )
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
        self.gathered: Tensor | None = None
        """The words of this step, once exchanged."""
        self._staged: dict[str, Tensor] = {}
        """What the last step sent to the GPU, in pinned memory; a CUDA graph reads it
        from there at every replay."""

    def gather(self, used: Sequence[bool], *, guarded: bool = True) -> None:
        """Exchange sums of squares and used bits.

        Args:
            used: by row.
            guarded: skip the step if the sum is not finite; else zero is sent in its
                place.
        """
        bits = [0] * -(-len(used) // WORD_BITS)
        for row, is_used in enumerate(used):
            bits[row // WORD_BITS] |= is_used << (row % WORD_BITS)
        words = self._upload("words", [0, *bits], torch.int64)
        if guarded:
            words[:1].copy_(self.partials.sum().view(1).view(torch.int64))
        self.gathered = self.comm.all_gather_words(words)

    def norm(self, loss_scale: Tensor | None = None) -> Tensor:
        """Return the fp64 total norm of the gathered gradients, a 0-d tensor, with the
        loss scale divided out."""
        assert self.gathered is not None
        norm = self.gathered[:, 0].contiguous().view(torch.float64).sum().sqrt()
        return (
            norm
            if loss_scale is None
            else norm / loss_scale.to(norm.device, torch.float64)
        )

    def was_used(self, row: int) -> bool:
        """Return whether any rank has a gathered gradient of a parameter. The host
        waits for the answer."""
        assert self.gathered is not None
        words = self.gathered[:, 1 + row // WORD_BITS]
        return bool(((words >> row % WORD_BITS) & 1).any())

    def report_norm(self) -> None:
        """Note the gathered norm, without an update."""
        self.report[:1].copy_(self.norm())
        self.gathered = None

    def form(
        self,
        groups: Sequence[Mapping[str, Any]],
        max_norm: float | Tensor | None,
        loss_scale: Tensor | None,
    ) -> bool:
        """Fill the table for one update and advance the counters.

        Args:
            groups: param groups in torch's form; numbers or 0-d tensors.
            max_norm: clip the gradients to this total norm.
            loss_scale: what the gradients were multiplied with.

        Returns:
            Whether a group adds decay to its gradients instead of decaying the weight.
        """
        assert self.gathered is not None
        numbers = [self.rule.numbers(group) for group in groups]
        limits: list[float | Tensor] = [
            math.inf if max_norm is None else max_norm,
            1.0 if loss_scale is None else loss_scale,
        ]
        ops.scalars_(
            self.table,
            self.keys,
            self.steps,
            self.report,
            rule=self.rule.kernel,
            hyper=self._matrix("hyper", numbers),
            group_of_column=self.group_of_column,
            seeds=self.seeds,
            gathered=self.gathered,
            limits=self._matrix("limits", [limits])[0],
        )
        self.gathered = None
        decay, decoupled = ops.HYPER.index("weight_decay"), ops.HYPER.index("decoupled")
        return any(row[decoupled] == 0.0 and is_nonzero(row[decay]) for row in numbers)

    def tables(self) -> list[Tensor]:
        """Return the tensors that live as long as the optimizer."""
        return [
            self.table,
            self.keys,
            self.steps,
            self.report,
            self.partials,
            self.group_of_column,
            self.seeds,
        ]

    def _matrix(self, name: str, rows: Sequence[Sequence[float | Tensor]]) -> Tensor:
        """Return fp64 values on the device; tensors among them are copied there without
        a detour over the host."""
        numbers = [
            [0.0 if isinstance(x, Tensor) else float(x) for x in row] for row in rows
        ]
        matrix = self._upload(name, numbers, torch.float64)
        for i, row in enumerate(rows):
            for j, x in enumerate(row):
                if isinstance(x, Tensor):
                    matrix[i, j].copy_(x.detach().reshape(()))
        return matrix

    def _upload(self, name: str, values: Any, dtype: torch.dtype) -> Tensor:
        host = torch.tensor(values, dtype=dtype)
        if not self.table.is_cuda:
            return host
        if not torch.cuda.is_current_stream_capturing():
            # Memory of its own for every step: the copy of the last one may still be
            # under way.
            self._staged[name] = host.pin_memory()
        elif name in self._staged:
            self._staged[name].copy_(host)  # a capture must not allocate pinned memory
        else:
            raise RuntimeError(
                "a step was captured in a CUDA graph before any was run; run one as a"
                " warm-up first"
            )
        return self._staged[name].to(self.table.device, non_blocking=True)
