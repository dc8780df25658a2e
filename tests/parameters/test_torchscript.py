"""Modules that TorchScript has compiled. Scripted ones run no hook, so stage 3 refuses
them as units, before anything is sharded; traced ones run hooks and train."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, rank, sharded, whole, world
from registry import cases_of
from torch import Tensor, nn
from training import params_of
from units import WIDTH, Stack, batch, squares

import zerokern

case = cases_of("parameters")


class Small(nn.Module):
    """A unit that TorchScript can compile."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Chain(nn.Module):
    """A model that it can compile as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Small() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in self.units:
            x = unit(x)
        return x


def quietly(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the same model each time, without the warning that TorchScript is old."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.ones(4, WIDTH))


def with_units(change: Callable[[nn.Module], Any], *which: int) -> nn.Module:
    """Return a model some of whose units were changed."""
    model = Stack(Small, 3)
    for index in which:
        model.units[index] = change(model.units[index])
    return model


def with_scripted_inside() -> nn.Module:
    """A part of a unit is scripted: the unit itself runs hooks."""
    model = Stack(Small, 3)
    for unit in model.units:
        unit.inner = torch.jit.script(unit.inner)
    return model


def with_scripted_first() -> nn.Module:
    """A part of the root is scripted."""
    model = Stack(Small, 2)
    model.first = torch.jit.script(model.first)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "all units": (
        lambda: with_units(
            torch.jit.script,
            0,
            1,
            2,
        ),
        "units.0",
    ),
    "the last unit": (lambda: with_units(torch.jit.script, 2), "units.2"),
    "the model": (lambda: torch.jit.script(Chain()), "model"),
    "one unit of three": (lambda: with_units(torch.jit.script, 1), "units.1"),
}
"""Models, and the module that the message names."""

TRAINED: dict[str, Callable[[], nn.Module]] = {
    "traced units": lambda: with_units(
        traced,
        0,
        1,
        2,
    ),
    "one traced unit": lambda: with_units(traced, 1),
    "a traced model": lambda: traced(Chain()),
    "scripted inside of units": with_scripted_inside,
    "scripted inside of the root": with_scripted_first,
}


def train(
    model: nn.Module,
    optimizer: Any,
    of: list[int],
) -> None:
    for step in range(4):
        optimizer.zero_grad()
        for r in of:
            (squares(model(batch(step, r))) / len(of)).backward()
        optimizer.step()


@functools.cache
def by_torch(name: str, at: int) -> dict[str, Tensor]:
    model = quietly(REFUSED[name][0] if name in REFUSED else TRAINED[name])
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    train(model, plain, list(range(at)))
    return params_of(model)


def trained(stage: int, build: Callable[[], nn.Module]) -> Any:
    model = quietly(build)
    optimizer = sharded(
        model,
        stage,
        lr=1e-2,
        eps=1e-3,
    )
    train(model, optimizer, [rank()])
    found = whole(model, optimizer)
    return found, int(optimizer.skipped_steps), optimizer.memory().buffers


def refused(build: Callable[[], nn.Module]) -> Any:
    """Return what stage 3 says, and whether the model can be trained in stage 2
    afterwards."""
    model = quietly(build)
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError) as error:
        sharded(model, 3)
    untouched = places == [p.data_ptr() for p in model.parameters()]
    optimizer = sharded(
        model,
        2,
        lr=1e-2,
        eps=1e-3,
    )
    train(model, optimizer, [rank()])
    return str(error.value), untouched, whole(model, optimizer)


@case
def scripted_units(stage: int) -> dict[str, Any]:
    if stage == 3 and world() > 1:
        return {name: refused(build) for name, (build, _) in REFUSED.items()}
    return {name: trained(stage, build) for name, (build, _) in REFUSED.items()}


@at_worlds
@in_stages
@pytest.mark.parametrize("name", REFUSED)
def test_scripted_units_are_refused_in_stage_3(
    name: str,
    stage: int,
    at: int,
) -> None:
    """By name, with the parameters as they were; other stages train them, also
    afterwards."""
    for results in case.done(at)["scripted_units", stage]:
        if stage == 3 and at > 1:
            message, untouched, found = results[name]
            assert repr(REFUSED[name][1]) in message
            assert "scripted" in message and "stage 2" in message
            assert untouched
        else:
            found, skipped, buffers = results[name]
            assert skipped == buffers == 0
        assert apart(found, by_torch(name, at)) == {}


@case
def traced_units(stage: int) -> dict[str, Any]:
    return {name: trained(stage, build) for name, build in TRAINED.items()}


@at_worlds
@in_stages
@pytest.mark.parametrize("name", TRAINED)
def test_traced_units_train_like_torch(
    name: str,
    stage: int,
    at: int,
) -> None:
    """Scripted parts of other units are whole while these run."""
    for results in case.done(at)["traced_units", stage]:
        found, skipped, buffers = results[name]
        assert skipped == buffers == 0
        assert apart(found, by_torch(name, at)) == {}


@case(stages=(3,))
def chosen_units(stage: int) -> str:
    """Scripted modules that the user has chosen for units."""
    model = quietly(with_scripted_inside)
    chosen = zerokern.Buckets(
        units=lambda module: isinstance(module, torch.jit.ScriptModule)
    )
    with pytest.raises(ValueError) as error:
        sharded(model, stage, buckets=chosen)
    return str(error.value)


@pytest.mark.parametrize("at", (2,), ids="world{}".format)
def test_chosen_units_that_are_scripted_are_refused(at: int) -> None:
    for message in case.done(at)["chosen_units", 3]:
        assert "'units.0.inner'" in message and "scripted" in message


# ------------------------------------------------------------------- gather_in_forward


LATE = zerokern.Buckets(bytes=200, gather_in_forward=True)

COMPILED: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(Chain()),
    "traced": lambda: traced(Chain()),
    "a scripted unit": lambda: with_units(torch.jit.script, 1),
    "a traced unit": lambda: with_units(traced, 1),
    "a scripted part of units": with_scripted_inside,
}


@case(stages=(1, 2))
def gathers_in_forward(stage: int) -> dict[str, str]:
    """Return what is said."""
    found = {}
    for name, build in COMPILED.items():
        model = quietly(build)
        try:
            sharded(model, stage, buckets=LATE)
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


@at_worlds
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_does_not_wait_for_a_gather(
    name: str, stage: int, at: int
) -> None:
    """It is refused; in a world of one nothing is gathered."""
    for results in case.done(at)["gathers_in_forward", stage]:
        assert ("is TorchScript" in results[name]) == (at > 1)


@case(stages=(1, 2))
def compiled_once_it_was_built(stage: int) -> str:
    model = Chain()
    optimizer = sharded(model, stage, buckets=LATE)
    compiled = quietly(lambda: torch.jit.script(model))
    message = ""
    try:
        for step in range(2):
            optimizer.zero_grad()
            squares(compiled(batch(step, rank()))).backward()
            optimizer.step()
    except RuntimeError as error:
        message = str(error)
    assert not any(p.isnan().any() for p in whole(model, optimizer).values())
    return message


@at_worlds
@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_of_what_was_read_unseen_is_refused(stage: int, at: int) -> None:
    for message in case.done(at)["compiled_once_it_was_built", stage]:
        assert ("was read before it was gathered" in message) == (at > 1)
