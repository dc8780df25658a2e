"""Param groups: passed as to torch, kept under a scheduler, through loading and while a
group stands still."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import Run, apart, differing, whole, world
from registry import cases_of
from torch import nn
from torch.optim import lr_scheduler

case = cases_of("groups of parameters")


# -------------------------------------------------------------- ways to pass parameters


def _groups_with_an_empty_one(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    return [
        {"params": []},
        {"params": params[::2], "weight_decay": 0.5},
        {"params": []},
        {"params": params[1::2]},
    ]


def _group_of_frozen(model: nn.Module) -> list[Any]:
    model.embedding.weight.requires_grad_(False)
    return [
        {"params": [model.embedding.weight]},
        {"params": [p for p in model.parameters() if p.requires_grad]},
    ]


WAYS: dict[str, Callable[[Any], Any]] = {
    "generator": lambda model: model.parameters(),
    "list": lambda model: list(model.parameters()),
    "named": lambda model: model.named_parameters(),
    "named groups": lambda model: [{"params": list(model.named_parameters())}],
    "group of a generator": lambda model: [{"params": model.parameters()}],
    "group of one tensor": lambda model: [{"params": p} for p in model.parameters()],
    "empty groups": _groups_with_an_empty_one,
    "frozen group": _group_of_frozen,
    "reversed": lambda model: list(model.parameters())[::-1],
    "some of the parameters": lambda model: [
        p for n, p in model.named_parameters() if not n.startswith("head")
    ],
    "decay split inside a block": lambda model: [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ],
}


def _train_passed(way: str, stage: int | None, of: int) -> dict[str, Any]:
    run = Run(
        stage,
        of,
        build=functools.partial(models.toy, blocks=2),
        groups=WAYS[way],
        weight_decay=0.1,
    )
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    groups = run.optimizer.param_groups
    return {
        "params": whole(run.model, run.optimizer),
        "groups": [len(group["params"]) for group in groups],
        "names": [group.get("param_names") for group in groups],
    }


@case
def passed(stage: int) -> dict[str, dict[str, Any]]:
    return {way: _train_passed(way, stage, world()) for way in WAYS}


@pytest.mark.parametrize("at", (1, 3), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("way", WAYS)
def test_parameters_can_be_passed_as_to_torch(way: str, stage: int, at: int) -> None:
    """Groups keep their number, index, names and options."""
    expected = _train_passed(way, None, at)
    for results in case.done(at)["passed", stage]:
        result = results[way]
        assert result["groups"] == expected["groups"]
        assert result["names"] == expected["names"]
        assert apart(result["params"], expected["params"]) == {}


# --------------------------------------------------------------------------- schedulers


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups of which the first is empty and the second stands still."""
    params = list(model.parameters())
    return [
        {"params": [], "lr": 0.5},
        {"params": params[::2], "lr": 0.0, "weight_decay": 0.3},
        {"params": params[1::2], "lr": 2e-2},
    ]


Scheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULERS: dict[str, Scheduler] = {
    "a factor for each group": lambda o: lr_scheduler.LambdaLR(
        o, [lambda s, i=i: 1.0 / (i + s) for i in (1, 2, 3)]
    ),
    "one factor for all": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "a largest rate for each": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[0.5, 1e-2, 4e-2], total_steps=12
    ),
}


def _scheduled(stage: int | None, of: int, name: str) -> dict[str, Any]:
    build = functools.partial(models.toy, blocks=1)
    run = Run(stage, of, build=build, groups=three_groups)
    start = whole(run.model, run.optimizer)
    scheduler = SCHEDULERS[name](run.optimizer)
    rates, same = [], []
    for step in range(5):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        scheduler.step()
        if step in (1, 3):
            optimizer = run.optimizer
            save = optimizer.state_dict if run.torch else optimizer.full_state_dict
            saved = copy.deepcopy(save())
            schedule = copy.deepcopy(scheduler.state_dict())
            if step == 3:  # as after a resume: a new scheduler on the same optimizer
                scheduler = SCHEDULERS[name](run.optimizer)
            run.optimizer.load_state_dict(saved)
            scheduler.load_state_dict(schedule)
        rates.append([group["lr"] for group in run.optimizer.param_groups])
        same.append(run.optimizer.param_groups is scheduler.optimizer.param_groups)
    result = whole(run.model, run.optimizer)
    return {
        "params": result,
        "rates": rates,
        "same": same,
        "moved": differing(result, start),
    }


@case
def scheduled(stage: int) -> dict[str, Any]:
    return {name: _scheduled(stage, world(), name) for name in SCHEDULERS}


@at_worlds
@in_stages
@pytest.mark.parametrize("name", SCHEDULERS)
def test_groups_keep_index_rate_and_identity_under_a_scheduler(
    name: str, stage: int, at: int
) -> None:
    """Before and after loading; rates are applied, ratios kept, and a rate of 0 moves
    nothing."""
    expected = _scheduled(None, at, name)
    model = models.toy(blocks=1)
    names = [name for name, _ in model.named_parameters()]
    still = set(names[::2])
    for results in case.done(at)["scheduled", stage]:
        result = results[name]
        assert result["rates"] == expected["rates"]
        assert result["same"] == [True] * 5
        assert apart(result["params"], expected["params"]) == {}
        if not name.startswith("a largest"):
            assert not set(result["moved"]) & still
        assert set(result["moved"]) >= set(names) - still
