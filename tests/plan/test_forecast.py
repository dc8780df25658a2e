"""The planner tells the truth: rehearsals against runs of several ranks."""

from __future__ import annotations

import functools

import foresight
import pytest
import ranks
from foresight import Case

EVERY = {2: 8, 4: 24}
"""Of so many cases one is in the default suite, by size of the world; the whole grid
takes ten minutes."""
PEAK = 0.03


def grid(*, whole: bool) -> list[Case]:
    """Return the cases."""
    return [
        case
        for world, every in EVERY.items()
        for index, case in enumerate(foresight.cases(world))
        if (index % every == 0 or case.mesh == (2, 2)) != whole
    ]


@functools.cache
def done(world: int, *, whole: bool) -> ranks.Cases:
    cases = {
        str(case): functools.partial(foresight.in_earnest, case)
        for case in grid(whole=whole)
        if case.world == world
    }
    return ranks.run_cases(world, cases)


def compare(case: Case, *, whole: bool) -> None:
    """The log of collectives, persistent bytes and scratch to the byte; live bytes at
    the peak within 3 %."""
    found = done(case.world, whole=whole)[str(case)][-1]
    planned = foresight.in_rehearsal(case, case.world - 1)
    assert foresight.differences(planned["log"], found["log"]) == []
    assert planned["memory"] == found["memory"]
    assert planned["scratch"] == found["scratch"]
    assert planned["peaks"] == pytest.approx(found["peaks"], rel=PEAK)


@pytest.mark.parametrize("case", grid(whole=False), ids=str)
def test_a_rehearsal_is_as_the_run(case: Case) -> None:
    compare(case, whole=False)


@pytest.mark.long
@pytest.mark.parametrize("case", grid(whole=True), ids=str)
def test_a_rehearsal_is_as_the_run_in_every_case(case: Case) -> None:
    compare(case, whole=True)


def test_all_ranks_log_the_same() -> None:
    """So one rank speaks for all, in earnest; and a rehearsal of any rank is that of
    another."""
    for case in grid(whole=False)[:5]:
        results = done(case.world, whole=False)[str(case)]
        first, *others = (result["log"] for result in results)
        assert all(other == first for other in others)
        assert foresight.in_rehearsal(case, 0) == foresight.in_rehearsal(case, 1)
