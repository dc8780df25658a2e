"""The size of buckets changes no bit: sums have one order, whatever lies where."""

from __future__ import annotations

import functools
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import Run, differing, distance, world

import zerokern

SIZES = {
    "one parameter": 1,
    "1 KiB": 2**10,
    "64 KiB": 2**16,
    "whole model": 2**30,
}
SIZE_CASES = [
    *((1, size) for size in SIZES),
    (2, "one parameter"),
    (2, "1 KiB"),
    (3, "one parameter"),
]
"""By stage."""


def _of_size(stage: int, size: str) -> dict[str, Any]:
    build = functools.partial(models.gpt, width=24, layers=1, vocabulary=512)
    buckets = zerokern.Buckets(bytes=SIZES[size])
    run = Run(stage, world(), build=build, buckets=buckets)
    norms = []
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        norms.append(run.optimizer.clip_grad_norm_(1e9).clone())
        run.step()
    return {
        **run.result(),
        "norms": torch.stack(norms),
        "buckets": len(run.optimizer.coordinator.gradients),
    }


@functools.cache
def of_sizes(at: int) -> ranks.Cases:
    """Train with buckets of every size."""
    cases = {case: functools.partial(_of_size, *case) for case in SIZE_CASES}
    return ranks.run_cases(at, cases)


@pytest.mark.parametrize("at", (2, 3, 4), ids="world{}".format)
@pytest.mark.parametrize(("stage", "size"), SIZE_CASES)
def test_bucket_size_changes_no_bit(at: int, stage: int, size: str) -> None:
    base = of_sizes(at)[1, "whole model"]
    results = of_sizes(at)[stage, size]
    for ours, theirs in zip(results, base, strict=True):
        assert differing(ours["params"], theirs["params"]) == []
        assert differing(ours["state"], theirs["state"]) == []
        assert distance(ours["norms"], theirs["norms"]) <= 1e-6


def test_bucket_sizes_differ() -> None:
    results = [of_sizes(2)[1, size] for size in SIZES]
    counts = [of_ranks[0]["buckets"] for of_ranks in results]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 4
    assert counts[-1] == 1
