"""What one update rule adds to a sharded optimizer: the states it keeps, and its
numbers for the scalar table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import ops

Group = Mapping[str, Any]


@dataclass(frozen=True)
class UpdateRule:
    """An update rule as one optimizer uses it."""

    kernel: ops.Rule
    moments: Mapping[str, str]
    """The states by their names in torch, and which tensors of a shard they are."""

    numbers: Callable[[Group], list[float | Tensor]]
    """Returns one param group's numbers in the order of ops.HYPER."""


def adam(groups: Sequence[Group]) -> UpdateRule:
    """Return the rule of Adam and AdamW.

    Raises:
        ValueError: amsgrad is set in some groups and not in others.
    """
    amsgrad = _same("amsgrad", [bool(group["amsgrad"]) for group in groups])
    moments = {"exp_avg": "first", "exp_avg_sq": "second"}
    if amsgrad:
        moments["max_exp_avg_sq"] = "largest"
    return UpdateRule("adam", moments, _adam_numbers)


def lion(groups: Sequence[Group]) -> UpdateRule:
    """Return the rule of Lion."""
    return UpdateRule("lion", {"exp_avg": "first"}, _lion_numbers)


def sgd(groups: Sequence[Group]) -> UpdateRule:
    """Return the rule of SGD; without momentum in any group there is no state."""
    has_momentum = any(is_nonzero(group["momentum"]) for group in groups)

    def numbers(group: Group) -> list[float | Tensor]:
        if is_nonzero(group["momentum"]) and not has_momentum:
            raise ValueError(
                f"momentum={group['momentum']} was set after construction, where no"
                " group had any, so there is no buffer for it; build the optimizer"
                " with momentum"
            )
        return _sgd_numbers(group)

    return UpdateRule(
        "sgd", {"momentum_buffer": "first"} if has_momentum else {}, numbers
    )


def is_nonzero(value: float | Tensor) -> bool:
    """Return whether a number is not 0; a tensor, which is not looked at, may be."""
    return isinstance(value, Tensor) or value != 0


def _same(name: str, values: Sequence[bool]) -> bool:
    if len(set(values)) > 1:
        raise ValueError(
            f"{name} differs between param groups ({values}); all groups share buckets:"
            " give all the same"
        )
    return values[0]


def _adam_numbers(group: Group) -> list[float | Tensor]:
    decoupled = float(group["decoupled_weight_decay"])
    return [
        group["lr"],
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        _sign(group),
        decoupled,
        0.0,
    ]


def _lion_numbers(group: Group) -> list[float | Tensor]:
    return [
        group["lr"],
        *group["betas"],
        0.0,
        group["weight_decay"],
        _sign(group),
        1.0,
        0.0,
    ]


def _sgd_numbers(group: Group) -> list[float | Tensor]:
    momentum, nesterov = group["momentum"], float(group["nesterov"])
    return [
        group["lr"],
        momentum,
        group["dampening"],
        0.0,
        group["weight_decay"],
        _sign(group),
        0.0,
        nesterov,
    ]


def _sign(group: Group) -> float:
    return -1.0 if group["maximize"] else 1.0
