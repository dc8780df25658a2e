"""Update rules, as data: the states that one keeps, and where its numbers for the
scalar table come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from . import ops

Group = Mapping[str, Any]


class Entry(NamedTuple):
    """Where a number of `ops.HYPER` is found in a param group."""

    key: str
    part: int | None = None
    """Of the number, where the value is a tuple."""


MAXIMIZE = "maximize"
"""The key that stands for a sign: -1 if it is set, else 1."""


@dataclass(frozen=True)
class UpdateRule:
    """An update rule as one optimizer uses it."""

    kernel: ops.Rule
    moments: Mapping[str, str]
    """The states by their names in torch, and which tensors of a shard they are."""
    entries: Sequence[Entry | float]
    """Where the numbers of a param group come from, in the order of `ops.HYPER`; a
    number is one itself."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Values that may not change, since there is no state for any other."""

    def refuse(self, key: str, value: Any) -> None:
        """Refuse a value that is not the fixed one.

        Raises:
            ValueError: always; says the value and the remedy.
        """
        raise ValueError(
            f"{key}={value} was set after construction, where it was"
            f" {self.fixed[key]}: the state has no place for it; build the optimizer"
            f" with {key}={value}. Nothing was updated"
        )


def adam(groups: Sequence[Group]) -> UpdateRule:
    """Return the rule of Adam and AdamW.

    Raises:
        ValueError: amsgrad is set in some groups and not in others.
    """
    moments = {"exp_avg": "first", "exp_avg_sq": "second"}
    amsgrad = _same("amsgrad", [bool(group["amsgrad"]) for group in groups])
    if amsgrad:
        moments["max_exp_avg_sq"] = "largest"
    entries = (
        Entry("lr"),
        Entry("betas", 0),
        Entry("betas", 1),
        Entry("eps"),
        Entry("weight_decay"),
        Entry(MAXIMIZE),
        Entry("decoupled_weight_decay"),
        0.0,
    )
    return UpdateRule("adam", moments, entries, fixed={"amsgrad": amsgrad})


def lion(groups: Sequence[Group]) -> UpdateRule:
    """Return the rule of Lion."""
    entries = (
        Entry("lr"),
        Entry("betas", 0),
        Entry("betas", 1),
        0.0,
        Entry("weight_decay"),
        Entry(MAXIMIZE),
        1.0,
        0.0,
    )
    return UpdateRule("lion", {"exp_avg": "first"}, entries)


def sgd(groups: Sequence[Group]) -> UpdateRule:
    """Return the rule of SGD; without momentum in any group there is no state."""
    entries = (
        Entry("lr"),
        Entry("momentum"),
        Entry("dampening"),
        0.0,
        Entry("weight_decay"),
        Entry(MAXIMIZE),
        0.0,
        Entry("nesterov"),
    )
    if any(is_nonzero(group["momentum"]) for group in groups):
        return UpdateRule("sgd", {"momentum_buffer": "first"}, entries)
    return UpdateRule("sgd", {}, entries, fixed={"momentum": 0.0})


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
