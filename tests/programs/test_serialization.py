"""A state is tensors and plain values, so that it can be stored without pickle."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import models
import pytest
import torch
from marks import in_stages
from oracle import differing, quiet_state_dict, set_integer_gradients, sharded
from registry import cases_of
from torch import Tensor
from torch.optim import lr_scheduler

import zerokern
from zerokern import GradScaler, Precision

case = cases_of("programs")

RECIPES: dict[str, tuple[Any, torch.dtype, Precision]] = {
    "fp32": (zerokern.AdamW, torch.float32, Precision()),
    "bf16 with masters": (zerokern.AdamW, torch.bfloat16, Precision()),
    "8 bits": (
        zerokern.AdamW,
        torch.bfloat16,
        Precision(master="split24", moments="8bit"),
    ),
    "momentum": (
        functools.partial(zerokern.SGD, momentum=0.9),
        torch.float32,
        Precision(),
    ),
}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a nest of dicts and lists by path."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {path: value}

    found: dict[str, Any] = {}
    for key, item in items:
        found |= flat(item, f"{path}/{key}")
    return found


def trained_state(recipe: str, stage: int) -> dict[str, Any]:
    """Return the state dicts of an optimizer and a scaler after a step."""
    make, dtype, precision = RECIPES[recipe]
    model = models.toy(blocks=1).to(dtype)
    optimizer = sharded(model, stage, adam=make, lr=1e-2, precision=precision)
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    optimizer.zero_grad()
    set_integer_gradients(model, 0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return {
        "full": optimizer.full_state_dict(),
        "sharded": quiet_state_dict(optimizer),
        "scaler": scaler.state_dict(),
    }


def lost(state: Any) -> list[str]:
    """Write a state as safetensors and JSON, and with torch; return what does not come
    back."""
    import safetensors.torch

    leaves = flat(state)
    tensors = {k: v for k, v in leaves.items() if isinstance(v, Tensor)}
    others = {k: v for k, v in leaves.items() if not isinstance(v, Tensor)}
    wrong = [k for k, v in tensors.items() if type(v) is not Tensor]
    wrong += [
        k
        for k, v in others.items()
        if not isinstance(v, int | float | str | bool | None)
    ]
    if json.loads(json.dumps(others)) != others:
        wrong.append("JSON")

    loaded = safetensors.torch.load(safetensors.torch.save(tensors))
    wrong += differing(loaded, tensors)

    file = io.BytesIO()
    torch.save(state, file)
    again = flat(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return wrong + [k for k in leaves if type(again[k]) is not type(leaves[k])]


@case
def lost_of_states(stage: int) -> dict[str, dict[str, list[str]]]:
    """Return what is lost, by recipe and state."""
    return {
        recipe: {
            name: lost(state) for name, state in trained_state(recipe, stage).items()
        }
        for recipe in RECIPES
    }


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_is_tensors_and_plain_values(recipe: str, stage: int, at: int) -> None:
    """In every recipe, whole or sharded; the scaler's too."""
    pytest.importorskip("safetensors")
    for result in case.done(at)["lost_of_states", stage]:
        assert result[recipe] == {"full": [], "sharded": [], "scaler": []}
