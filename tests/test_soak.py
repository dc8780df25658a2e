"""A soak: random exceptions, skips, accumulation, evaluation and much else, for 2,000
steps in each stage.

Weights and state have the oracle's bits at the end and on the way, and memory is flat.
Losses and checksums along the way say at which step a difference began.

Clip coefficients are formed from sums of squares that are fp64 in another order than
the oracle's: 1e-15 apart, so they round to another fp32 number once in some 10^7 steps.
A script is the same at every run, and none has that step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import soak
from oracle import STAGES, differing

SEED = 20
RESIDENT_SLACK = 4 * 2**20
"""Bytes that a process may grow by in the last three quarters of a soak: the
allocator's, and the record of the run."""

SHORT = (2, 120)
LONG = [(2, 2000), (3, 400)]
Key = tuple[int, int]


def checkpoints(steps: int) -> list[int]:
    """Return after how many steps everything is compared."""
    return [steps // 4, steps // 2, 3 * steps // 4, steps]


@functools.cache
def script(key: Key) -> list[soak.Step]:
    """Return the steps of a world."""
    return soak.script(SEED, key[1], key[0])


@functools.cache
def expected(key: Key, stage: int) -> list[soak.Life]:
    """Return what the oracle says of each rank. Stages 2 and 3 add up in one order."""
    return soak.Oracle(stage, key[0]).run(script(key), checkpoints(key[1]))


@functools.cache
def short(key: Key) -> ranks.Cases:
    """Run all stages on one group of ranks."""
    return ranks.run_cases(
        key[0],
        {
            stage: functools.partial(soak.live, stage, script(key), checkpoints(key[1]))
            for stage in STAGES
        },
    )


@functools.cache
def long(key: Key, stage: int) -> list[Any]:
    """Run one stage on a group of its own."""
    return ranks.run(key[0], soak.live, stage, script(key), checkpoints(key[1]))


def lived(key: Key, stage: int) -> list[tuple[soak.Life, soak.Memory]]:
    """Return what each rank saw and held."""
    return short(key)[stage] if key == SHORT else long(key, stage)


in_worlds = pytest.mark.parametrize(
    "key",
    [SHORT, *(pytest.param(key, marks=pytest.mark.long) for key in LONG)],
    ids=lambda key: f"world{key[0]}-{key[1]} steps",
)
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


@in_stages
@in_worlds
def test_weights_and_state_have_the_oracles_bits(key: Key, stage: int) -> None:
    """Also on the way, and every loss and every parameter that was read in between."""
    for (ours, _), theirs in zip(
        lived(key, stage), expected(key, min(stage, 2)), strict=True
    ):
        assert soak.losses_differ(ours, theirs) == ()
        for step in checkpoints(key[1]):
            assert differing(ours.whole[step], theirs.whole[step]) == [], (
                f"after {step} steps"
            )
        assert ours.skipped == theirs.skipped > 0
        assert ours.faults == theirs.faults > 0
        assert ours.norms == pytest.approx(theirs.norms, rel=2e-7, nan_ok=True)


@in_stages
@in_worlds
def test_memory_is_flat(key: Key, stage: int) -> None:
    """Bytes by role, scratch memory at its peak, tensors that Python knows of."""
    quarter = key[1] // 4
    for _, memory in lived(key, stage):
        assert all(roles == memory.roles[0] for roles in memory.roles)
        assert not any(memory.after_faults)
        assert memory.peak[-1] == memory.peak[quarter]
        assert len(memory.tensors) > key[1] // 20
        assert len(set(memory.tensors)) == 1
        assert memory.roles[0]["buffers"] == 0


@in_stages
@in_worlds
def test_an_abandoned_step_leaves_no_memory_but_local_gradients(
    key: Key, stage: int
) -> None:
    """A gradient that was zeroed in place, and not set to None, still is one."""
    for _, memory in lived(key, stage):
        wanted = {
            role: value
            for role, value in memory.roles[0].items()
            if role != "gradients"
        }
        for roles in memory.abandoned:
            assert {
                role: value for role, value in roles.items() if role != "gradients"
            } == wanted


@pytest.mark.long
@in_stages
def test_processes_do_not_grow(stage: int) -> None:
    """Resident memory over the last 1,500 steps of 2,000."""
    for _, memory in lived(LONG[0], stage):
        later = memory.resident[len(memory.resident) // 4 :]
        assert max(later) - later[0] <= RESIDENT_SLACK


def test_the_comparison_sees_another_order_of_sums() -> None:
    """Stage 1 adds micro-batches before ranks, stage 2 after: the two oracles are
    close, and not the same."""
    once, each = (expected(SHORT, stage)[0] for stage in (1, 2))
    assert soak.losses_differ(once, each) != ()
    assert differing(once.whole[SHORT[1]], each.whole[SHORT[1]]) != []


def test_the_script_has_every_event() -> None:
    """Of some events there are many, of each there is one."""
    steps = script(SHORT)
    micros = [micro for step in steps for micro in step.micros]
    assert {step.fault[0] for step in steps if step.fault} == set(soak.FAULTS)
    assert {len(step.micros) for step in steps} == {1, 2, 3}
    assert {micro.checkpoint for micro in micros} == {None, False, True}
    for field in ("set_to_none", "zeroed_by_model", "reload"):
        assert {getattr(step, field) for step in steps} == {True, False}, field
    for field in ("no_sync", "evaluate", "read"):
        assert {getattr(micro, field) for micro in micros} == {True, False}, field
    assert any(len(set(micro.uses)) > 1 for micro in micros)
    assert {step.clip for step in steps} == {None, 0.3, 100.0}
    assert any(
        micro.infinite_on is not None
        for step in steps
        if step.fault is None
        for micro in step.micros
    )
    assert any(
        all(micro.no_sync for micro in step.micros)
        for step in steps
        if step.fault is None
    )


# ------------------------------------------------------------------ one event at a time

USES = (("left", "right"), ("right", "left"))
ZEROS = tuple(itertools.product(("optimizer", "model"), (True, False)))
LAYOUTS = tuple(
    pair for pair in itertools.product(STAGES, (False, True)) if pair != (3, True)
)
"""Stages, and whether buckets are small. Small units in stage 3 would be units that
only some ranks run."""
ABANDONED = tuple((*layout, zero) for layout, zero in itertools.product(LAYOUTS, ZEROS))
ZEROED = tuple(
    (*layout, who) for layout, who in itertools.product(LAYOUTS, ("optimizer", "model"))
)


@functools.cache
def single() -> ranks.Cases:
    """Run small cases on two ranks that use different branches."""
    cases: dict[Any, Callable[[], Any]] = {}
    for stage, fine in LAYOUTS:
        cases[stage, fine] = functools.partial(
            soak.after_an_abandoned_step, stage, None, ZEROS[0], fine=fine
        )
    for stage, fine, zero in ABANDONED:
        run = functools.partial(
            soak.after_an_abandoned_step, stage, zero=zero, fine=fine
        )
        cases[stage, fine, zero] = lambda run=run: [run(uses=uses) for uses in USES]
    for stage, fine, who in ZEROED:
        run = functools.partial(soak.step_without_a_gradient, stage, who=who, fine=fine)
        cases[stage, fine, who] = lambda run=run: [run(uses=uses) for uses in USES]
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("key", ABANDONED, ids=str)
def test_nothing_of_an_abandoned_step_is_left(key: Any) -> None:
    """Nor where a rank's shard holds what only another rank has contributed, whose
    p.grad it does not have."""
    for found, wanted in zip(single()[key], single()[key[:2]], strict=True):
        assert [differing(ours, wanted) for ours in found] == [[], []]


@pytest.mark.parametrize("key", ZEROED, ids=str)
def test_what_was_zeroed_in_place_is_zero_at_the_step(key: Any) -> None:
    """On every rank's shard, whoever had used the parameter."""
    for found in single()[key]:
        assert [
            name
            for moments in found
            for name, value in moments.items()
            if value.count_nonzero()
        ] == []
