"""The real Accelerate around our optimizer: accumulation, clipping, schedules, saving
and resuming."""

from __future__ import annotations

import copy
import functools
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import Run, apart, quiet_state_dict, rank, sharded, whole, world
from registry import cases_of
from torch import Tensor
from torch.optim import lr_scheduler

import zerokern
from zerokern import GradScaler

case = cases_of("programs")
at_worlds = pytest.mark.parametrize("at", (1, 2), ids="world{}".format)


def environment() -> dict[str, str]:
    """Return what a launcher sets, for ranks that have their process group already."""
    if world() == 1:
        return {}
    return {
        "RANK": str(rank()),
        "LOCAL_RANK": str(rank()),
        "WORLD_SIZE": str(world()),
        "LOCAL_WORLD_SIZE": str(world()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


@contextmanager
def accelerated(**options: Any) -> Iterator[Any]:
    """Yield an Accelerator. What it keeps for the whole process is gone afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    with mock.patch.dict(os.environ, environment()):
        accelerator = Accelerator(cpu=True, **options)
    try:
        yield accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@contextmanager
def without_the_warning_of_shards() -> Iterator[None]:
    """Accelerate loads the optimizer's own state, at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".*state_dict\(\) holds this rank's shards only"
        )
        yield


# ------------------------------------------------------- our optimizer and its schedule


def rate(step: int) -> float:
    return 0.9**step


def train(accelerator: Any, stage: int) -> dict[str, Any]:
    """Train with accumulation, a schedule, clipping, a save and a resume."""
    model = models.toy(blocks=1)
    optimizer = sharded(model, stage, lr=1e-2)
    scheduler = lr_scheduler.LambdaLR(optimizer, rate)
    before = len(optimizer.comm_log())
    with without_the_warning_of_shards():
        prepared, schedule = accelerator.prepare(optimizer, scheduler)
    sent = len(optimizer.comm_log()) - before

    for step in range(3):
        for micro in range(2):
            with accelerator.accumulate(model):
                rows = models.batch(10 * step + micro)
                mine = (models.share(t, rank(), world()) for t in rows)
                accelerator.backward(models.loss_of(model, *mine))
                if accelerator.sync_gradients:
                    optimizer.clip_grad_norm_(0.3)
                prepared.step()
                schedule.step()
                prepared.zero_grad()
        if step == 1:
            prepared.load_state_dict(copy.deepcopy(quiet_state_dict(optimizer)))

    return {
        "params": whole(model, optimizer),
        "lr": optimizer.param_groups[0]["lr"],
        "sent": sent,
        "skipped": prepared.step_was_skipped,
        "groups": prepared.param_groups is optimizer.param_groups,
    }


@case
def with_accelerate(stage: int) -> dict[str, Any]:
    with accelerated(gradient_accumulation_steps=2) as accelerator:
        return train(accelerator, stage)


def without_accelerate(at: int) -> dict[str, Any]:
    """Return what torch's AdamW makes of the same script."""
    run = Run(None, at, build=functools.partial(models.toy, blocks=1))
    scheduler = lr_scheduler.LambdaLR(run.optimizer, rate)
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(2):
            for of_rank in range(at):
                (run.loss(10 * step + micro, of_rank) / at / 2).backward()
        run.clip(0.3)
        run.step()
        for _ in range(at):  # Accelerate's scheduler makes one step for each process
            scheduler.step()
    return {
        "params": whole(run.model, run.optimizer),
        "lr": run.optimizer.param_groups[0]["lr"],
    }


@at_worlds
@in_stages
def test_accelerate_prepares_our_optimizer_and_schedule(stage: int, at: int) -> None:
    """Loading its own state at once sends and changes nothing; then accumulation,
    clipping, a resume."""
    pytest.importorskip("accelerate")
    expected = without_accelerate(at)
    for result in case.done(at)["with_accelerate", stage]:
        assert apart(result["params"], expected["params"]) == {}
        assert result["lr"] == expected["lr"]
        assert (result["sent"], result["skipped"], result["groups"]) == (0, False, True)


# ---------------------------------------------------------------------- the whole model


def train_and_resume(accelerator: Any, make: Any, folder: Path) -> dict[str, Tensor]:
    """Let Accelerate have the model, too; it saves and loads everything by itself."""
    model = models.toy(blocks=1)
    optimizer = make(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(4):
        accelerator.backward(models.loss_of(model, *models.batch(step)))
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(str(folder), safe_serialization=False)

    accelerator.load_state(str(folder))
    for step in range(2, 4):
        accelerator.backward(models.loss_of(model, *models.batch(step)))
        optimizer.step(closure=None)
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def resumed(folder: Path) -> list[dict[str, Tensor]]:
    """Return the parameters of our optimizer and of torch's."""
    found = []
    for make in (zerokern.AdamW, torch.optim.AdamW):
        with accelerated() as accelerator:
            path = folder / make.__module__
            found.append(train_and_resume(accelerator, make, path))
    return found


def test_accelerate_trains_saves_and_resumes_in_a_world_of_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ((ours, theirs),) = ranks.run(1, resumed, tmp_path)
    assert apart(ours, theirs) == {}


# ------------------------------------------------------------------------ skipped steps


@case
def skipped_by_accelerate(stage: int) -> list[tuple[bool, float]]:
    """Overflow on the last rank in two steps; return whether Accelerate knows, and the
    rate of its schedule."""
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    model = models.toy(blocks=1)
    optimizer = sharded(model, stage, lr=1.0)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    found = []
    with accelerated():
        with without_the_warning_of_shards():
            prepared = AcceleratedOptimizer(optimizer, scaler=scaler)
        scheduler = AcceleratedScheduler(schedule, prepared, split_batches=True)
        for step in range(4):
            bad = math.inf if step in (1, 2) and rank() == world() - 1 else 1.0
            loss = models.loss_of(model, *models.batch(step)) * bad
            scaler.scale(loss).backward()
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
            found.append((prepared.step_was_skipped, optimizer.param_groups[0]["lr"]))
    return found


@at_worlds
@in_stages
def test_accelerate_knows_of_a_skipped_step(stage: int, at: int) -> None:
    """It sees whether the scaler has called step; its schedule waits on all ranks."""
    pytest.importorskip("accelerate")
    expected = [(False, 0.5), (True, 0.5), (True, 0.5), (False, 0.25)]
    assert case.done(at)["skipped_by_accelerate", stage] == [expected] * at
