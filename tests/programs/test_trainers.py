"""How trainers call an optimizer, a scaler and a schedule: those of Lightning and
Accelerate, and torch's own scaler."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import Run, apart, differing, rank, sharded, whole, world
from registry import cases_of
from torch import Tensor, nn
from torch.optim import lr_scheduler

from zerokern import GradScaler

SCALER = {"init_scale": 2.0**10, "growth_interval": 100}

case = cases_of("programs")
one_block = functools.partial(models.toy, blocks=1)


# -------------------------------------------------------- schedules and skipped steps


def skipped_steps(optimizer: Any) -> int:
    return int(getattr(optimizer, "skipped_steps", 0))


def train_on_a_schedule(scaler: Any, stage: int | None, notices: str) -> dict[str, Any]:
    """Train with a scale; the last rank overflows in two steps, and the schedule must
    not advance then.

    Args:
        scaler: ours or torch's.
        stage: of the optimizer; None is torch's AdamW.
        notices: what tells of a skipped step, "counter" or "scale".
    """
    run = Run(stage, world() if stage else 1, build=one_block)
    optimizer = run.optimizer
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rates, skipped = [], []
    for step in range(5):
        overflows = step in (1, 2) and rank() == world() - 1
        optimizer.zero_grad()
        loss = models.loss_of(run.model, *models.batch(step))
        scaler.scale(loss * (math.inf if overflows else 1.0)).backward()
        scale, counted = scaler.get_scale(), skipped_steps(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if notices == "counter":
            skipped.append(skipped_steps(optimizer) > counted)
        else:
            skipped.append(scaler.get_scale() < scale)
        if not skipped[-1]:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return {"rates": rates, "skipped": skipped, "params": whole(run.model, optimizer)}


@case
def schedule_by_counter(stage: int) -> dict[str, Any]:
    return train_on_a_schedule(GradScaler("cpu", **SCALER), stage, "counter")


@case
def schedule_by_scale(stage: int) -> dict[str, Any]:
    return train_on_a_schedule(GradScaler("cpu", **SCALER), stage, "scale")


@at_worlds
@in_stages
@pytest.mark.parametrize("skips", ("counter", "scale"))
def test_a_schedule_can_wait_for_skipped_steps(skips: str, stage: int, at: int) -> None:
    """Both ways in which trainers notice them, on every rank, though one alone
    overflowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs = torch.amp.GradScaler("cpu", **SCALER)
        expected = train_on_a_schedule(torchs, None, "scale")
    assert expected["skipped"] == [False, True, True, False, False]
    for result in case.done(at)[f"schedule_by_{skips}", stage]:
        assert result["skipped"] == expected["skipped"]
        assert result["rates"] == expected["rates"]
        assert apart(result["params"], expected["params"]) == {}


# ------------------------------------------------------- our scaler, called by trainers


def train_with_a_scaler(stage: int, *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """Let a scaler step, with more arguments; return the parameters and the scale."""
    run = Run(stage, world(), build=one_block)
    scaler = GradScaler("cpu", **SCALER)
    for step in range(2):

        def loss(of_rank: int, step: int = step) -> Tensor:
            return scaler.scale(run.loss(step, of_rank))

        run.optimizer.zero_grad()
        run.backward(step, loss)
        scaler.step(run.optimizer, *args, **kwargs)
        scaler.update()
    return whole(run.model, run.optimizer), scaler.get_scale()


@case
def calls_of_trainers(stage: int) -> dict[str, tuple[list[str], float]]:
    """Return which parameters differ from those of a plain call, and the scale."""
    plain, _ = train_with_a_scaler(stage)
    found = {
        "accelerate": train_with_a_scaler(stage, None),
        "lightning": train_with_a_scaler(stage, closure=None),
    }
    return {
        how: (differing(params, plain), scale) for how, (params, scale) in found.items()
    }


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("how", ("accelerate", "lightning"))
def test_our_scaler_takes_the_closure_that_is_none(
    how: str, stage: int, at: int
) -> None:
    """A trainer without a closure passes None on, by position or by name."""
    for result in case.done(at)["calls_of_trainers", stage]:
        assert result[how] == ([], SCALER["init_scale"])


# ---------------------------------------------------------------------- torch's scaler

ORDERS = ("step", "unscale step", "unscale ours step", "unscale torch step")


def train_with_torchs_scaler(
    stage: int | None, order: str, overflow: bool
) -> dict[str, Any]:
    """Train in a world of one; stage None is torch's AdamW."""
    model = one_block()
    if stage is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = sharded(model, stage, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        bad = math.inf if overflow and step in (1, 2) else 1.0
        scaler.scale(models.loss_of(model, *models.batch(step)) * bad).backward()
        for call in order.split():
            if call == "unscale":
                scaler.unscale_(optimizer)
            elif call == "ours" and stage is not None:
                optimizer.clip_grad_norm_(0.3)
            elif call in ("torch", "ours"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            else:
                scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    return {"scales": scales, "params": whole(model, optimizer)}


@in_stages
@pytest.mark.parametrize("overflow", (False, True), ids=["finite", "overflow"])
@pytest.mark.parametrize("order", ORDERS)
def test_torchs_scaler_unscales_once(order: str, overflow: bool, stage: int) -> None:
    """In a world of one, the only one where it is right; elsewhere it is refused by
    name."""
    expected = train_with_torchs_scaler(None, order, overflow)
    result = train_with_torchs_scaler(stage, order, overflow)
    assert result["scales"] == expected["scales"]
    assert apart(result["params"], expected["params"]) == {}
