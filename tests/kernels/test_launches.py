"""How many kernels a step launches: a few per bucket, whatever the number of parameters
and groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import zerokern
from zerokern.kernels import pack, reduce, scalars, update

TENSORS, GROUPS = 2_000, 10


def launches_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
    optimizer: Any,
    params: list[nn.Parameter],
) -> Counter[str]:
    """Return the launches of one backward and step by kernel, counted instead of
    run."""
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for module in (pack, reduce, scalars, update):
            patch.setattr(
                module,
                "launch",
                lambda kernel, programs, *rest, **options: counts.update(
                    [kernel.fn.__name__]
                ),
            )
        for bucket in optimizer.coordinator.gradients:
            bucket.packs_at_once = True  # as on a GPU
        sum(p.sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("bucket_bytes", [2**16, 2**30])
@pytest.mark.parametrize(
    "precision",
    [zerokern.Precision(), zerokern.Precision(master="split24", moments="8bit")],
    ids=["master32", "split24-8bit"],
)
def test_three_launches_per_bucket(
    monkeypatch: pytest.MonkeyPatch,
    bucket_bytes: int,
    precision: zerokern.Precision,
) -> None:
    """Pack, reduce and update for a bucket of any number of parameters; scalars once a
    step."""
    monkeypatch.setenv("ZEROKERN_BACKEND", "triton")  # read when it is built
    params = [
        nn.Parameter(torch.ones(256, dtype=torch.bfloat16)) for _ in range(TENSORS)
    ]
    groups = [
        {"params": params[i::GROUPS], "lr": 1e-3 * (i + 1)} for i in range(GROUPS)
    ]
    optimizer = zerokern.AdamW(
        groups,
        precision=precision,
        buckets=zerokern.Buckets(bytes=bucket_bytes),
    )
    buckets = len(optimizer.coordinator.gradients)
    assert (buckets == 1) == (bucket_bytes == 2**30)
    for _ in range(2):
        counts = launches_of_a_step(monkeypatch, optimizer, params)
        assert counts == {
            "pack_kernel": buckets,
            "reduce_kernel": buckets,
            "update_kernel": buckets,
            "scalars_kernel": 1,
        }
