"""Parameters of users' own classes, and tensors that hold other tensors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, differing, sharded
from registry import cases_of
from scripts.subclasses import Mixed, Named, Scaled
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from training import params_of
from units import WIDTH, Stack, batch, squares

case = cases_of("parameters")

# --------------------------------------------------------------- classes of parameters


def mixed() -> Stack:
    torch.manual_seed(0)
    return Stack(Mixed, 2)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


READS = {
    "norm": lambda unit: unit.mix.norm(),
    "product": lambda unit: torch.ones(WIDTH) @ unit.mix,
    "frozen": lambda unit: unit.levels.sum(),
    "own method": lambda unit: unit.gain.scaled(),
    "clone": lambda unit: unit.gain.detach().clone(),
    "deepcopy": lambda unit: copy.deepcopy(unit.gain),
    "index": lambda unit: unit.mix[0] + 1,
    "save": lambda unit: torch.save(unit.mix, io.BytesIO()),
}


@case
def reads_of_classes(stage: int) -> dict[str, str]:
    """Return what each read outside of a forward says; "" if it is right."""
    model = mixed()
    unit: Any = model.units[1]
    expected = mixed().units[1]
    optimizer = sharded(model, stage, trainable(model))
    said = {}
    for name, read in READS.items():
        try:
            value = read(unit)
        except RuntimeError as error:
            said[name] = str(error)
        else:
            said[name] = ""
            if isinstance(value, Tensor):
                assert torch.equal(value, read(expected)), name
    optimizer.comm_log()
    return said


@at_worlds
@in_stages
def test_reads_outside_of_a_forward(stage: int, at: int) -> None:
    """Right where parameters are whole, refused with the unit's name where they are
    not: never values of nobody."""
    for said in case.done(at)["reads_of_classes", stage]:
        for message in said.values():
            if stage == 3 and at > 1:
                assert "'units.1'" in message and "full_params" in message
            else:
                assert message == ""


def classes(model: Any) -> list[str]:
    unit = model.units[0]
    return [type(p).__name__ for p in (unit.mix, unit.gain, unit.levels)]


@case
def classes_of_parameters(stage: int) -> Any:
    """Return the classes before, inside and after full_params, and once the optimizer
    is gone; and whether isinstance holds all the time."""
    model = mixed()
    params = trainable(model)
    optimizer = sharded(model, stage, params)

    def holds() -> bool:
        unit: Any = model.units[0]
        return (
            isinstance(unit.mix, Named)
            and isinstance(unit.gain, Scaled)
            and not isinstance(unit.inner.weight, Named | Scaled)
            and all(isinstance(p, nn.Parameter) for p in model.parameters())
        )

    held = [holds()]
    with optimizer.full_params():
        inside = classes(model)
        held.append(holds())
    squares(model(batch(0, 0))).backward()
    optimizer.step()
    held.append(holds())
    optimizer.let_go()
    held.append(holds())
    return inside, classes(model), held


@at_worlds
@in_stages
def test_classes_are_kept(stage: int, at: int) -> None:
    kinds = ["Named", "Scaled", "Named"]
    for found in case.done(at)["classes_of_parameters", stage]:
        assert found == (kinds, kinds, [True] * 4)


@case
def saved_classes(stage: int) -> list[str]:
    """Return where a model differs that was saved inside full_params and loaded, as a
    whole and as its state dict."""
    model = mixed()
    optimizer = sharded(model, stage, trainable(model), lr=1e-2)
    squares(model(batch(0, 0))).backward()
    optimizer.step()
    file = io.BytesIO()
    with optimizer.full_params():
        torch.save(model, file)
        expected = params_of(model)
        state = copy.deepcopy(model.state_dict())
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    fresh = mixed()
    fresh.load_state_dict(state)
    assert classes(fresh) == ["Named", "Scaled", "Named"]
    differences = differing(params_of(loaded), expected)
    return differences + differing(params_of(fresh), expected)


@at_worlds
@in_stages
def test_values_of_other_classes_are_saved(stage: int, at: int) -> None:
    for differences in case.done(at)["saved_classes", stage]:
        assert differences == []


# ------------------------------------------------------ tensors that hold other tensors


class Wrapped(nn.Module):
    """A unit with a weight that is two tensors, beside plain ones."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        weight = 0.4 * torch.randn(WIDTH, WIDTH)
        both = TwoTensor(weight, weight.clone())
        self.base = nn.Parameter(both, requires_grad=not frozen)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        known = x @ self.base
        return torch.tanh(known.a) + self.adapter(x)


class FrozenUnit(Wrapped):
    def __init__(self) -> None:
        super().__init__(frozen=True)


class TrainedUnit(Wrapped):
    def __init__(self) -> None:
        super().__init__(frozen=False)


def stack(unit: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return Stack(unit, 2)


@case
def trained_wrappers(stage: int) -> list[Any]:
    """Return what construction says, and whether the model still is as it was."""
    model = stack(TrainedUnit)
    places = [p.data_ptr() for p in model.first.parameters()]
    found = []
    for params in (model.parameters(), model.named_parameters()):
        with pytest.raises(ValueError) as error:
            sharded(model, stage, params)
        found.append(str(error.value))
    squares(model(batch(0, 0))).backward()
    untouched = places == [p.data_ptr() for p in model.first.parameters()]
    return [*found, untouched, type(model.units[0].base.data) is TwoTensor]


@at_worlds
@in_stages
def test_trainable_wrappers_are_refused_by_name(stage: int, at: int) -> None:
    """With what could be done, before anything was changed."""
    for by_number, by_name, *untouched in case.done(at)["trained_wrappers", stage]:
        for message in (by_number, by_name):
            assert "TwoTensor" in message and "freeze it" in message
        assert "units.0.base" in by_name
        assert untouched == [True, True]


def _train(model: Any, optimizer: Any, of: range) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for r in of:
            (squares(model(batch(step, r))) / len(of)).backward()
        optimizer.step()


@case
def frozen_wrappers(stage: int) -> Any:
    """Train beside frozen ones; return weights, and what became of the frozen ones."""
    model = stack(FrozenUnit)
    bases = [unit.base for unit in model.units]
    memory = [base.data.a.data_ptr() for base in bases]
    optimizer = sharded(model, stage, trainable(model), lr=1e-2, eps=1e-3)
    of_rank = torch.distributed.get_rank()
    _train(model, optimizer, range(of_rank, of_rank + 1))
    kept = [
        type(unit.base.data) is TwoTensor
        and unit.base is base
        and unit.base.data.a.data_ptr() == place
        and bool((unit.base.data.b == unit.base.data.a).all())
        for unit, base, place in zip(model.units, bases, memory, strict=True)
    ]
    with optimizer.full_params():
        found = {n: p.clone() for n, p in model.named_parameters() if "base" not in n}
        twin = copy.deepcopy(model)
    kept.append(type(twin.units[1].base.data) is TwoTensor)
    return found, kept, optimizer.memory().buffers


@at_worlds
@in_stages
def test_frozen_wrappers_stay_whole(stage: int, at: int) -> None:
    """As 4-bit weights under adapters: the same object, of the same class, at the same
    place; all else trains like torch."""
    model = stack(FrozenUnit)
    plain = torch.optim.AdamW(trainable(model), lr=1e-2, eps=1e-3)
    _train(model, plain, range(at))
    expected = {n: p for n, p in params_of(model).items() if "base" not in n}
    for found, kept, buffers in case.done(at)["frozen_wrappers", stage]:
        assert apart(found, expected) == {}
        assert kept == [True] * 3
        assert buffers == 0
