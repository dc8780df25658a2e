"""Small models of units, batches for them, and scripts that are a loss and nothing
else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor, nn

WIDTH = 6

Loss = Callable[[nn.Module, Tensor], Tensor]
Build = Callable[[], nn.Module]


def batch(step: int, of_rank: int) -> Tensor:
    """Return a batch [4, WIDTH]."""
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    return torch.randn(4, WIDTH, generator=generator)


def seeded(build: Build) -> Build:
    """Return a function that makes the same model each time."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return made


def loss_script(build: Build) -> Callable[[Loss], Loss]:
    """Register a loop over a loss of a model and a batch. A decorator."""

    def register(loss: Loss) -> Loss:
        def loop(run: Run) -> None:
            for step in range(3):

                def of_rank(rank: int, step: int = step) -> Tensor:
                    return loss(run.model, batch(step, rank))

                run.optimizer.zero_grad()
                run.backward(step, of_rank)
                run.step()
                run.rest()

        # A large eps: no gradient is so small that its sign is a matter of rounding.
        script(loss.__name__, build=seeded(build), eps=1e-3)(loop)
        return loss

    return register


class Unit(nn.Module):
    """x + tanh(x W) V, with a weight of its own beside a module's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)

    def forward(self, x: Any) -> Any:
        return x + self.inner(self.hidden(x))


class Stack(nn.Module):
    """A linear layer of the root, units, a norm of the root."""

    def __init__(self, unit: type[nn.Module] = Unit, number: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(unit() for _ in range(number))
        self.last = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            # Uneven, lest sums over the features of the output be the same for all.
            self.last.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
            self.last.bias.copy_(torch.linspace(-0.5, 0.5, WIDTH))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for unit in self.units:
            x = unit(x)
        return self.last(x)


def of(unit: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(unit)


def squares(x: Tensor) -> Tensor:
    return (x - 1).square().mean()
