"""A machine's rates, fitted to measured steps of known work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .machine import Machine
from .rehearsal import Trace
from .replay import replay

COSTS = ("compute", "memory", "per_operation", "intra", "latency", "inter")
GAIN = 1e-9
"""Sum of squared relative errors: an iteration that takes away less is the last."""
HALVINGS = 8
"""Slopes hold nearby: steps are tried down to 1/128 of what they promise."""
NOTHING = 1e-30
"""The least cost, in seconds: rates must be finite."""


def fit(observed: Sequence[tuple[Trace, int, float]], machine: Machine) -> Machine:
    """Return the machine whose rates explain times best, relative to each.

    A step is a maximum of sums, each linear in what a FLOP, a byte, a message costs. So
    least squares, with the slopes of the sum that is largest; which one that is depends
    on the costs, hence again with those found, until nothing is gained (Gauss and
    Newton's method, with shorter steps where that helps). Slopes at first are those of
    a machine where one thing costs and nothing else: all of it shows.

    Args:
        observed: what was done, on how many ranks, in how many seconds.
        machine: cores, ranks of a node and name are taken from it.
    """

    def seconds(costs: Tensor) -> Tensor:
        candidate = _with_costs(machine, costs)
        return torch.tensor(
            [replay(trace, candidate, world).step for trace, world, _ in observed],
            dtype=costs.dtype,
        )

    measured = torch.tensor([took for _, _, took in observed], dtype=torch.float64)

    def missed(costs: Tensor) -> float:
        return float((seconds(costs) / measured - 1).square().sum())

    units = torch.eye(len(COSTS), dtype=torch.float64)
    slopes = torch.stack([seconds(unit) for unit in units], dim=1)
    small = 1e-6 * measured.mean() / slopes.mean(dim=0).clamp(min=NOTHING)
    costs = solve(slopes, measured)
    gained = math.inf
    while gained > GAIN:
        before = missed(costs)
        predicted = seconds(costs)
        slopes = torch.stack(
            [
                (seconds(costs + d * unit) - predicted) / d
                for unit, d in zip(units, small, strict=True)
            ],
            dim=1,
        )
        aim = solve(slopes, measured)
        steps = [costs + (aim - costs) * 0.5**halvings for halvings in range(HALVINGS)]
        nearest = min(steps, key=missed)
        gained = before - missed(nearest)
        if gained > 0:
            costs = nearest
    fitted = _with_costs(machine, costs)
    # Other nodes may not have been there.
    return replace(fitted, inter=min(fitted.inter, fitted.intra))


def solve(slopes: Tensor, measured: Tensor) -> Tensor:
    """Return the costs whose sums are nearest to what was measured, relative to it;
    none is negative."""
    return non_negative(slopes / measured[:, None], torch.ones_like(measured))


def _with_costs(machine: Machine, costs: Tensor) -> Machine:
    """Return a machine that takes so many seconds per FLOP, byte of memory, operation,
    byte and latency of links."""
    flop, byte, operation, inside, hop, across = costs.clamp(min=NOTHING).tolist()
    return replace(
        machine,
        compute=1 / flop,
        peak=1 / flop,
        memory=1 / byte,
        per_operation=operation,
        intra=1 / inside,
        latency=hop,
        inter=1 / across,
    )


def non_negative(rows: Tensor, values: Tensor) -> Tensor:
    """Return the least squares solution without negative numbers: what would be
    negative is left out, worst first."""
    scale = rows.norm(dim=0).clamp(min=1e-30)
    kept = list(range(rows.shape[1]))
    while True:
        found = torch.linalg.lstsq(
            rows[:, kept] / scale[kept], values[:, None], driver="gelsd"
        ).solution[:, 0]
        if (found >= 0).all():
            solution = torch.zeros(rows.shape[1], dtype=rows.dtype)
            solution[kept] = found / scale[kept]
            return solution
        del kept[int(found.argmin())]
