"""The one small vector of a step: sums of squares and used bits go in, the scalar table comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .comm import Comm

WORD_BITS = 32
"""Used bits per int64 word: half of it, so that no shift meets the sign."""


class StepScalars:
    """Scalar table, step counters and report of one optimizer on one rank."""

    def __init__(self, rows: int, group_of_row: Sequence[int], partials: Tensor, comm: Comm) -> None:
        """Set up R = `rows` counters.

        Args:
            rows: number of trainable parameters.
            group_of_row: the parameter group of each.
            partials: fp64, every bucket's sums of squares, one after the other.
            comm: the group whose ranks share the norm.
        """
        device = partials.device
        self.comm, self.partials = comm, partials
        self.table = torch.zeros(len(ops.TABLE), rows, dtype=torch.float32, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self.report = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=device)
        """Total gradient norm before clipping, clip coefficient, steps skipped for non-finite gradients."""
        self.group_of_row = torch.tensor(group_of_row, dtype=torch.int64, device=device)
        self.gathered: Tensor | None = None
        """The words of this step, once exchanged."""

    def gather(self, used: Sequence[bool]) -> None:
        """Exchange sums of squares and used bits."""
        bits = [0] * -(-len(used) // WORD_BITS)
        for row, is_used in enumerate(used):
            bits[row // WORD_BITS] |= is_used << (row % WORD_BITS)
        words = self._upload([0, *bits], torch.int64)
        words[:1].copy_(self.partials.sum().view(1).view(torch.int64))
        self.gathered = self.comm.all_gather_words(words)

    def norm(self) -> Tensor:
        """Return the fp64 total norm of the gathered gradients, a 0-d tensor."""
        assert self.gathered is not None
        return self.gathered[:, 0].contiguous().view(torch.float64).sum().sqrt()

    def form(self, groups: Sequence[Mapping[str, Any]], max_norm: float | Tensor | None) -> None:
        """Fill the table for one update and advance the counters.

        Args:
            groups: param groups in torch's form; numbers or 0-d tensors.
            max_norm: clip the gradients to this total norm.
        """
        assert self.gathered is not None
        hyper = self._matrix([_hyper_row(group) for group in groups])
        limits = self._matrix([[math.inf if max_norm is None else max_norm, 1.0]])[0]
        ops.scalars_(
            self.table, self.steps, self.report,
            hyper=hyper, group_of_row=self.group_of_row, gathered=self.gathered, limits=limits,
        )  # fmt: skip
        self.gathered = None

    def _matrix(self, rows: Sequence[Sequence[float | Tensor]]) -> Tensor:
        """Return fp64 values on the device; tensors among them are copied there without a detour over the host."""
        numbers = [[0.0 if isinstance(x, Tensor) else float(x) for x in row] for row in rows]
        matrix = self._upload(numbers, torch.float64)
        for i, row in enumerate(rows):
            for j, x in enumerate(row):
                if isinstance(x, Tensor):
                    matrix[i, j].copy_(x.detach().reshape(()))
        return matrix

    def _upload(self, values: Any, dtype: torch.dtype) -> Tensor:
        host = torch.tensor(values, dtype=dtype)
        if self.table.is_cuda:
            return host.pin_memory().to(self.table.device, non_blocking=True)
        return host


def _hyper_row(group: Mapping[str, Any]) -> list[float | Tensor]:
    """Return one group's numbers in the order of ops.HYPER."""
    beta1, beta2 = group["betas"]
    sign = -1.0 if group["maximize"] else 1.0
    decoupled = float(group["decoupled_weight_decay"])
    return [group["lr"], beta1, beta2, group["eps"], group["weight_decay"], sign, decoupled]
