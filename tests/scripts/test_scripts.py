"""Every script trains like torch in every stage, sends the same on all ranks and leaves
nothing behind."""

from __future__ import annotations

import models
import pytest
import ranks
from at_rest import same_on_all_ranks
from oracle import STAGES, Run
from registry import assert_like_torch
from scripts import SCRIPTS

at_worlds = pytest.mark.parametrize("at", ranks.worlds(1, 2, rarely=3))
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
RUNS = [
    pytest.param(
        name,
        stage,
        at,
        marks=[pytest.mark.long] * (at == 3)
        or [pytest.mark.slow] * (at == 2 and SCRIPTS.is_one_of_many(name)),
        id=f"{name}-{stage}-world{at}",
    )
    for at in (1, 2, 3)
    for name, stage in SCRIPTS.runs()
]
of_runs = pytest.mark.parametrize(("name", "stage", "at"), RUNS)


@of_runs
def test_agrees_with_torch(name: str, stage: int, at: int) -> None:
    """Parameters, moments, step counters and whatever the script observed, on every
    rank."""
    for result in SCRIPTS.played(name, stage, at):
        if SCRIPTS[name].exact:
            assert_like_torch(result, SCRIPTS.expected(name, at))


@of_runs
def test_leaves_no_scratch_memory(name: str, stage: int, at: int) -> None:
    """Nothing gathered and no bucket stays, after each step and each evaluation."""
    for result in SCRIPTS.played(name, stage, at):
        assert not any(result["buffers"])


@of_runs
def test_ranks_log_the_same_collectives(name: str, stage: int, at: int) -> None:
    """One global order, also when the ranks' graphs differ."""
    results = SCRIPTS.played(name, stage, at)
    assert same_on_all_ranks([result["log"] for result in results])


NOT_FINITE = [name for name in SCRIPTS if "_skips_" in name]


@at_worlds
@in_stages
@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_skipped_step_is_counted_on_every_rank(
    name: str, stage: int, at: int
) -> None:
    assert {result["skipped"] for result in SCRIPTS.played(name, stage, at)} == {1}


def test_finite_scripts_skip_nothing() -> None:
    for name, stage in SCRIPTS.runs():
        if name not in NOT_FINITE:
            for result in SCRIPTS.played(name, stage, 1):
                assert result["skipped"] == 0, name


@at_worlds
@in_stages
def test_both_uses_of_a_unit_count_in_bf16(stage: int, at: int) -> None:
    """One missing use would change a first moment by a third; bf16 gradients change it
    by a few per cent."""
    name = "a_unit_is_used_twice_in_bf16"
    run = Run(None, at, build=models.forked)
    SCRIPTS[name].loop(run)
    expected = run.result()["state"]
    for result in SCRIPTS.played(name, stage, at):
        for block in (0, 1):
            for layer in ("up", "down", "norm"):
                key = f"blocks.{block}.{layer}.weight/exp_avg"
                away = (result["state"][key] - expected[key]).norm()
                assert away < 0.06 * expected[key].norm(), key
