"""Parameters of a model that others have taken the place of since the optimizer was
built: torch would go on training the old ones, which nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, differing, whole
from registry import SMALL, cases_of
from torch import Tensor, nn
from training import everything

import zerokern

case = cases_of("parameters")

LR = 1e-2


def built(stage: int | None) -> tuple[nn.Module, Any]:
    """Return a model with an optimizer that knows it; stage None is torch's."""
    model = models.toy(blocks=2)
    if stage is None:
        return model, torch.optim.AdamW(model.parameters(), lr=LR)
    return model, zerokern.AdamW(
        model.parameters(), lr=LR, stage=stage, model=model, buckets=SMALL
    )


def step_on_all(model: nn.Module, optimizer: Any, step: int) -> None:
    """Take a step on the same batch on every rank."""
    optimizer.zero_grad()
    tokens, targets = models.batch(step)
    models.loss_of(model, tokens, targets).backward()
    optimizer.step()


def moments_of(optimizer: Any) -> dict[str, Tensor]:
    """Return the whole state by the number of the parameter: names may have changed."""
    state = optimizer.full_state_dict()["state"]
    return {f"{index}/{key}": v for index, e in state.items() for key, v in e.items()}


def _loads_by_assigning(model: nn.Module, optimizer: Any) -> None:
    other = models.toy(seed=1, blocks=2)
    with optimizer.full_params():
        model.load_state_dict(other.state_dict(), assign=True)


def _sets_one_weight(model: nn.Module, optimizer: Any) -> None:
    head: Any = model.get_submodule("head")
    head.weight = nn.Parameter(torch.zeros(head.weight.shape))


def _loads_one_module(model: nn.Module, optimizer: Any) -> None:
    other = models.toy(seed=1, blocks=2).get_submodule("blocks.1")
    with optimizer.full_params():
        model.get_submodule("blocks.1").load_state_dict(other.state_dict(), assign=True)


def _replaces_a_module(model: Any, optimizer: Any) -> None:
    model.head = nn.Linear(model.head.in_features, model.head.out_features)


REPLACED: dict[str, Callable[[nn.Module, Any], None]] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (_loads_by_assigning, _sets_one_weight, _loads_one_module)
}


@case
def parameters_replaced(stage: int) -> dict[str, Any]:
    """Return what is said, and what of the state was changed, by when it was done."""
    found = {}
    for name, replace in REPLACED.items():
        for steps in (0, 2):
            model, optimizer = built(stage)
            for step in range(steps):
                step_on_all(model, optimizer, step)
            before = moments_of(optimizer)
            replace(model, optimizer)
            with pytest.raises(RuntimeError) as error:
                step_on_all(model, optimizer, steps)
            changed = differing(moments_of(optimizer), before)
            found[name, steps] = str(error.value), changed
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", REPLACED)
def test_what_nobody_would_train_is_refused(
    name: str, steps: int, stage: int, at: int
) -> None:
    """At the next step, on all ranks, by name. Nothing was updated."""
    for results in case.done(at)["parameters_replaced", stage]:
        message, changed = results[name, steps]
        assert "was replaced" in message
        assert "assign=True" in message
        assert changed == []


NEW_HEADS = "added", "frozen", "left out"


@case(stages=(1, 2))
def head_replaced(stage: int) -> dict[str, Any]:
    """Return what differs from torch, by what becomes of a new head."""
    found: dict[str, Any] = {}
    for name in NEW_HEADS:
        sides = []
        for of_stage in (None, stage):
            model, optimizer = built(of_stage)
            step_on_all(model, optimizer, 0)
            torch.manual_seed(3)
            _replaces_a_module(model, optimizer)
            head = model.get_submodule("head")
            head.requires_grad_(name != "frozen")
            if name == "added":
                optimizer.add_param_group({"params": list(head.parameters())})
            for step in range(1, 4):
                step_on_all(model, optimizer, step)
            sides.append(whole(model, optimizer))
        found[name] = apart(sides[1], sides[0])
    return found


@at_worlds
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", NEW_HEADS)
def test_a_new_module_trains_if_the_optimizer_knows_it(
    name: str, stage: int, at: int
) -> None:
    """As under torch, which leaves one alone that was not added."""
    for results in case.done(at)["head_replaced", stage]:
        assert results[name] == {}


@case
def rebuilt_after_assigning(stage: int) -> dict[str, float]:
    """Return how far a new optimizer over what was loaded is from torch's."""
    sides = []
    for of_stage in (None, stage):
        model, optimizer = built(of_stage)
        step_on_all(model, optimizer, 0)
        other = models.toy(seed=1, blocks=2).state_dict()
        if of_stage is None:
            model.load_state_dict(other, assign=True)
        else:
            _loads_by_assigning(model, optimizer)
        options = {} if of_stage is None else {"stage": of_stage, "model": model}
        make: Any = torch.optim.AdamW if of_stage is None else zerokern.AdamW
        optimizer = make(model.parameters(), lr=LR, **options)
        for step in range(1, 3):
            step_on_all(model, optimizer, step)
        sides.append(everything(model, optimizer))
    return apart(sides[1], sides[0], limit=1e-4)


@at_worlds
@in_stages
def test_a_new_optimizer_trains_what_was_loaded(stage: int, at: int) -> None:
    for differs in case.done(at)["rebuilt_after_assigning", stage]:
        assert differs == {}
