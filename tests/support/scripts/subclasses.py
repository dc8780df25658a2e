"""Parameters of classes of their own, as quantisation libraries have them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor, nn
from units import WIDTH, Stack, batch, of, seeded, squares


class Named(nn.Parameter):
    """Nothing but a name."""


class Scaled(nn.Parameter):
    """Knows a factor, as quantised weights do, and has a constructor of its own."""

    scale: float

    def __new__(
        cls, data: Tensor, requires_grad: bool = True, scale: float = 0.5
    ) -> Scaled:
        made = super().__new__(cls, data, requires_grad)
        made.scale = scale
        return made

    def scaled(self) -> Tensor:
        return self * self.scale


class Mixed(nn.Module):
    """A unit with parameters of three classes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Named(0.4 * torch.randn(WIDTH, WIDTH))
        self.gain = Scaled(torch.ones(WIDTH), scale=0.7)
        self.levels = Named(torch.arange(WIDTH, dtype=torch.uint8), requires_grad=False)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.mix) * self.levels.float() / WIDTH
        return x + self.inner(hidden * self.gain.scaled())


def _frozen_beside(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _check_classes(model: Any) -> None:
    for unit in model.units:
        assert isinstance(unit.mix, Named) and isinstance(unit.levels, Named)
        assert isinstance(unit.gain, Scaled) and isinstance(unit.gain, nn.Parameter)
        assert not isinstance(unit.mix, Scaled)
        assert unit.gain.scale == 0.7
        assert unit.mix.shape == (WIDTH, WIDTH) and unit.levels.dtype == torch.uint8


def _train(run: Run, steps: range) -> None:
    for step in steps:
        run.optimizer.zero_grad()
        run.backward(step, lambda r, s=step: squares(run.model(batch(s, r))))
        run.step()
        run.rest()


MIXED = {"build": seeded(of(Mixed)), "groups": _frozen_beside, "eps": 1e-3}


@script(**MIXED)
def parameters_of_other_classes(run: Run) -> None:
    """They keep their class, and what they know, between steps."""
    for step in range(3):
        _check_classes(run.model)
        _train(run, range(step, step + 1))
    _check_classes(run.model)


class Rooted(Stack):
    """One of them is the root's."""

    def __init__(self) -> None:
        super().__init__(Mixed, 2)
        self.gain = Scaled(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain.scaled()


@script(build=seeded(Rooted), groups=_frozen_beside, eps=1e-3)
def a_parameter_of_another_class_in_the_root(run: Run) -> None:
    _train(run, range(3))
    assert isinstance(run.model.gain, Scaled) and run.model.gain.scale == 0.5


class Tied(Stack):
    """Two units share one."""

    def __init__(self) -> None:
        super().__init__(Mixed, 2)
        self.units[1].mix = self.units[0].mix


@script(build=seeded(Tied), groups=_frozen_beside, eps=1e-3)
def a_tied_parameter_of_another_class(run: Run) -> None:
    _train(run, range(3))
    assert run.model.units[1].mix is run.model.units[0].mix


@script(**MIXED)
def a_copy_of_parameters_of_other_classes(run: Run) -> None:
    """A copy that was made of whole parameters has their classes and values, and is a
    plain model."""
    _train(run, range(2))
    if run.torch:
        twin = copy.deepcopy(run.model)
    else:
        with run.optimizer.full_params():
            twin = copy.deepcopy(run.model)
    for unit in twin.units:
        assert type(unit.mix) is Named and type(unit.gain) is Scaled
    run.seen += [param.detach().float() for param in twin.parameters()]
    run.seen.append(squares(twin(batch(8, 0))).detach())
    _train(run, range(2, 4))
