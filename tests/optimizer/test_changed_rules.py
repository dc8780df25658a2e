"""Options that decide which states there are, changed after construction: refused,
since there is no place for the states; set back, training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import (
    apart,
    differing,
    integer_gradient,
    set_integer_gradients,
    sharded,
    whole,
)
from registry import cases_of
from torch import nn
from training import everything, interleaved, params_of, train_by_hand

import zerokern

case = cases_of("optimizer")

Edit = tuple[Any, dict[str, Any], str, Any]
"""A rule, its options, and what one of them is set to later."""

EDITS: dict[str, Edit] = {
    "amsgrad on": (zerokern.AdamW, {}, "amsgrad", True),
    "amsgrad off": (zerokern.AdamW, {"amsgrad": True}, "amsgrad", False),
    "amsgrad on in Adam": (zerokern.Adam, {"weight_decay": 0.1}, "amsgrad", True),
    "amsgrad off in Adam": (zerokern.Adam, {"amsgrad": True}, "amsgrad", False),
    "momentum on": (zerokern.SGD, {}, "momentum", 0.9),
    "momentum as a tensor": (zerokern.SGD, {}, "momentum", torch.tensor(0.9)),
}


def _edited(
    stage: int,
    name: str,
    *,
    every_group: bool,
) -> tuple[str, list[str]]:
    """Return what a step says after an edit, and where the training differs from one
    without it: at once, and after two more steps."""
    rule, options, key, value = EDITS[name]
    nets: list[nn.Module] = [models.toy(blocks=2), models.toy(blocks=2)]
    its = [
        sharded(
            net,
            stage,
            interleaved(net),
            adam=rule,
            lr=1e-2,
            **options,
        )
        for net in nets
    ]
    for net, optimizer in zip(nets, its, strict=True):
        train_by_hand(net, optimizer, range(2))
        optimizer.zero_grad()
        set_integer_gradients(net, 2)
    groups = its[0].param_groups[: None if every_group else 1]
    before = [group[key] for group in groups]
    for group in groups:
        group[key] = value
    with pytest.raises(ValueError) as error:
        its[0].step()
    for group, old in zip(groups, before, strict=True):
        group[key] = old
    differences = differing(*map(everything, nets, its))
    for net, optimizer in zip(nets, its, strict=True):
        optimizer.step()  # the gradients are still there
        train_by_hand(net, optimizer, range(3, 4))
    return str(error.value), differences + differing(*map(everything, nets, its))


@case
def edited_rules(stage: int) -> dict[Any, Any]:
    return {
        (name, every_group): _edited(stage, name, every_group=every_group)
        for name in EDITS
        for every_group in (True, False)
    }


@at_worlds
@in_stages
@pytest.mark.parametrize("every_group", (True, False), ids=["all groups", "one group"])
@pytest.mark.parametrize("name", EDITS)
def test_a_changed_rule_is_refused(
    name: str, every_group: bool, stage: int, at: int
) -> None:
    """It names the option; nothing was updated, and the old value trains on."""
    key = EDITS[name][2]
    for results in case.done(at)["edited_rules", stage]:
        message, differences = results[name, every_group]
        assert key in message
        assert differences == []


@case
def loaded_rules(stage: int) -> list[str]:
    """Load the state of an optimizer with amsgrad into one without; return what the
    next step says, or the load."""
    model, other = models.toy(blocks=1), models.toy(blocks=1)
    optimizer, teacher = sharded(model, stage), sharded(other, stage, amsgrad=True)
    train_by_hand(other, teacher, range(1))
    state = teacher.full_state_dict()
    before = everything(model, optimizer)
    set_integer_gradients(model, 0)
    with pytest.raises(ValueError, match="amsgrad") as error:
        optimizer.load_state_dict(state)
        before = everything(model, optimizer)
        optimizer.step()
    return [str(error.value), *differing(everything(model, optimizer), before)]


@at_worlds
@in_stages
def test_a_loaded_rule_is_refused(stage: int, at: int) -> None:
    for said in case.done(at)["loaded_rules", stage]:
        assert len(said) == 1


SERIES = {
    "other values": (0.9, 0.5, 0.99),
    "0 for a step": (0.9, 0.0, 0.9),
    "0 for good": (0.9, 0.5, 0.0, 0.0),
    "0 at first": (0.0, 0.0, 0.9, 0.9),
}


@case
def another_momentum(stage: int) -> dict[str, list[str]]:
    """Return where SGD differs from torch's when its momentum is changed."""
    return {name: _with_momenta(stage, momenta) for name, momenta in SERIES.items()}


def _with_momenta(stage: int, momenta: Sequence[float]) -> list[str]:
    model, twin = models.toy(blocks=1), models.toy(blocks=1)
    ours = sharded(
        model,
        stage,
        adam=zerokern.SGD,
        lr=1e-2,
        momentum=0.9,
    )
    torchs = torch.optim.SGD(twin.parameters(), lr=1e-2, momentum=0.9)
    for step, momentum in enumerate(momenta):
        ours.param_groups[0]["momentum"] = torchs.param_groups[0]["momentum"] = momentum
        train_by_hand(model, ours, range(step, step + 1))
        for index, param in enumerate(twin.parameters()):
            param.grad = integer_gradient(
                param.shape,
                step,
                index,
                0,
                1,
            )
        torchs.step()
    return list(apart(whole(model, ours), params_of(twin)))


@at_worlds
@in_stages
@pytest.mark.parametrize("name", SERIES)
def test_another_momentum_is_followed(name: str, stage: int, at: int) -> None:
    """There is a buffer, so its factor may change at any time. A step whose momentum is
    0 leaves the buffer alone."""
    for differences in case.done(at)["another_momentum", stage]:
        assert differences[name] == []
