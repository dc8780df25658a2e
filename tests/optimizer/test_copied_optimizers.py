"""Copies of an optimizer, which cannot be made, are refused at once; what is around it
can be copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import differing, quiet_state_dict, sharded
from registry import cases_of
from torch import nn
from training import everything, train_by_hand

import zerokern

case = cases_of("optimizer")


class Trainer(nn.Module):
    """Keeps its optimizer beside the model, as trainers do."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
    ) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer


class Plain:
    """No module."""

    def __init__(self, optimizer: Any) -> None:
        self.parts = {"optimizer": [optimizer]}


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


OF_THE_OPTIMIZER: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "an old pickle": lambda o: pickle.dumps(o, protocol=0),
    "torch.save": saved,
    "deepcopy of an object": lambda o: copy.deepcopy(Plain(o)),
    "pickle of an object": lambda o: pickle.dumps(Plain(o)),
    "torch.save of a checkpoint": lambda o: saved({"step": 3, "optimizer": o}),
    "deepcopy of a scheduler": lambda o: copy.deepcopy(
        torch.optim.lr_scheduler.StepLR(o, 10)
    ),
}
WITH_THE_MODEL: dict[str, Callable[[nn.Module, Any], Any]] = {
    "deepcopy of a pair": lambda m, o: copy.deepcopy((o, m)),
    "pickle of a pair": lambda m, o: pickle.dumps([o, m]),
    "torch.save of a pair": lambda m, o: saved({"optimizer": o, "model": m}),
    "deepcopy of a trainer": lambda m, o: copy.deepcopy(Trainer(m, o)),
    "torch.save of a trainer": lambda m, o: saved(Trainer(m, o)),
}


def refusals_of(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Return what each attempt to copy says."""
    attempts: dict[str, Callable[[], Any]] = {
        name: lambda way=way: way(optimizer) for name, way in OF_THE_OPTIMIZER.items()
    }
    for name, both in WITH_THE_MODEL.items():
        attempts[name] = lambda both=both: both(model, optimizer)
    said = {}
    for name, attempt in attempts.items():
        with pytest.raises(TypeError) as error:
            attempt()
        said[name] = str(error.value)
    return said


@case
def copies(stage: int) -> tuple[dict[str, str], list[str]]:
    """Return what attempts to copy say, in the middle of a training, and where it
    differs from one without them."""
    model, twin = models.toy(blocks=2), models.toy(blocks=2)
    optimizer, plain = sharded(model, stage), sharded(twin, stage)
    for net, its in ((model, optimizer), (twin, plain)):
        train_by_hand(net, its, range(2))
    # Whole inside, where the model itself can be copied.
    with optimizer.full_params():
        said = refusals_of(model, optimizer)
    for net, its in ((model, optimizer), (twin, plain)):
        train_by_hand(net, its, range(2, 4))
    return said, differing(everything(model, optimizer), everything(twin, plain))


@at_worlds
@in_stages
def test_a_copy_is_refused_with_a_remedy(stage: int, at: int) -> None:
    for said, _ in case.done(at)["copies", stage]:
        assert said.keys() == OF_THE_OPTIMIZER.keys() | WITH_THE_MODEL.keys()
        for message in said.values():
            assert "cannot be copied or pickled" in message
            assert "full_params" in message and "full_state_dict" in message


@at_worlds
@in_stages
def test_training_goes_on_after_a_refused_copy(stage: int, at: int) -> None:
    for _, differences in case.done(at)["copies", stage]:
        assert differences == []


@case
def copies_while_sharded(stage: int) -> list[str]:
    """Return what attempts to copy a trainer say outside of full_params, where stage 3
    has no weights to copy either."""
    model = models.toy(blocks=2)
    optimizer = sharded(model, stage)
    said = []
    for attempt in (copy.deepcopy, pickle.dumps, saved):
        for value in ((model, optimizer), Trainer(model, optimizer)):
            with pytest.raises((TypeError, RuntimeError)) as error:
                attempt(value)
            said.append(str(error.value))
    train_by_hand(model, optimizer, range(1))
    return said


@at_worlds
@in_stages
def test_a_copy_of_a_trainer_is_refused_while_it_is_sharded(
    stage: int, at: int
) -> None:
    for said in case.done(at)["copies_while_sharded", stage]:
        assert len(said) == 6
        for message in said:
            assert "optimizer.full_params()" in message


@case
def what_the_message_says(stage: int) -> list[str]:
    """Return where a copy differs that was made as the message says, and trained."""
    model = models.toy(blocks=2)
    optimizer = sharded(model, stage)
    train_by_hand(model, optimizer, range(2))
    with optimizer.full_params():
        twin = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.full_state_dict())
    second = sharded(twin, stage)
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    for net, its in ((model, optimizer), (twin, second)):
        train_by_hand(net, its, range(2, 4))
    return differing(everything(model, optimizer), everything(twin, second))


@at_worlds
@in_stages
def test_the_remedy_copies(stage: int, at: int) -> None:
    for differences in case.done(at)["what_the_message_says", stage]:
        assert differences == []


@pytest.mark.parametrize(
    "rule", [zerokern.AdamW, zerokern.Adam, zerokern.SGD, zerokern.Lion]
)
def test_every_rule_refuses_before_anything_is_built_upon(rule: Any) -> None:
    """Also right after construction, and also what has no state."""
    model = models.toy(blocks=1)
    optimizer = rule(model.parameters(), lr=1e-3)
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps, saved):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(optimizer)
    train_by_hand(model, optimizer, range(1))


def test_schedulers_and_states_can_be_copied() -> None:
    """What is around the optimizer is plain data."""
    model = models.toy(blocks=1)
    optimizer = zerokern.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train_by_hand(model, optimizer, range(1))
    scheduler.step()
    state = quiet_state_dict(optimizer)
    for value in (scheduler.state_dict(), state, optimizer.param_groups[0]["betas"]):
        copy.deepcopy(value)
        pickle.dumps(value)
    twin = copy.deepcopy(state)
    assert twin["param_groups"] == state["param_groups"]
