"""Update rules: each is torch's, on one rank and on several, within a few ulp of
float64; its state goes to torch and comes back."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import (
    STAGES,
    apart,
    differing,
    integer_gradient,
    set_integer_gradients,
    sharded,
    whole,
)
from torch import Tensor, nn
from training import params_of, train_by_hand

import zerokern
from zerokern import Precision


@dataclass(frozen=True)
class Rule:
    """A class that torch has, too, and how it is made."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], Any] = nn.Module.parameters

    @property
    def ours(self) -> Any:
        return getattr(zerokern, self.name)

    @property
    def torchs(self) -> Any:
        return getattr(torch.optim, self.name)


# ----------------------------------------------------------------------- a world of one


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return decay for matrices; other lr, betas and eps for the rest, all inside one
    bucket."""
    return [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": 0.3,
            "betas": (0.8, 0.95),
        },
        {
            "params": [p for p in model.parameters() if p.dim() < 2],
            "weight_decay": 0.0,
            "lr": 3e-2,
            "eps": 1e-5,
        },
    ]


def three_interleaved_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return alternate parameters, one group with lr 0."""
    params = list(model.parameters())
    rates = enumerate((0.0, 1e-2, 3e-2))
    return [{"params": params[i::3], "lr": lr} for i, lr in rates]


DECAY = {"weight_decay": 0.1}
ALONE = {
    "AdamW": Rule("AdamW"),
    "AdamW without decay": Rule("AdamW", {"weight_decay": 0.0}),
    "AdamW maximize": Rule("AdamW", {"maximize": True}),
    "AdamW lr tensor": Rule("AdamW", {"lr": torch.tensor(1e-2)}),
    "AdamW large eps": Rule("AdamW", {"eps": 1e-2, "betas": (0.5, 0.6)}),
    "AdamW zero betas": Rule("AdamW", {"betas": (0.0, 0.0)}),
    "AdamW two groups": Rule("AdamW", groups=two_groups),
    "AdamW interleaved groups": Rule("AdamW", groups=three_interleaved_groups),
    "Adam": Rule("Adam"),
    "Adam L2": Rule("Adam", DECAY),
    "Adam L2 maximize": Rule("Adam", {**DECAY, "maximize": True}),
    "Adam L2 two groups": Rule("Adam", groups=two_groups),
    "Adam decoupled": Rule("Adam", {**DECAY, "decoupled_weight_decay": True}),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_world_of_one_follows_torch(name: str) -> None:
    rule = ALONE[name]
    results = []
    for optimizer_class in (rule.ours, rule.torchs):
        model = models.toy()
        options = {"lr": 1e-2, **rule.options}
        optimizer = optimizer_class(rule.groups(model), **options)
        for step in range(5):
            optimizer.zero_grad()
            models.loss_of(model, *models.batch(step)).backward()
            optimizer.step()
        results.append(whole(model, optimizer))
    assert apart(*results) == {}


def test_learning_rate_zero_keeps_a_group_still() -> None:
    model = models.toy()
    before = params_of(model)
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.0}, {"params": rest}]
    optimizer = zerokern.AdamW(groups, lr=1e-2)
    models.loss_of(model, *models.batch(0)).backward()
    optimizer.step()
    changed = differing(whole(model, optimizer), before)
    assert "embedding.weight" not in changed
    assert len(changed) == len(before) - 1


def test_learning_rate_tensor_is_read_at_every_step() -> None:
    """Filled in place, then replaced by a float."""
    results = []
    for optimizer_class in (zerokern.AdamW, torch.optim.AdamW):
        model = models.toy()
        optimizer = optimizer_class(model.parameters(), lr=torch.tensor(1e-2))
        for step in range(4):
            optimizer.zero_grad()
            models.loss_of(model, *models.batch(step)).backward()
            optimizer.step()
            if step < 2:
                optimizer.param_groups[0]["lr"].mul_(0.5)
            else:
                optimizer.param_groups[0]["lr"] = 1e-3
        results.append(whole(model, optimizer))
    assert apart(*results) == {}


def ulps(ours: Tensor, exact: Tensor, scale: Tensor) -> Tensor:
    """Return the difference from the exact result rounded to fp32, in ulps of the
    largest number it came from."""
    spacing = torch.nextafter(scale.abs(), torch.tensor(torch.inf)) - scale.abs()
    return (ours.double() - exact.float().double()).abs() / spacing.double()


@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
@pytest.mark.parametrize("lr", (1e-4, 1e-2, 1.0))
def test_one_step_is_within_two_ulp_of_float64(lr: float, weight_decay: float) -> None:
    """Against torch.optim.AdamW in float64, on the same fp32 inputs, for parameters and
    both moments."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(20_000, generator=generator)
    grad = torch.randn(20_000, generator=generator) * torch.logspace(-12, 3, 20_000)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.double())
    mine = zerokern.AdamW([ours], lr=lr, weight_decay=weight_decay)
    exact = torch.optim.AdamW([theirs], lr=lr, weight_decay=weight_decay)
    ours.grad, theirs.grad = grad.clone(), grad.double()
    mine.step()
    exact.step()
    # p*decay - update cancels where they are close, so an ulp is that of the larger
    # operand.
    scale = torch.maximum(start.abs(), ours.detach().abs())
    errors = ulps(ours.detach(), theirs.detach(), scale)
    assert (errors * (start.abs() > 8 * lr)).amax() <= 2
    # A weight no larger than its update shows the seven roundings of the latter.
    assert errors.amax() <= 5
    for name in ("exp_avg", "exp_avg_sq"):
        value = mine.state_dict()["state"][0][name]
        assert ulps(value, exact.state[theirs][name], value).amax() <= 2


# ------------------------------------------------- amsgrad and SGD, on one rank and two

AMSGRAD = {"lr": 1e-2, "amsgrad": True}
SGD = {"lr": 1e-2}
MOMENTUM = {"lr": 1e-2, "momentum": 0.9}
RULES = {
    "adamw amsgrad": Rule("AdamW", {**AMSGRAD, "weight_decay": 0.1}),
    "adam amsgrad maximize": Rule("Adam", {**AMSGRAD, "maximize": True}),
    "sgd": Rule("SGD", SGD),
    "sgd decay": Rule("SGD", {**SGD, "weight_decay": 0.1}),
    "sgd momentum": Rule("SGD", MOMENTUM),
    "sgd dampening": Rule("SGD", {**MOMENTUM, "dampening": 0.5}),
    "sgd nesterov maximize": Rule(
        "SGD", {**MOMENTUM, "nesterov": True, "weight_decay": 0.1, "maximize": True}
    ),
}


def same_as_torch(name: str, stage: int) -> dict[str, float]:
    """Train ours on each rank's gradients, torch's on their mean; return what is
    apart."""
    rule = RULES[name]
    model, other = models.toy(), models.toy()
    optimizer = sharded(model, stage, adam=rule.ours, **rule.options)
    reference = rule.torchs(other.parameters(), **rule.options)
    for step in range(6):
        optimizer.zero_grad()
        set_integer_gradients(model, step)
        for index, param in enumerate(other.parameters()):
            param.grad = integer_gradient(param.shape, step, index, 0, 1)
        if step == 2:  # one parameter without a gradient for a step
            for net in (model, other):
                list(net.parameters())[1].grad = None
        optimizer.step()
        reference.step()
    saved = optimizer.full_state_dict()
    found = whole(model, optimizer)
    reference.load_state_dict(saved)  # what torch would go on with
    return apart(found, params_of(other))


@functools.cache
def against_torch() -> ranks.Cases:
    """Return every rule and stage on two ranks."""
    cases = itertools.product(RULES, STAGES)
    return ranks.run_cases(
        2, {case: functools.partial(same_as_torch, *case) for case in cases}
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("stage", STAGES)
def test_rules_are_those_of_torch(name: str, stage: int) -> None:
    assert same_as_torch(name, 1) == {}
    assert against_torch()[name, stage] == [{}, {}]


@pytest.mark.parametrize("name", RULES)
def test_states_come_and_go_to_torch(name: str) -> None:
    """Torch's checkpoint goes on in ours: momentum is not dampened as if it were new,
    maxima are kept."""
    rule = RULES[name]
    model = models.toy()
    reference = rule.torchs(model.parameters(), **rule.options)
    for step in range(3):
        set_integer_gradients(model, step)
        reference.step()
    other = copy.deepcopy(model)
    optimizer = rule.ours(other.parameters(), **rule.options)
    optimizer.load_state_dict(reference.state_dict())
    for step in range(3, 6):
        set_integer_gradients(model, step)
        set_integer_gradients(other, step)
        reference.step()
        optimizer.step()
    assert apart(whole(other, optimizer), params_of(model)) == {}


def test_sgd_without_momentum_has_no_state() -> None:
    model = models.toy().bfloat16()
    optimizer = zerokern.SGD(model.parameters(), precision=Precision(master="none"))
    train_by_hand(model, optimizer, range(2))
    assert optimizer.memory().moments == optimizer.memory().master == 0
    with pytest.raises(ValueError, match=r"momentum=0\.9 was set after construction"):
        optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.step()
