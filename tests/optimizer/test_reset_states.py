"""`optimizer.state` that users empty or replace: formats other than fp32, what is
refused, and what is shown and saved afterwards. The loops are in
`support/scripts/resetting.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import differing, sharded, state_of, whole
from registry import cases_of
from short_runs import loss_of_share
from torch import nn
from training import everything

from zerokern import Precision

case = cases_of("optimizer")

FORMATS: dict[str, tuple[torch.dtype, Precision]] = {
    "fp32": (torch.float32, Precision()),
    "8-bit moments": (torch.float32, Precision(moments="8bit")),
    "bf16": (torch.bfloat16, Precision()),
    "bf16, split24, 8-bit moments": (
        torch.bfloat16,
        Precision(master="split24", moments="8bit"),
    ),
}


def _built(stage: int, name: str = "fp32") -> tuple[nn.Module, Any]:
    dtype, precision = FORMATS[name]
    model = models.toy(blocks=1).to(dtype)
    return model, sharded(model, stage, lr=1e-2, precision=precision)


def _step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of_share(model, step).backward()
    optimizer.step()


# --------------------------------------------------------------------------- emptied


@case
def emptied(stage: int) -> dict[str, Any]:
    """Return, by format, what of the state is left right after it was emptied, whether
    weights have changed, and which states there are after a step."""
    found = {}
    for name in FORMATS:
        model, optimizer = _built(stage, name)
        for step in range(2):
            _step(model, optimizer, step)
        before = whole(model, optimizer)
        optimizer.state.clear()
        left = {
            key
            for key, value in state_of(model, optimizer).items()
            if value.any() and not key.endswith("/master")
        }
        changed = differing(whole(model, optimizer), before)
        _step(model, optimizer, 2)
        steps = {
            float(value)
            for key, value in state_of(model, optimizer).items()
            if key.endswith("/step")
        }
        found[name] = sorted(left), changed, steps
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", FORMATS)
def test_an_emptied_state_is_zero_and_weights_and_masters_stay(
    name: str, stage: int, at: int
) -> None:
    """In every format; the next step is the first one."""
    for results in case.done(at)["emptied", stage]:
        left, changed, steps = results[name]
        assert left == []
        assert changed == []
        assert steps == {1.0}


@case
def emptied_masters(stage: int) -> list[str]:
    """Return what differs if a state of bf16 parameters is emptied twice, once before a
    step without gradients: only moments and steps are gone, not the masters."""
    results = []
    for extra in (False, True):
        model, optimizer = _built(stage, "bf16")
        for step in range(2):
            _step(model, optimizer, step)
        optimizer.state.clear()
        if extra:
            optimizer.zero_grad()
            optimizer.step()
        results.append(everything(model, optimizer))
    return differing(*results)


@at_worlds
@in_stages
def test_masters_are_no_state_to_empty(stage: int, at: int) -> None:
    for differs in case.done(at)["emptied_masters", stage]:
        assert differs == []


# ------------------------------------------------------------------------- shown again


@case
def shown_again(stage: int) -> tuple[bool, bool, float]:
    """Return whether every parameter shows its state after it was emptied, whether what
    is written to what is shown is used, and what was saved of it."""
    model, optimizer = _built(stage)
    _step(model, optimizer, 0)
    optimizer.state.clear()
    _step(model, optimizer, 1)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    shows = all("exp_avg" in optimizer.state[p] for p in params)
    for param in params:
        optimizer.state[param]["exp_avg"].fill_(0.25)
    found = {k: v for k, v in state_of(model, optimizer).items() if "exp_avg" in k}
    quarters = [v for k, v in found.items() if k.endswith("/exp_avg")]
    before = whole(model, optimizer)
    _step(model, optimizer, 2)
    moved = before["head.weight"] - whole(model, optimizer)["head.weight"]
    written = all(bool((v == 0.25).all()) for v in quarters)
    return shows, written, float(moved.mean())


@at_worlds
@in_stages
def test_what_is_shown_after_a_reset_is_the_state_itself(stage: int, at: int) -> None:
    for shows, written, moved in case.done(at)["shown_again", stage]:
        assert shows
        assert written
        assert moved > 0


# ---------------------------------------------------------------------------- refused

Spoil = Callable[[dict[str, Any]], Any]


def _too_long(entry: dict[str, Any]) -> None:
    numel = entry["exp_avg"].numel()
    entry["exp_avg"] = torch.zeros(numel + 1)


def _no_tensor(entry: dict[str, Any]) -> None:
    entry["exp_avg_sq"] = "nothing"


def _steps_of_every_element(entry: dict[str, Any]) -> None:
    entry["step"] = torch.zeros(3)


SPOILS: dict[str, tuple[Spoil, str]] = {
    "too long": (_too_long, "exp_avg"),
    "no tensor": (_no_tensor, "exp_avg_sq"),
    "steps of every element": (_steps_of_every_element, "step"),
}


@case
def spoiled(stage: int) -> dict[str, Any]:
    """Return what is said of values that do not fit, and what differs, once they are
    taken back, from a run without them."""
    found = {}
    for name, (spoil, _) in SPOILS.items():
        (model, optimizer), (twin, plain) = _built(stage), _built(stage)
        for m, o in ((model, optimizer), (twin, plain)):
            _step(m, o, 0)
        entry = optimizer.state[optimizer.param_groups[0]["params"][-1]]
        kept = dict(entry)
        spoil(entry)
        # Another one, which would fit, is not taken over either.
        first = optimizer.state[optimizer.param_groups[0]["params"][0]]
        kept_first = dict(first)
        first["exp_avg"] = torch.ones_like(first["exp_avg"])
        with pytest.raises(ValueError) as error:
            _step(model, optimizer, 1)
        entry.update(kept)
        first.update(kept_first)
        for m, o in ((model, optimizer), (twin, plain)):
            _step(m, o, 2)
        after = everything(model, optimizer), everything(twin, plain)
        found[name] = str(error.value), differing(*after)
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", SPOILS)
def test_a_value_that_does_not_fit_is_refused_and_changes_nothing(
    name: str, stage: int, at: int
) -> None:
    """It names the value; once it is taken back, training goes on as if nothing had
    been."""
    for results in case.done(at)["spoiled", stage]:
        message, differs = results[name]
        assert repr(SPOILS[name][1]) in message
        assert "Nothing was updated" in message
        assert differs == []
