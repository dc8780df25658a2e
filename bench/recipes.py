"""The recipes that are measured: an update rule, storage formats, and the bytes that
these make inevitable."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zerokern import ops


class Unavailable(Exception):
    """A provider does not run here; the message names it and says why."""


class Recipe(NamedTuple):
    """An update rule and the storage formats it works on."""

    name: str
    rule: ops.Rule = "adam"
    param: torch.dtype = torch.bfloat16
    master: str | None = None
    moments: str | None = "fp32"
    """Of all moments; None for SGD without momentum."""
    grad: torch.dtype = torch.bfloat16
    amsgrad: bool = False
    nesterov: bool = False

    @property
    def num_moments(self) -> int:
        """How many moments an element has."""
        return (
            0
            if self.moments is None
            else (2 if self.rule == "adam" else 1) + self.amsgrad
        )

    @property
    def moment_bytes(self) -> float:
        """Bytes per element of one moment, its share of a block's scale included."""
        if self.moments is None:
            return 0.0
        return ops.MOMENTS[self.moments].bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of parameter and master, which an update reads and
        writes."""
        form = ops.MASTERS[self.master or "none"]
        return self.param.itemsize + (0 if form is None else form.dtype.itemsize)

    @property
    def update_bytes(self) -> float:
        """The floor of an update: gradient, weights and moments read once, weights and
        moments written once."""
        return (
            self.grad.itemsize
            + 2 * self.weight_bytes
            + 2 * self.num_moments * self.moment_bytes
        )

    @property
    def step_bytes(self) -> float:
        """The floor of an update with clipping: the norm reads the gradient once
        more."""
        return self.update_bytes + self.grad.itemsize

    @property
    def state_bytes(self) -> float:
        """Bytes per element that a shard and its gradient occupy."""
        return (
            self.grad.itemsize
            + self.weight_bytes
            + self.num_moments * self.moment_bytes
        )


FP32 = {"param": torch.float32, "grad": torch.float32}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", **FP32),  # type: ignore[arg-type]
        Recipe("master32", master="fp32"),
        Recipe("split32", master="split32"),
        Recipe("split32+bf16", master="split32", moments="bf16"),
        Recipe("split32+8bit", master="split32", moments="8bit"),
        Recipe("split24+8bit", master="split24", moments="8bit"),
        Recipe("bf16+8bit", moments="8bit"),
        Recipe("lion fp32", "lion", **FP32),  # type: ignore[arg-type]
        Recipe("sgd fp32", "sgd", **FP32),  # type: ignore[arg-type]
    )
}
"""Weights + moments. A plain name has fp32 moments; the rule is Adam where none is
named."""


def select(names: str | None) -> list[Recipe]:
    """Return the recipes of a comma-separated list; all of them for None.

    Raises:
        SystemExit: an unknown name.
    """
    chosen = (
        list(RECIPES) if names is None else [name.strip() for name in names.split(",")]
    )
    unknown = [name for name in chosen if name not in RECIPES]
    if unknown:
        raise SystemExit(
            f"recipes {unknown} are unknown; known are {', '.join(RECIPES)}"
        )
    return [RECIPES[name] for name in chosen]


def mebi(sizes: str) -> list[int]:
    """Return the elements of a comma-separated list of sizes in Mi, rounded to whole
    blocks."""
    return [
        max(int(float(size) * 2**20) // ops.BLOCK, 1) * ops.BLOCK
        for size in sizes.split(",")
    ]
