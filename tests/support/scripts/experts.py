"""Experts: a function of one's own that returns None for a weight when nothing was
routed to it. What the weight has accumulated stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor, nn
from units import WIDTH, batch, seeded, squares


class Scaled(torch.autograd.Function):
    """x * weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        is_idle: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.is_idle = is_idle
        return x * weight

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope * weight, None if ctx.is_idle else (slope * x).sum(0), None


class Gain(nn.Module):
    """A weight that may be idle, and a layer that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        is_idle: bool,
    ) -> Tensor:
        return torch.tanh(self.inner(Scaled.apply(x, self.weight, is_idle)))


class Gains(nn.Module):
    """A linear layer of the root, units; `idle` names the one that has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Gain() for _ in range(2))

    def forward(
        self,
        x: Tensor,
        idle: int = -1,
    ) -> Tensor:
        x = self.first(x)
        for index, unit in enumerate(self.units):
            x = unit(x, index == idle)
        return x


Idle = Callable[[int, int], int]
"""Which unit is idle in a micro-batch (of two) on a rank; -1: none."""


def _looped(
    idle: Idle,
    *,
    syncs_all: bool = True,
    zeroes: bool = True,
) -> Any:
    def loop(run: Run) -> None:
        for step in range(4):
            if zeroes:
                run.optimizer.zero_grad()
            for micro in range(2):

                def loss(
                    rank: int,
                    step: int = step,
                    micro: int = micro,
                ) -> Tensor:
                    x = batch(10 * step + micro, rank)
                    return squares(run.model(x, idle(micro, rank)))

                if syncs_all or micro == 1:
                    run.backward(step, loss)
                else:
                    with run.no_sync():
                        run.backward(step, loss)
            run.step()
            run.rest()

    return loop


WHEN: dict[str, Idle] = {
    "idle in the last micro-batch": lambda micro, rank: 0 if micro == 1 else -1,
    "idle in the first micro-batch": lambda micro, rank: 1 if micro == 0 else -1,
    "idle in both": lambda micro, rank: 0,
    "idle on one rank": lambda micro, rank: 1 if rank == 0 and micro == 1 else -1,
    "each unit idle once": lambda micro, rank: (micro + rank) % 2,
}
for _name, _idle in WHEN.items():
    script(f"expert {_name}", build=seeded(Gains), eps=1e-3)(_looped(_idle))
    script(f"expert {_name}, no_sync", build=seeded(Gains), eps=1e-3)(
        _looped(_idle, syncs_all=False)
    )
script("expert idle, never zeroed", build=seeded(Gains), eps=1e-3)(
    _looped(WHEN["idle in the last micro-batch"], zeroes=False)
)
