"""Several optimizers over disjoint parts of one model. Frozen parameters belong to the
one that came first, and serve the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, world
from registry import SMALL, cases_of
from torch import Tensor, nn

import zerokern

case = cases_of("parameters")

LR = 1e-2


def of(model: nn.Module, *prefixes: str) -> list[nn.Parameter]:
    """Return the parameters whose names begin so."""
    return [p for n, p in model.named_parameters() if n.startswith(prefixes)]


def make(stage: int | None, model: nn.Module, params: Sequence[nn.Parameter]) -> Any:
    """Return an optimizer; stage None is torch's."""
    if stage is None:
        return torch.optim.AdamW(params, lr=LR)
    return zerokern.AdamW(params, lr=LR, stage=stage, model=model, buckets=SMALL)


def train(model: nn.Module, optimizers: Sequence[Any], steps: range) -> None:
    """Take steps of all of them, on the same batch on every rank."""
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        models.loss_of(model, *models.batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()


def full(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Tensor]:
    """Return copies of all parameters."""
    if not optimizers:
        return {n: p.detach().clone() for n, p in model.named_parameters()}
    first, *others = optimizers
    if not hasattr(first, "full_params"):
        return full(model, others)
    with first.full_params():
        return full(model, others)


def _together(stage: int | None, model: nn.Module) -> list[Any]:
    """Two that step in turn, over parts beside a frozen one."""
    model.get_submodule("blocks.1").requires_grad_(False)
    chosen = of(model, "embedding", "blocks.0"), of(model, "head")
    optimizers = [make(stage, model, params) for params in chosen]
    train(model, optimizers, range(3))
    return optimizers


def _one_replaced(stage: int | None, model: nn.Module) -> list[Any]:
    """A newer one takes over the parameters of the second only."""
    model.get_submodule("blocks.1").requires_grad_(False)
    first = make(stage, model, of(model, "embedding", "blocks.0"))
    second = make(stage, model, of(model, "head"))
    train(model, [first, second], range(2))
    third = make(stage, model, of(model, "head"))
    train(model, [first, third], range(2, 4))
    return [first, third]


def _three_in_turn(stage: int | None, model: nn.Module) -> list[Any]:
    """One of three steps at a time; all gradients are formed."""
    model.get_submodule("blocks.0").requires_grad_(False)
    parts = "embedding", "blocks.1", "head"
    optimizers = [make(stage, model, of(model, part)) for part in parts]
    for step in range(6):
        train(model, optimizers[step % 3 : step % 3 + 1], range(step, step + 1))
        for optimizer in optimizers:
            optimizer.zero_grad()
    return optimizers


LOOPS: dict[str, Callable[[int | None, nn.Module], list[Any]]] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (_together, _one_replaced, _three_in_turn)
}


@case
def optimizers_over_parts(stage: int) -> dict[str, dict[str, float]]:
    """Return what differs from torch."""
    found = {}
    for name, loop in LOOPS.items():
        sides = []
        for of_stage in (None, stage):
            model = models.toy(blocks=2)
            sides.append(full(model, loop(of_stage, model)))
        found[name] = apart(sides[1], sides[0])
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", LOOPS)
def test_each_trains_its_own_part(name: str, stage: int, at: int) -> None:
    for results in case.done(at)["optimizers_over_parts", stage]:
        assert results[name] == {}


@case(stages=(3,))
def bytes_of_a_shared_part(stage: int) -> list[int]:
    """Return the bytes of parameters of two optimizers, and of the model."""
    model = models.toy(blocks=2)
    model.get_submodule("blocks.1").requires_grad_(False)
    everything = sum(p.numel() for p in model.parameters()) * 4
    first = make(stage, model, of(model, "embedding", "blocks.0"))
    second = make(stage, model, of(model, "head"))
    return [first.memory().parameters, second.memory().parameters, everything]


@at_worlds
def test_a_frozen_part_is_held_once(at: int) -> None:
    """Both together hold little more than a rank's share of the model: what pads
    their buckets."""
    for first, second, everything in case.done(at)["bytes_of_a_shared_part", 3]:
        padding = 64 * 4 * 40
        assert first > second
        assert first + second <= everything / at + padding
    assert world() == 1
