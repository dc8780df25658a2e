"""Bytes on the wire: exactly what the formulas say, padding stated."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import ranks
import torch
from footprint import ACCUMULATED, DTYPES, train, trained
from marks import at_even_worlds, in_stages
from oracle import STAGES, world

Result = dict[str, Any]


def elements(result: Result) -> dict[str, int]:
    """Return the elements of whole buffers in one step, by operation."""
    total: Counter[str] = Counter()
    for call in result["log"]:
        total[call.op] += call.elements
    return dict(total)


def calls(result: Result) -> dict[str, int]:
    """Return the number of collectives in one step, by operation."""
    return Counter(call.op for call in result["log"])


def phases(result: Result, op: str) -> set[str]:
    """Return when an operation is issued."""
    return {call.phase for call in result["log"] if call.op == op}


def sent(result: Result, op: str) -> int:
    """Return the bytes one rank sent in one step, by operation."""
    return sum(call.bytes for call in result["log"] if call.op == op)


@at_even_worlds
@in_stages
@pytest.mark.parametrize("dtype", DTYPES)
def test_volume_of_a_step(at: int, stage: int, dtype: str) -> None:
    """2P, 2P and 3P elements times (W - 1) / W, with the layout's padding, and one
    small vector."""
    itemsize = torch.empty((), dtype=DTYPES[dtype]).element_size()
    for result in trained(at)["plain", stage, dtype]:
        padded = result["padded"]
        gathers = 2 if stage == 3 else 1
        words = at * (1 + -(-result["columns"] // 32))
        assert elements(result) == {
            "reduce_scatter": padded,
            "all_gather": gathers * padded,
            "all_gather_words": words,
        }
        num_bytes = padded * itemsize * (at - 1)
        assert sent(result, "reduce_scatter") == num_bytes // at
        assert sent(result, "all_gather") == gathers * num_bytes // at


@at_even_worlds
@in_stages
def test_padding_on_the_wire_is_small(at: int, stage: int) -> None:
    result = trained(at)["plain", stage, "fp32"][0]
    # Buckets of 40 kB; 1 % of a real model's, see test_layout.
    assert result["padded"] < 1.02 * result["payload"]


@at_even_worlds
def test_stage1_reduces_once_however_many_backwards(at: int) -> None:
    """2P after 8 micro-batches without any context."""
    for result in trained(at)["accumulated", 1]:
        padded, moved = result["padded"], elements(result)
        assert moved["reduce_scatter"] == padded
        assert moved["all_gather"] == padded


@at_even_worlds
def test_stage2_reduces_every_backward(at: int) -> None:
    """A x P + P: the price of keeping gradients sharded."""
    for result in trained(at)["accumulated", 2]:
        padded, moved = result["padded"], elements(result)
        assert moved["reduce_scatter"] == ACCUMULATED * padded
        assert moved["all_gather"] == padded


@at_even_worlds
def test_stage3_gathers_and_reduces_every_backward(at: int) -> None:
    for result in trained(at)["accumulated", 3]:
        padded, moved = result["padded"], elements(result)
        assert moved["reduce_scatter"] == ACCUMULATED * padded
        assert moved["all_gather"] == 2 * ACCUMULATED * padded


@at_even_worlds
@in_stages
def test_no_sync_reduces_once(at: int, stage: int) -> None:
    """It is not a silent no-op."""
    gathers = 2 * ACCUMULATED if stage == 3 else 1
    for result in trained(at)["no_sync", stage]:
        padded, moved = result["padded"], elements(result)
        assert moved["reduce_scatter"] == padded
        assert moved["all_gather"] == gathers * padded


@at_even_worlds
@in_stages
def test_clipping_and_overlap_change_no_volume(at: int, stage: int) -> None:
    """The norm rides on the one small vector; a collective per bucket and
    direction, no more."""
    plain = trained(at)["plain", stage, "fp32"][0]
    for other in ("clipped", "overlap off"):
        result = trained(at)[other, stage][0]
        assert elements(result) == elements(plain)
        assert calls(result) == calls(plain)


@at_even_worlds
@in_stages
def test_every_record_says_group_and_step(at: int, stage: int) -> None:
    result = trained(at)["plain", stage, "fp32"][0]
    for call in result["log"]:
        assert call.group == at
        assert call.step == 1
        assert call.phase in ("forward", "backward", "step")


@at_even_worlds
def test_stages_1_and_2_reduce_in_backward_and_gather_in_the_step(at: int) -> None:
    for stage in (1, 2):
        result = trained(at)["plain", stage, "fp32"][0]
        assert phases(result, "reduce_scatter") == {"backward"}
        assert phases(result, "all_gather") == {"step"}


@functools.cache
def trained_alone() -> ranks.Cases:
    """Train in a process group of one."""
    cases = {stage: functools.partial(train, stage) for stage in STAGES}
    return ranks.run_cases(1, cases)


@in_stages
def test_a_world_of_one_sends_nothing(stage: int) -> None:
    """With and without a process group."""
    assert train(stage)["log"] == ()
    assert trained_alone()[stage][0]["log"] == ()


def test_world_is_one_without_a_process_group() -> None:
    assert world() == 1
