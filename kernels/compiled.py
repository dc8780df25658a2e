"""The reference update compiled for the CPU: the same element-wise function as one C++ loop, and the same bits.

`torch.compile` turns the specification into one pass over memory. Inductor keeps floating-point contraction off, and its
vectorised square root rounds correctly, so nothing of the numeric specification is lost; a test compares the bits.
The first use compiles for some 15 s (from Inductor's cache: about 1 s) and needs a C++ compiler, so `ops` takes this path
only where a shard is large enough to repay that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .reference import BLOCK, RowMap

# Inductor would store intermediates that are read more than a few times, which costs a second pass over memory.
ONE_PASS = {"realize_opcount_threshold": 10_000, "realize_reads_threshold": 10_000, "realize_acc_reads_threshold": 10_000}


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile at the first call, not at import."""

    @functools.cache
    def build() -> Callable[..., None]:
        return torch.compile(function, dynamic=True, fullgraph=True, options=dict(ONE_PASS))  # type: ignore[return-value]

    @functools.wraps(function)
    def call(*args: Any) -> None:
        with torch.no_grad():
            build()(*args)

    return call


@_compiled
def _update(w: Tensor, m: Tensor, v: Tensor, g: Tensor, table: Tensor, block_row: Tensor, l2: bool) -> None:
    columns = table[:, block_row].unsqueeze(2).unbind(0)
    updated = reference.adamw_elements(w, m, v, g, columns, l2, torch.sqrt)
    for tensor, value in zip((w, m, v), updated, strict=True):
        tensor.copy_(value)


@_compiled
def _update_master(
    p: Tensor, w: Tensor, m: Tensor, v: Tensor, g: Tensor, table: Tensor, block_row: Tensor, l2: bool
) -> None:
    columns = table[:, block_row].unsqueeze(2).unbind(0)
    updated = reference.adamw_elements(w, m, v, g, columns, l2, torch.sqrt)
    for tensor, value in zip((w, m, v), updated, strict=True):
        tensor.copy_(value)
    p.copy_(updated[0])


def adamw_(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    table: Tensor,
    rows: RowMap,
    l2: bool = False,
) -> None:
    """`reference.adamw_` in one pass over memory, on the CPU."""
    moments = (exp_avg.view(-1, BLOCK), exp_avg_sq.view(-1, BLOCK), grad.view(-1, BLOCK))
    if master is None:
        _update(param.view(-1, BLOCK), *moments, table, rows.block_row, l2)
    else:
        _update_master(param.view(-1, BLOCK), master.view(-1, BLOCK), *moments, table, rows.block_row, l2)
