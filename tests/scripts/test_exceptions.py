"""A user's code raises, anywhere in an iteration: the exception comes out as it is, and
training goes on as if it had not been there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ranks
from exceptions import PLACES, Boom
from marks import at_worlds, in_stages
from oracle import REDUCED_SUMS, STAGES, Run, apart, differing
from registry import SMALL
from wire import hostile

import zerokern

of_places = pytest.mark.parametrize("place", PLACES)


def interrupted(run: Run, place: str) -> dict[str, Any]:
    """Run an iteration up to its exception; return the bytes that it left, at once and
    after zero_grad."""
    run.optimizer.zero_grad()
    before = None if run.torch else run.optimizer.memory()
    found: dict[str, Any] = {}
    try:
        PLACES[place](run, 1)
    except Boom:
        found["boom"] = True
        if before is not None:
            found["left"] = run.optimizer.memory().buffers - before.buffers
    run.optimizer.zero_grad()
    if before is not None:
        found["grown"] = run.optimizer.memory().total - before.total
    return found


def train(
    place: str | None,
    stage: int | None,
    at: int,
    seed: int,
    buckets: zerokern.Buckets = SMALL,
) -> dict[str, Any]:
    """One step, an iteration that fails, two steps, without any call to repair.

    Args:
        place: where it fails; None: nowhere.
        stage: of the optimizer; None is torch's AdamW.
        at: ranks.
        seed: of the delays of the wire.
        buckets: of the optimizer.
    """
    with hostile(seed, 3.0):
        run = Run(stage, at, buckets=buckets)
        run.iterate(0)
        found = {} if place is None else interrupted(run, place)
        run.iterate(2)
        run.rest()
        calls = 0 if run.torch else len(run.optimizer.comm_log())
        run.iterate(3)
        run.rest()
        if not run.torch:
            log = run.optimizer.comm_log()[calls:]
            found["last step"] = [call[:7] for call in log]
        return {**run.result(), **found}


@functools.cache
def trained(at: int) -> ranks.Cases:
    """Raise at every place in every stage; and at none."""
    cases = {
        (place, stage): functools.partial(train, place, stage, at, seed)
        for seed, place in enumerate([None, *PLACES])
        for stage in STAGES
    }
    return ranks.run_cases(at, cases)


@functools.cache
def expected(place: str | None, at: int) -> dict[str, Any]:
    """Return what torch makes of it."""
    return train(place, None, at, 0)


@at_worlds
@in_stages
@of_places
def test_training_goes_on_after_an_exception(at: int, stage: int, place: str) -> None:
    """The user's own exception comes out, and the next steps are what torch makes of
    them."""
    theirs = expected(place, at)
    for result in trained(at)[place, stage]:
        assert result["boom"] and theirs["boom"]
        assert apart(result["params"], theirs["params"], REDUCED_SUMS) == {}
        assert apart(result["seen"], theirs["seen"]) == {}


@at_worlds
@in_stages
@of_places
def test_an_exception_leaves_no_memory_behind(at: int, stage: int, place: str) -> None:
    """At once, before anything else is called; and gradients are gone after
    zero_grad."""
    for result in trained(at)[place, stage]:
        assert (result["left"], result["grown"]) == (0, 0)


@at_worlds
@in_stages
@of_places
def test_a_step_after_an_exception_is_like_any_other(
    at: int, stage: int, place: str
) -> None:
    """The same collectives in the same order, so overlap is not lost either.

    Stage 1 counts how many backwards a step has; a failed iteration that had one more
    changes the phase of the next.
    """
    fields = 6 if stage == 1 else 7
    for result, undisturbed in zip(
        trained(at)[place, stage], trained(at)[None, stage], strict=True
    ):
        ours = [call[:fields] for call in result["last step"]]
        theirs = [call[:fields] for call in undisturbed["last step"]]
        assert ours == theirs


# ------------------------------------------------------------------ in other timings

TIMINGS = {
    "gather in forward": zerokern.Buckets(bytes=6000, gather_in_forward=True),
    "update in backward": zerokern.Buckets(bytes=6000, update_in_backward=True),
    "no overlap": zerokern.Buckets(bytes=6000, overlap=False),
}
BEFORE_BACKWARD = [
    place for place in PLACES if "forward" in place and "backward" not in place
]


def possible(timing: str, stage: int, place: str) -> bool:
    if timing == "gather in forward":
        return stage < 3
    # Two backwards outside of no_sync before a step are refused, see below.
    return timing != "update in backward" or place != "backward_after_another"


OTHERWISE = [
    (timing, stage, place)
    for timing in TIMINGS
    for stage in STAGES
    for place in PLACES
    if possible(timing, stage, place)
]


@functools.cache
def trained_otherwise() -> ranks.Cases:
    """Raise at every place, in every stage and timing."""
    cases = {
        (timing, stage, place): functools.partial(
            train, place, stage, 2, seed, TIMINGS[timing]
        )
        for seed, (timing, stage, place) in enumerate(OTHERWISE)
    }
    return ranks.run_cases(2, cases)


@pytest.mark.long
@pytest.mark.parametrize(("way", "stage", "place"), OTHERWISE)
def test_training_goes_on_after_an_exception_in_any_way(
    way: str, stage: int, place: str
) -> None:
    """What was updated in backward before the exception stays so, as it would in
    torch."""
    first, second = trained_otherwise()[way, stage, place]
    assert differing(first["params"], second["params"]) == []
    for result in (first, second):
        assert result["boom"]
        assert (result["left"], result["grown"]) == (0, 0)
        assert all(value.isfinite().all() for value in result["params"].values())
        if way != "update in backward" or place in BEFORE_BACKWARD:
            assert apart(result["params"], expected(place, 2)["params"]) == {}


@in_stages
def test_a_gradient_after_its_update_is_refused(stage: int) -> None:
    run = Run(stage, 1, buckets=TIMINGS["update in backward"])
    run.iterate(0)
    run.optimizer.zero_grad()
    run.backward(1)
    with pytest.raises(RuntimeError, match=r"arrived after its update.*no_sync"):
        run.backward(2)
