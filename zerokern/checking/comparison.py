"""What a step has done, and how two accounts of it are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """How far apart the two sides may be in one dtype."""

    gradient: float
    """Relative to the norm of the gradient: another order of sums."""
    noise: float
    """And relative to the norm of all gradients. One that is smaller, such as that of a
    bias whose true gradient is zero, is made of rounding errors."""
    moved: float
    """Of a weight, relative to how far it has moved: Adam takes a gradient near zero by
    its sign, so that a rounding error is worth a step."""
    rounding: float
    """And relative to the weight itself: by how much its dtype rounds."""


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(
        gradient=1e-3,
        noise=1e-5,
        moved=0.05,
        rounding=2.0**-22,
    ),
    torch.bfloat16: Tolerance(
        gradient=5e-2,
        noise=1e-2,
        moved=0.4,
        rounding=2.0**-8,
    ),
    torch.float16: Tolerance(
        gradient=2e-2,
        noise=2e-3,
        moved=0.2,
        rounding=2.0**-11,
    ),
}

Gradients = Mapping[str, Tensor | None]
Weights = Mapping[str, Tensor]


@dataclass
class Step:
    """What a step has worked with and what it has left, by name of the parameter."""

    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Averaged over the ranks, unscaled and clipped: what the update has used. None of
    a parameter that was not used."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the update."""

    def use(self, name: str, gradient: Tensor | None) -> None:
        """Note the gradient of a parameter."""
        self.gradients[name] = gradient

    def leave(self, weights: Weights) -> None:
        """Note the weights after the update."""
        self.weights = dict(weights)


def first_difference(
    ours: Step,
    plain: Step,
    begun: Weights,
    *,
    steps: int,
) -> str | None:
    """Return a clause on the first parameter in which two steps differ; None if none
    does.

    Args:
        ours, plain: of the same step. Gradients are compared where both have some.
        begun: the weights before the first step.
        steps: so far; differences add up over them.
    """
    total = total_norm(plain.gradients)
    for name, gradient in plain.gradients.items():
        if name in ours.gradients:
            found = _gradient_differs(ours.gradients[name], gradient, total)
            if found is not None:
                return f"the gradient of {name!r} {found}"
    for name, weight in plain.weights.items():
        if name not in ours.weights:
            return f"{name!r} is no parameter of the optimizer"
        gradient = plain.gradients.get(name)
        if gradient is not None and _is_noise(gradient, total):
            continue
        start = begun.get(name, torch.zeros_like(weight))
        found = _weight_differs(ours.weights[name], weight, start, steps)
        if found is not None:
            return f"{name!r} {found}"
    return None


def total_norm(gradients: Gradients) -> float:
    """Return the norm of all gradients together."""
    squares = 0.0
    for gradient in gradients.values():
        if gradient is not None:
            squares += norm_of(gradient) ** 2
    return math.sqrt(squares)


def norm_of(tensor: Tensor, other: Tensor | None = None) -> float:
    """Return the norm of a tensor, or of the difference of two."""
    wide = tensor.double()
    if other is not None:
        wide = wide - other.double()
    return float(wide.norm())


def _is_noise(gradient: Tensor, total: float) -> bool:
    limit = TOLERANCES[gradient.dtype].noise * total
    return norm_of(gradient) <= limit


def _gradient_differs(
    ours: Tensor | None,
    plain: Tensor | None,
    total: float,
) -> str | None:
    if ours is None or plain is None:
        if ours is plain:
            return None
        return f"is {_state(ours)}, and {_state(plain)} in plain torch"
    is_finite = bool(plain.isfinite().all())
    if bool(ours.isfinite().all()) != is_finite:
        return "is finite on one side only"
    size, apart = norm_of(plain), norm_of(plain, ours)
    tolerance = TOLERANCES[plain.dtype]
    limit = tolerance.gradient * size + tolerance.noise * total
    if apart <= limit or not is_finite:
        return None
    return f"is {_percent(apart, size)} off that of plain torch"


def _weight_differs(
    ours: Tensor,
    plain: Tensor,
    start: Tensor,
    steps: int,
) -> str | None:
    if ours.shape != plain.shape:
        return f"has shape {tuple(ours.shape)}, and {tuple(plain.shape)} in plain torch"
    tolerance = TOLERANCES[plain.dtype]
    moved, apart = norm_of(plain, start), norm_of(plain, ours)
    rounding = tolerance.rounding * norm_of(plain)
    limit = tolerance.moved * steps**0.5 * moved + rounding
    if apart <= limit:
        return None
    if norm_of(ours, start) <= rounding:
        return "has not moved, and it has in plain torch"
    return f"is {_percent(apart, moved)} of its way off that of plain torch"


def _state(gradient: Tensor | None) -> str:
    return "not there" if gradient is None else "there"


def _percent(apart: float, size: float) -> str:
    if not size:
        return f"{apart:.3g}, where that is 0,"
    return f"{100 * apart / size:.3g} %"
