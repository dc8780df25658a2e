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
from typing import Any, NamedTuple

import pytest
import ranks
from marks import in_stages
from oracle import STAGES, differing
from soak.alone import Oracle
from soak.life import Life, losses_differ
from soak.on_rank import Memory, live
from soak.script import FAULTS, Step
from soak.script import script as random_script

SEED = 20
RESIDENT_SLACK = 4 * 2**20
"""Bytes that a process may grow by in the last three quarters of a soak: the
allocator's, and the record of the run."""


class Size(NamedTuple):
    """Of a soak."""

    ranks: int
    steps: int

    def checkpoints(self) -> list[int]:
        """Return after how many steps everything is compared."""
        return [self.steps * quarter // 4 for quarter in (1, 2, 3, 4)]


SHORT = Size(ranks=2, steps=120)
LONG = [Size(ranks=2, steps=2000), Size(ranks=3, steps=400)]


@functools.cache
def script(size: Size) -> list[Step]:
    return random_script(SEED, size.steps, size.ranks)


@functools.cache
def expected(size: Size, stage: int) -> list[Life]:
    """Return what the oracle says of each rank. Stages 2 and 3 add up in one order."""
    return Oracle(stage, size.ranks).run(script(size), size.checkpoints())


@functools.cache
def short() -> ranks.Cases:
    """Run all stages on one group of ranks."""
    arguments = script(SHORT), SHORT.checkpoints()
    cases = {stage: functools.partial(live, stage, *arguments) for stage in STAGES}
    return ranks.run_cases(SHORT.ranks, cases)


@functools.cache
def long(size: Size, stage: int) -> list[Any]:
    """Run one stage on a group of its own."""
    return ranks.run(size.ranks, live, stage, script(size), size.checkpoints())


def lived(size: Size, stage: int) -> list[tuple[Life, Memory]]:
    """Return what each rank saw and held."""
    return short()[stage] if size == SHORT else long(size, stage)


of_sizes = pytest.mark.parametrize(
    "size",
    [SHORT, *(pytest.param(size, marks=pytest.mark.long) for size in LONG)],
    ids=lambda size: f"world{size.ranks}-{size.steps} steps",
)


@in_stages
@of_sizes
def test_weights_and_state_have_the_oracles_bits(size: Size, stage: int) -> None:
    """Also on the way, and every loss and every parameter that was read in between."""
    oracles = expected(size, min(stage, 2))
    for (ours, _), theirs in zip(lived(size, stage), oracles, strict=True):
        assert losses_differ(ours, theirs) == ()
        for step in size.checkpoints():
            wrong = differing(ours.whole[step], theirs.whole[step])
            assert wrong == [], f"after {step} steps"
        assert ours.skipped == theirs.skipped > 0
        assert ours.faults == theirs.faults > 0
        assert ours.norms == pytest.approx(theirs.norms, rel=2e-7, nan_ok=True)


@in_stages
@of_sizes
def test_memory_is_flat(size: Size, stage: int) -> None:
    """Bytes by role, scratch memory at its peak, tensors that Python knows of."""
    quarter = size.steps // 4
    for _, memory in lived(size, stage):
        assert all(roles == memory.roles[0] for roles in memory.roles)
        assert not any(memory.after_faults)
        assert memory.peak[-1] == memory.peak[quarter]
        assert len(memory.tensors) > size.steps // 20
        assert len(set(memory.tensors)) == 1
        assert memory.roles[0]["buffers"] == 0


def without_gradients(roles: dict[str, int]) -> dict[str, int]:
    return {role: bytes_ for role, bytes_ in roles.items() if role != "gradients"}


@in_stages
@of_sizes
def test_an_abandoned_step_leaves_no_memory_but_local_gradients(
    size: Size, stage: int
) -> None:
    """A gradient that was zeroed in place, and not set to None, still is one."""
    for _, memory in lived(size, stage):
        wanted = without_gradients(memory.roles[0])
        for roles in memory.abandoned:
            assert without_gradients(roles) == wanted


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
    assert losses_differ(once, each) != ()
    assert differing(once.whole[SHORT.steps], each.whole[SHORT.steps]) != []


def test_the_script_has_every_event() -> None:
    """Of some events there are many, of each there is one."""
    steps = script(SHORT)
    micros = [micro for step in steps for micro in step.micros]
    assert {step.fault[0] for step in steps if step.fault} == set(FAULTS)
    assert {len(step.micros) for step in steps} == {1, 2, 3}
    assert {micro.checkpoint for micro in micros} == {None, False, True}
    for field in ("set_to_none", "zeroed_by_model", "reload"):
        assert {getattr(step, field) for step in steps} == {True, False}, field
    for field in ("no_sync", "evaluate", "read"):
        assert {getattr(micro, field) for micro in micros} == {True, False}, field
    assert any(len(set(micro.uses)) > 1 for micro in micros)
    assert {step.clip for step in steps} == {None, 0.3, 100.0}
    completed = [step.micros for step in steps if step.fault is None]
    assert any(m.infinite_on is not None for micros in completed for m in micros)
    assert any(all(micro.no_sync for micro in micros) for micros in completed)
