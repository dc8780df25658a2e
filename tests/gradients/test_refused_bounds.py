"""Bounds on gradients that are refused: by name, on all ranks, with nothing changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
from marks import at_worlds, in_stages
from oracle import apart, differing, sharded, world
from registry import cases_of
from short_runs import short
from training import everything

import zerokern

case = cases_of("gradients")

INF, NAN = float("inf"), float("nan")

REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "negative limit": (ValueError, "clip_value=-1", lambda o: o.clip_grad_value_(-1.0)),
    "limit that is no number": (
        ValueError,
        "clip_value=nan",
        lambda o: o.clip_grad_value_(NAN),
    ),
    "norm of order 0": (ValueError, "norm_type=0", lambda o: o.get_total_norm(0)),
    "negative order": (ValueError, "norm_type=-2", lambda o: o.get_total_norm(-2.0)),
    "order that is no number": (
        ValueError,
        "norm_type=nan",
        lambda o: o.clip_grad_norm_(1.0, NAN),
    ),
    "negative infinity": (
        ValueError,
        "norm_type=-inf",
        lambda o: o.clip_grad_norm_(1.0, -math.inf),
    ),
}


@case
def refused_bounds(stage: int) -> dict[str, tuple[str, list[str]]]:
    """Return what is said, and what is otherwise than in a run without the misuse."""
    found = {}
    for name, (kind, _, misuse) in REFUSED.items():
        run, twin = short(stage, world()), short(stage, world())
        for one in (run, twin):
            one.backward(0)
        with pytest.raises(kind) as error:
            misuse(run.optimizer)
        after = []
        for one in (run, twin):
            one.step()
            after.append(everything(one.model, one.optimizer))
        found[name] = str(error.value), differing(*after)
    return found


@at_worlds
@in_stages
def test_bounds_that_none_can_keep_are_refused_and_change_nothing(
    stage: int, at: int
) -> None:
    for results in case.done(at)["refused_bounds", stage]:
        for name, (message, changed) in results.items():
            assert REFUSED[name][1] in message
            assert not changed


@in_stages
@pytest.mark.parametrize(
    "ask",
    [
        lambda o: o.clip_grad_norm_(1.0),
        lambda o: o.clip_grad_value_(1.0),
        lambda o: o.get_total_norm(),
    ],
    ids=["norm", "value", "total"],
)
def test_updates_in_backward_leave_nothing_to_bound(ask: Any, stage: int) -> None:
    early = zerokern.Buckets(update_in_backward=True)
    optimizer = sharded(models.toy(), stage, buckets=early)
    with pytest.raises(ValueError, match="update_in_backward"):
        ask(optimizer)


# ----------------------------------------------------------------------- inside join


def _norm_before_a_backward(run: Any) -> None:
    run.optimizer.clip_grad_norm_(0.1)
    run.backward(1)


def _other_order(run: Any) -> None:
    run.optimizer.clip_grad_norm_(0.1, INF)


def _every_element(run: Any) -> None:
    run.optimizer.clip_grad_value_(0.1)


JOINED = (_norm_before_a_backward, _other_order, _every_element)


@case
def inside_join(stage: int) -> list[str]:
    """Return what is said of each: all ranks have a batch."""
    found = []
    for misuse in JOINED:
        run = short(stage, world())
        message = ""
        try:
            with run.optimizer.join():
                run.backward(0)
                misuse(run)
                run.step()
        except RuntimeError as error:
            message = str(error)
        found.append(message)
    return found


@case
def twice_inside_join(stage: int) -> dict[str, float]:
    """Two bounds after the last backward are right; return what differs from a loop
    outside of join."""
    results = []
    for joins in (True, False):
        run = short(stage, world(), eps=1e-2)
        for step in range(2):
            run.optimizer.zero_grad()
            with run.optimizer.join() if joins else nullcontext():
                run.backward(step)
                run.optimizer.clip_grad_norm_(0.3)
                run.optimizer.clip_grad_norm_(0.1)
                run.step()
        results.append(everything(run.model, run.optimizer))
    return apart(*results)


@at_worlds
@in_stages
def test_inside_join_only_the_norm_after_the_last_backward_is_bounded(
    stage: int, at: int
) -> None:
    """Ranks that have run out of batches could not follow. A world of one can."""
    for messages in case.done(at)["inside_join", stage]:
        for message in messages:
            assert ("inside join()" in message) == (at > 1)
    for changed in case.done(at)["twice_inside_join", stage]:
        assert not changed
