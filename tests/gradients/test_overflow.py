"""Gradients that are not finite: the step is skipped on all ranks, and a loss scale
falls, recovers and has a floor."""

from __future__ import annotations

import math
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import differing, rank, set_integer_gradients, sharded, state_of, world
from registry import cases_of
from torch import nn
from training import everything

import zerokern
from zerokern import GradScaler

case = cases_of("gradients")
at_one_and_two = pytest.mark.parametrize("at", (1, 2), ids="world{}".format)

# --------------------------------------------------------------- not finite on one rank

BAD = (math.inf, math.nan, -math.inf)
"""By the rank that has it."""
RECIPES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16, scaled": (torch.bfloat16, True),
}


def _with_a_bad_gradient(
    stage: int, recipe: str, bad_rank: int | None
) -> dict[str, Any]:
    """Take three steps; in the second, one rank has one bad element. None: leave that
    step out."""
    dtype, scaled = RECIPES[recipe]
    model = models.toy(blocks=1).to(dtype)
    buckets = zerokern.Buckets(bytes=2000)
    optimizer = sharded(model, stage, lr=1e-2, buckets=buckets)
    scaler = GradScaler("cpu", init_scale=1.0, enabled=scaled, growth_interval=100)
    steps = (0, 2) if bad_rank is None else (0, 1, 2)
    for step in steps:
        optimizer.zero_grad()
        set_integer_gradients(model, step)
        scaler.scale(torch.ones(()))
        for param in model.parameters():
            param.grad.mul_(scaler.get_scale())  # type: ignore[union-attr]
        if step == 1 and rank() == bad_rank:
            place = list(model.parameters())[(bad_rank + stage) % 4]
            place.grad.view(-1)[-1] = BAD[bad_rank]  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    return {
        "all": everything(model, optimizer),
        "scale": scaler.get_scale(),
        "skipped": int(optimizer.skipped_steps),
        "metric": optimizer.metrics()["skipped_steps"],
    }


@case
def bad_gradients(stage: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for recipe in RECIPES:
        left_out = _with_a_bad_gradient(stage, recipe, None)["all"]
        for bad_rank in range(world()):
            result = _with_a_bad_gradient(stage, recipe, bad_rank)
            changed = differing(result["all"], left_out)
            found[recipe, bad_rank] = {**result, "all": changed}
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bad_gradient_on_any_rank_skips_the_step_on_all(
    recipe: str, stage: int, at: int
) -> None:
    """Every bit stays, step counters too; all ranks count it, and go on alike."""
    _, scaled = RECIPES[recipe]
    expected = {
        "all": [],
        "scale": 0.5 if scaled else 1.0,
        "skipped": 1,
        "metric": 1,
    }
    for results in case.done(at)["bad_gradients", stage]:
        for bad_rank in range(at):
            assert results[recipe, bad_rank] == expected


# -------------------------------------------------------------- a loss scale that falls


def _overflows(stage: int, init_scale: float, number: int, good: int) -> dict[str, Any]:
    """Overflow again and again on the last rank, then never; note the scale, and
    whether good steps are taken."""
    model = nn.Linear(3, 2)
    optimizer = sharded(model, stage, lr=1e-2)
    scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    scales = []
    for step in range(number + good):
        loss = model(torch.ones(4, 3)).square().mean()
        if step < number and rank() == world() - 1:
            loss = loss * math.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {
        "scales": scales,
        "skipped": int(optimizer.skipped_steps),
        "steps": state_of(model, optimizer)["bias/step"],
    }


@case
def scale_of_20_overflows(stage: int) -> dict[str, Any]:
    return _overflows(stage, 2.0**16, 20, 6)


@case(stages=(2,))
def small_scale_of_60_overflows(stage: int) -> dict[str, Any]:
    return _overflows(stage, 2.0**-100, 60, 4)


@at_one_and_two
@in_stages
def test_a_loss_scale_recovers_after_overflows(stage: int, at: int) -> None:
    """20 overflows, then growth after each interval."""
    for result in case.done(at)["scale_of_20_overflows", stage]:
        exponents = [math.log2(scale) for scale in result["scales"][19:]]
        assert exponents == [-4, -4, -3, -3, -2, -2, -1]
        assert (result["skipped"], result["steps"]) == (20, 6)


@at_one_and_two
def test_a_loss_scale_has_a_floor(at: int) -> None:
    """Halved without end it would be 0, and no step would be finite any more."""
    for result in case.done(at)["small_scale_of_60_overflows", 2]:
        assert min(result["scales"]) > 0
        assert result["scales"][-1] > result["scales"][59]
        assert (result["skipped"], result["steps"]) == (60, 4)
