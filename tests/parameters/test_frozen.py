"""Frozen parameters: they cost no memory for gradients."""

from __future__ import annotations

from typing import Any

import torch
from marks import at_worlds, in_stages
from oracle import sharded
from registry import cases_of
from torch import Tensor, nn

case = cases_of("parameters")


UNITS = 5


class Adapted(nn.Module):
    """A frozen matrix of 4096 elements, and 40 trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 64) / 8, requires_grad=False)
        self.adapter = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + nn.functional.pad(self.adapter, (0, 24))


class AdaptedModel(nn.Module):
    """Units that are 99 % frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Adapted() for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


@case
def mostly_frozen(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AdaptedModel()
    optimizer = sharded(model, stage)
    optimizer.coordinator.transport.peak_bytes = 0
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        during = optimizer.memory().gradients
        optimizer.step()
    return {
        "during": during,
        "memory": optimizer.memory(),
        "peak": optimizer.coordinator.transport.peak_bytes,
        "none": [unit.matrix.grad is None for unit in model.units],
    }


@at_worlds
@in_stages
def test_frozen_weights_cost_no_gradient_memory(stage: int, at: int) -> None:
    """Nor moments, nor scratch memory in backward. A slot of 40 elements is 64, and a
    shard at least 64."""
    slots = -(-UNITS // at) * at  # units, padded to a multiple of the world
    elements = {
        1: 64 * slots,
        2: 64 * slots // at,
        3: 64 * UNITS if at > 1 else 64 * slots,
    }[stage]
    frozen = UNITS * 64 * 64 * 4
    updated = elements // at if stage == 1 else elements
    for result in case.done(at)["mostly_frozen", stage]:
        assert result["memory"].gradients == result["during"] == 4 * elements
        assert result["memory"].moments == 2 * 4 * updated
        assert result["peak"] < (frozen if stage == 3 else frozen // 20)
        assert result["none"] == [True] * UNITS
