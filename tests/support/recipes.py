"""Recipes: update rules and storage formats through the whole optimizer."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import models
import torch
from oracle import sharded
from torch import nn

import zerokern
from zerokern import Buckets, Precision


class Recipe(NamedTuple):
    """Formats, by name."""

    dtype: str
    """Of parameters."""
    master: str
    moments: str


RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (zerokern.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (zerokern.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (
        zerokern.SGD,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "lion": (zerokern.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}
MASTERS, MOMENTS = ("fp32", "split32", "split24", "none"), ("fp32", "bf16", "8bit")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# A master means nothing to fp32 parameters.
RECIPES = [
    *(Recipe("fp32", "fp32", moments) for moments in MOMENTS),
    *(Recipe("bf16", *formats) for formats in itertools.product(MASTERS, MOMENTS)),
]


def built(
    rule: str, recipe: Recipe, stage: int, size: int = 4000, seed: int = 5
) -> tuple[nn.Module, Any]:
    """Return a model in the recipe's dtype, and its optimizer."""
    model = models.toy().to(DTYPES[recipe.dtype])
    optimizer, options = RULES[rule]
    precision = Precision(master=recipe.master, moments=recipe.moments, seed=seed)
    return model, sharded(
        model,
        stage,
        adam=optimizer,
        precision=precision,
        buckets=Buckets(bytes=size),
        **options,
    )
