"""Hyper-parameters, the rules that they make, and the tables of scalars that an update
reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from backends import run_both
from torch import Tensor

from zerokern import ops
from zerokern.kernels import codecs
from zerokern.ops import Rule

HYPER = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "sign": 1.0,
    "decoupled": 1.0,
    "nesterov": 0.0,
}


class Variant(NamedTuple):
    """A rule and the hyper-parameters that make it take another path."""

    rule: Rule
    hyper: Mapping[str, float] = {}
    momentum: bool = True
    amsgrad: bool = False

    @property
    def l2(self) -> bool:
        return self.hyper.get("decoupled") == 0.0


VARIANTS = {
    "adamw": Variant("adam"),
    "adam": Variant("adam", {"decoupled": 0.0, "sign": -1.0}),
    "amsgrad": Variant("adam", amsgrad=True),
    "lion": Variant("lion", {"beta2": 0.99}),
    "momentum": Variant("sgd", {"beta2": 0.1, "decoupled": 0.0}),
    "nesterov": Variant("sgd", {"beta2": 0.0, "nesterov": 1.0}),
    "momentum of 0": Variant("sgd", {"beta1": 0.0, "beta2": 0.1}),
    "sgd": Variant("sgd", {"decoupled": 0.0}, momentum=False),
}
ADAMW = VARIANTS["adamw"]
OUTPUTS = ("table", "keys", "steps", "report")


def words(
    norms: Sequence[float],
    used: Sequence[int],
    num_columns: int,
) -> Tensor:
    """Return `gathered` of ranks with these shard norms, each of which used these
    columns."""
    bits = torch.zeros(len(norms), 1 + -(-num_columns // 32), dtype=torch.int64)
    bits[:, 0] = (torch.tensor(norms, dtype=torch.float64) ** 2).view(torch.int64)
    for column in used:
        bits[:, 1 + column // 32] |= 1 << (column % 32)
    return bits


def scalar_inputs(
    num_columns: int,
    step: int = 0,
    rule: Rule = "adam",
    **hyper: float,
) -> dict[str, Any]:
    """Return what `scalars_` takes: all columns in one group, used, and not clipped."""
    return {
        "table": torch.zeros(len(ops.TABLE), num_columns),
        "keys": torch.zeros(num_columns, dtype=torch.int64),
        "steps": torch.full((num_columns,), step),
        "report": torch.zeros(3, dtype=torch.float64),
        "rule": rule,
        "hyper": torch.tensor([list({**HYPER, **hyper}.values())], dtype=torch.float64),
        "group_of_column": torch.zeros(num_columns, dtype=torch.int64),
        "seeds": codecs.mix64(torch.arange(num_columns) + 1),
        "gathered": words([1.0], range(num_columns), num_columns),
        "limits": torch.tensor([math.inf, 1.0], dtype=torch.float64),
    }


def run_scalars(
    inputs: dict[str, Any],
    backend: str = "triton",
) -> tuple[list[Any], list[Any]]:
    """Run on a back end and on plain torch; return the outputs of each."""
    options = {name: value for name, value in inputs.items() if name not in OUTPUTS}
    outputs = [inputs[name] for name in OUTPUTS]
    return run_both(ops.scalars_, *outputs, backend=backend, **options)


def scalars_of(
    variant: Variant,
    num_columns: int = 1,
    step: int = 0,
    inactive: Sequence[int] = (),
    **hyper: float,
) -> dict[str, Any]:
    """Return what `update_` takes beside shard, gradient and columns, after `step`
    steps, without clipping."""
    chosen = {**variant.hyper, **hyper}
    inputs = scalar_inputs(num_columns, step, variant.rule, **chosen)
    used = [column for column in range(num_columns) if column not in inactive]
    inputs["gathered"] = words([1.0], used, num_columns)
    ops.scalars_(**inputs, backend="torch")
    return {
        "rule": variant.rule,
        "table": inputs["table"],
        "keys": inputs["keys"],
        "l2": variant.l2,
    }


def schedule(
    variant: Variant,
    steps: int,
    **hyper: float,
) -> Iterator[dict[str, Any]]:
    """Yield `scalars_of` one parameter for each of the first steps.

    Formed in one call, in which the steps are columns: a thousand calls would take
    longer than the updates.
    """
    inputs = _all_steps(variant.rule, steps, tuple({**variant.hyper, **hyper}.items()))
    for step in range(steps):
        yield {
            "rule": variant.rule,
            "table": inputs["table"][:, step : step + 1].contiguous(),
            "keys": inputs["keys"][step : step + 1],
            "l2": variant.l2,
        }


@functools.lru_cache(maxsize=16)
def _all_steps(
    rule: Rule,
    steps: int,
    hyper: tuple[tuple[str, float], ...],
) -> dict[str, Any]:
    inputs = scalar_inputs(steps, 0, rule, **dict(hyper))
    inputs["steps"] = torch.arange(steps)
    inputs["seeds"] = inputs["seeds"][:1].repeat(steps)
    ops.scalars_(**inputs, backend="torch")
    return inputs
