"""What hangs elsewhere: a rank gets the right result, or soon an error that says what
is wrong."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import models
import pytest
import torch
from exceptions import PLACES, Boom
from marks import in_stages
from oracle import STAGES, Run, apart, rank, sharded, whole
from pairs import NEVER_TOOK_PART, TIMEOUT_S, run_in_pairs
from registry import SMALL, cases_of
from scripts.methods import encoding
from scripts.skipped import multimodal
from torch import Tensor, nn
from wire import short_group

case = cases_of("scripts")


# ------------------------------------------------------------------ the smallest script


def rows(of_rank: int, step: int) -> Tensor:
    return torch.full((4, 3), 1.0 + of_rank + step)


@case
def the_smallest_script(stage: int) -> tuple[dict[str, Tensor], float]:
    """Train one Linear; return its parameters and how long it took."""
    group = short_group(5.0)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    begun = time.perf_counter()
    optimizer = sharded(model, stage, lr=1e-2, process_group=group)
    for step in range(2):
        model(rows(rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    took = time.perf_counter() - begun
    return whole(model, optimizer), took


def test_the_smallest_script_does_not_hang() -> None:
    """One Linear, two ranks, well within the time limit of its group."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for of_rank in range(2):
            (model(rows(of_rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    for stage in STAGES:
        for params, took in case.done(2)["the_smallest_script", stage]:
            assert took < 5
            assert apart(params, dict(model.named_parameters()), 1e-6) == {}


# ----------------------------------------------------------------- ranks that part ways


Script = Callable[[Run, int], None]
"""What a rank of a pair does, by its place in it: 0 or 1."""


class Parting(NamedTuple):
    """A way to part."""

    script: Script
    stages: Sequence[int]
    """In which it is an error."""
    options: dict[str, Any]
    """Of `Run`."""


PARTINGS: dict[str, Parting] = {}


def parting(*stages: int, **options: Any) -> Callable[[Script], Script]:
    """Register a way to part. A decorator."""

    def register(function: Script) -> Script:
        PARTINGS[function.__name__] = Parting(function, stages, options)
        return function

    return register


@parting(3)
def a_block_is_called_more_often(run: Run, place: int) -> None:
    """Once on one rank, three times on the other."""
    run.iterate(0, order=(0, 1) if place == 0 else (0, 1, 1, 1))
    run.iterate(1)


@parting(3)
def a_block_is_called_more_often_later(run: Run, place: int) -> None:
    """When units are gathered ahead."""
    run.iterate(0)
    run.iterate(1, order=(0, 1) if place == 0 else (0, 1, 1, 1))
    run.iterate(2)


@parting(3, build=multimodal)
def a_tower_is_skipped(run: Run, place: int) -> None:
    run.iterate(0, images=place != 1)
    run.iterate(1)


@parting(3, build=multimodal)
def a_tower_is_skipped_later(run: Run, place: int) -> None:
    """When units are gathered ahead."""
    run.iterate(0)
    run.iterate(1, images=place != 1)
    run.iterate(2)


@parting(1, 2, 3)
def a_rank_has_one_batch_fewer(run: Run, place: int) -> None:
    """And goes on to save."""
    for step in range(3 - place):
        run.iterate(step)
    run.optimizer.full_state_dict()


@parting(1, 2, 3)
def a_rank_has_one_micro_batch_more(run: Run, place: int) -> None:
    run.iterate(0)
    run.optimizer.zero_grad()
    for micro in range(1 + place):
        run.backward(micro)
    run.step()
    run.optimizer.full_state_dict()


@parting(3)
def a_rank_evaluates_longer(run: Run, place: int) -> None:
    """Three batches and four, then training goes on."""
    run.iterate(0)
    for step in range(4 - place):
        run.evaluate(step)
    run.iterate(1)
    run.iterate(2)


@parting(1, 2, 3)
def a_rank_leaves_out_a_step(run: Run, place: int) -> None:
    run.iterate(0)
    run.optimizer.zero_grad()
    run.backward(1)
    if place == 0:
        run.step()
    run.optimizer.full_state_dict()


def raises_on_one_rank(where: str) -> Script:
    def function(run: Run, place: int) -> None:
        run.iterate(0)
        run.optimizer.zero_grad()
        if place == 1:
            PLACES[where](run, 1)
        else:
            run.iterate(1)
            run.optimizer.full_state_dict()

    return function


RAISING = [
    "forward_inside_a_unit",
    "module_hook_in_backward",
    "last_gradient_of_backward",
]
for where in RAISING:
    PARTINGS[where] = Parting(raises_on_one_rank(where), STAGES, {})

PARTED = [(name, stage) for name, way in PARTINGS.items() for stage in way.stages]
WITHOUT_EXCEPTIONS = [key for key in PARTED if key[0] not in RAISING]


class Outcome(NamedTuple):
    """How parting ended on one rank."""

    error: str
    seconds: float
    warnings: list[str]


def part(key: tuple[str, int], place: int, group: Any) -> Outcome:
    """Run the script of one rank of a pair until it fails."""
    name, stage = key
    script, _, options = PARTINGS[name]
    run = Run(stage, 2, buckets=SMALL, process_group=group, **options)
    begun, error = time.perf_counter(), "no error"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            script(run, place)
        except (RuntimeError, Boom) as raised:
            error = str(raised) or type(raised).__name__
    seconds = time.perf_counter() - begun
    return Outcome(error, seconds, [str(warning.message) for warning in seen])


@functools.cache
def parted() -> dict[tuple[str, int], list[Outcome]]:
    """Let ranks part in every way."""
    return run_in_pairs(PARTED, part)


@pytest.mark.parametrize(("name", "stage"), WITHOUT_EXCEPTIONS)
def test_ranks_that_part_are_told_of_which_collective(name: str, stage: int) -> None:
    """All ranks, and soon. What a rank abandons may cost it one more timeout per
    exchange."""
    for outcome in parted()[name, stage]:
        assert NEVER_TOOK_PART.match(outcome.error), outcome.error
        assert outcome.seconds < 4 * TIMEOUT_S + 2


@in_stages
@pytest.mark.parametrize("place", RAISING)
def test_an_exception_on_one_rank_is_not_hidden(stage: int, place: str) -> None:
    """Its own rank gets it as it is, also when what was under way cannot end; the
    others get a named error."""
    alone, raising = parted()[place, stage]
    assert NEVER_TOOK_PART.match(alone.error), alone.error
    assert raising.error == "Boom"
    assert max(alone.seconds, raising.seconds) < 4 * TIMEOUT_S + 2


@pytest.mark.parametrize(("name", "stage"), PARTED)
def test_ranks_that_part_are_told_once(name: str, stage: int) -> None:
    """No warning about the same or another error beside the one that was raised."""
    assert [outcome.warnings for outcome in parted()[name, stage]] == [[], []]


@pytest.mark.parametrize("name", ["a_tower_is_skipped", "a_tower_is_skipped_later"])
def test_the_unit_that_was_skipped_is_named(name: str) -> None:
    assert "all_gather of 'tower." in parted()[name, 3][0].error


# ------------------------------------------------------------- a call that no hook sees


@case
def a_method_that_was_not_registered(stage: int) -> str:
    """Return the error of a call that is not a forward, or that there was none."""
    model = encoding()
    optimizer = sharded(model, stage, process_group=short_group(TIMEOUT_S))
    try:
        model(models.batch(0)[0])
    except RuntimeError as error:
        return str(error)
    optimizer.step()
    return "no error"


def test_a_method_that_was_not_registered_is_named() -> None:
    """The error says which function read what, and the remedy; it is an error in the
    first place."""
    done = case.done(2)
    for stage in (1, 2):
        found = done["a_method_that_was_not_registered", stage]
        assert found == ["no error"] * 2
    for message in done["a_method_that_was_not_registered", 3]:
        assert "'blocks.0'" in message
        assert "linear" in message
        assert "register_forward_method" in message
