"""Shards of more than 2^31 elements, on the CPU. `python -m bench.gpu` does the same to
the compiled kernels."""

from __future__ import annotations

import math
import os

import pytest
import torch

from zerokern import ops
from zerokern.kernels import native

NUMEL = 2**31 + 2**20
SENTINELS = (0, 2**31 - 1, 2**31, NUMEL - 1)
NEEDED_GIB = 10


def available_gib() -> float:
    """Return the memory that this machine has left."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not native.available(),
        reason="no C compiler, and the reference would take an hour",
    ),
    pytest.mark.skipif(
        available_gib() < NEEDED_GIB,
        reason=f"needs {NEEDED_GIB} GiB of free memory",
    ),
]


def test_an_update_reaches_every_element_beyond_2_to_the_31() -> None:
    """No offset wraps, no count turns negative, no call does nothing in silence."""
    param = torch.ones(NUMEL, dtype=torch.bfloat16)
    grad = torch.ones(NUMEL, dtype=torch.bfloat16)
    blocks = NUMEL // ops.BLOCK
    columns = ops.ColumnMap(
        torch.zeros(blocks, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        ((0, blocks, 0, 0),),
    )
    table = torch.zeros(len(ops.TABLE), 1)
    for name, value in {
        "coef": 1.0,
        "decay": 1.0,
        "step_size": 0.5,
        "active": 1.0,
    }.items():
        table[ops.TABLE.index(name)] = value
    ops.update_(
        ops.Shard(param, None, None),
        grad,
        rule="sgd",
        table=table,
        keys=torch.zeros(1, dtype=torch.int64),
        columns=columns,
    )
    assert [param[index].item() for index in SENTINELS] == [0.5] * 4
    chunk = 2**28
    for start in range(0, NUMEL, chunk):
        assert (param[start : start + chunk] == 0.5).all()


def test_a_norm_of_more_than_2_to_the_31_elements() -> None:
    chunk = torch.ones(NUMEL, dtype=torch.bfloat16)
    partials = torch.zeros(ops.partials_numel(NUMEL), dtype=torch.float64)
    ops.reduce_(
        chunk,
        chunk,
        chunk.new_empty(0, NUMEL),
        partials,
        rank=0,
        scale=1.0,
    )
    assert math.sqrt(partials.sum().item()) == pytest.approx(
        math.sqrt(NUMEL),
        rel=1e-12,
    )
