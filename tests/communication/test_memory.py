"""Bytes held: exactly what the formulas say, and scratch memory of a few buckets."""

from __future__ import annotations

import pytest
from footprint import DTYPES, train, trained
from marks import at_even_worlds, in_stages, in_stages_1_and_2
from oracle import differing


def theory(stage: int, dtype: str, w: int) -> dict[str, float]:
    """Return bytes per parameter by role, in a world of w; fp32 models have no master
    of their own."""
    if dtype == "fp32":
        return {
            "parameters": 4 / w if stage == 3 else 4,
            "gradients": 4 if stage == 1 else 4 / w,
            "master": 0,
            "moments": 8 / w,
        }
    return {
        "parameters": 2 / w if stage == 3 else 2,
        "gradients": 2 + 4 / w if stage == 1 else 4 / w,
        "master": 4 / w,
        "moments": 8 / w,
    }


@at_even_worlds
@in_stages
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ["parameters", "gradients", "master", "moments"])
def test_bytes_of_each_role(at: int, stage: int, dtype: str, role: str) -> None:
    """At rest after a step, on every rank."""
    per_parameter = theory(stage, dtype, at)[role]
    for result in trained(at)["plain", stage, dtype]:
        expected = per_parameter * result["payload"]
        held = getattr(result["memory"], role)
        assert held == pytest.approx(expected, rel=0.02)


@at_even_worlds
@in_stages
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_in_total(at: int, stage: int, dtype: str) -> None:
    """fp32: 16P -> 8P + 8P/W, 4P + 12P/W, 16P/W; tables and counters included."""
    per_parameter = sum(theory(stage, dtype, at).values())
    for result in trained(at)["plain", stage, dtype]:
        expected = per_parameter * result["payload"]
        assert result["memory"].total == pytest.approx(expected, rel=0.02)


@at_even_worlds
@in_stages
def test_training_adds_nothing_to_what_was_built(at: int, stage: int) -> None:
    for result in trained(at)["plain", stage, "fp32"]:
        assert result["memory"] == result["built"]


@at_even_worlds
@in_stages
@pytest.mark.parametrize(
    "case", ["plain", "accumulated", "no_sync", "clipped", "overlap off"]
)
def test_scratch_memory_returns_to_zero(at: int, stage: int, case: str) -> None:
    """That it does after evaluations and exceptions, the scripts tell."""
    key = (case, stage, "fp32") if case == "plain" else (case, stage)
    for result in trained(at)[key]:
        assert result["memory"].buffers == 0


@in_stages_1_and_2
def test_peak_scratch_is_a_few_buckets(stage: int) -> None:
    """At most two exchanges under way, each a bucket and its chunks, and the bucket
    that fills."""
    result = trained(4)["plain", stage, "fp32"][0]
    assert 0 < result["peak"] <= 5 * result["largest"]


def test_peak_scratch_of_stage3_is_a_few_units() -> None:
    """The root, two units whole, the gradients of one that fills and of two that travel
    with their chunks."""
    result = trained(4)["plain", 3, "fp32"][0]
    assert 0 < result["peak"] <= 8 * result["largest"]


def test_peak_scratch_of_stage3_does_not_grow_with_depth() -> None:
    shallow = trained(2)["layers", 5][0]
    deep = trained(2)["layers", 9][0]
    assert deep["peak"] == shallow["peak"]


@in_stages
def test_a_world_of_one_holds_16_bytes_per_parameter(stage: int) -> None:
    result = train(stage)
    expected = 16 * result["payload"]
    assert result["memory"].total == pytest.approx(expected, rel=0.02)


@at_even_worlds
@in_stages
def test_poisoned_scratch_changes_nothing(at: int, stage: int) -> None:
    """Nobody reads a buffer before it is filled or after it was given back."""
    with_poison = trained(at)["poison", stage]
    without = trained(at)["no poison", stage]
    for poisoned, plain in zip(with_poison, without, strict=True):
        assert differing(poisoned["params"], plain["params"]) == []
