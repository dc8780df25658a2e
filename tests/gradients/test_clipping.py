"""Clipping: the norm that it returns, what it does to the update, and torch's own
functions that change gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from marks import at_odd_worlds, in_stages
from oracle import apart, sharded, whole, world
from registry import cases_of
from short_runs import distance_moved, short
from torch import Tensor, nn

import zerokern

case = cases_of("gradients at odd worlds")

# --------------------------------------------------- what is returned, and what is done


@case
def norms_returned(stage: int) -> list[dict[str, Any]]:
    run = short(stage, world())
    found = []
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync() if step == 1 else nullcontext():
            run.backward(step)
        norm = run.optimizer.clip_grad_norm_(0.01)
        run.step()
        reported = run.optimizer.grad_norm.clone()
        found.append({"norm": norm.clone(), "reported": reported})
    return found


@at_odd_worlds
@in_stages
def test_the_norm_is_one_global_number_on_every_rank(stage: int, at: int) -> None:
    """To the bit, before clipping; that it is torch's, the scripts tell."""
    first, *others = case.done(at)["norms_returned", stage]
    for step, expected in enumerate(first):
        norm, reported = expected["norm"], expected["reported"]
        assert norm.shape == ()
        assert norm.dtype == torch.float32
        assert norm > 0.01
        assert torch.equal(reported.float(), norm)
        for other in others:
            assert torch.equal(other[step]["norm"], norm)
            assert torch.equal(other[step]["reported"], reported)


BOUNDS: dict[str, float | Tensor] = {
    "above": 100.0,
    "below": 0.05,
    "tensor": torch.tensor(0.05),
    "zero": 0.0,
}


@case
def clipped_updates(stage: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, bound in BOUNDS.items():
        model = models.toy(blocks=1)
        optimizer = sharded(model, stage, adam=zerokern.SGD, lr=1.0)
        before = whole(model, optimizer)
        models.loss_of(model, *models.batch(0)).backward()
        norm = float(optimizer.clip_grad_norm_(bound))
        optimizer.step()
        after = whole(model, optimizer)

        metrics = optimizer.metrics()
        assert metrics["grad_norm"] == pytest.approx(norm)
        found[name] = {
            "norm": norm,
            "moved": distance_moved(before, after),
            "coefficient": metrics["clip_coefficient"],
        }
    return found


@at_odd_worlds
@in_stages
@pytest.mark.parametrize("name", BOUNDS)
def test_the_norm_before_clipping_is_returned_and_the_one_after_is_applied(
    name: str, stage: int, at: int
) -> None:
    """The update of SGD at rate 1 is the clipped gradient; the coefficient can be
    read."""
    bound = float(BOUNDS[name])
    for results in case.done(at)["clipped_updates", stage]:
        result = results[name]
        assert result["norm"] > 0.1
        clipped = min(result["norm"], bound)
        assert result["moved"] == pytest.approx(clipped, rel=1e-4, abs=1e-7)
        assert result["moved"] <= bound * (1 + 1e-5)
        coefficient = min(1.0, bound / (result["norm"] + 1e-6))
        assert result["coefficient"] == pytest.approx(coefficient, rel=1e-5)


# --------------------------------------------------- torch's own functions on gradients


def _clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def _clip_norm_one_by_one(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=False)


def _clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-2)


def _scale_by_own_norm(model: nn.Module) -> None:
    norms = [p.grad.norm() for p in model.parameters()]  # type: ignore[union-attr]
    total = torch.stack(norms).norm()
    for param in model.parameters():
        param.grad.mul_(0.3 / total)  # type: ignore[union-attr]


TORCHS = {
    f.__name__.strip("_"): f
    for f in (_clip_norm, _clip_norm_one_by_one, _clip_value, _scale_by_own_norm)
}
BACKWARDS = (1, 2, 1)
"""Backward passes of each step: stage 1 expects as many as in the step before, and is
wrong twice."""
ATTEMPTS = [
    ("clip_norm", 0),
    ("clip_norm", 1),
    ("clip_norm", 2),
    ("clip_norm_one_by_one", 2),
    ("clip_value", 1),
    ("scale_by_own_norm", 0),
]
"""Who clips, in which step."""


def _with_torchs(
    stage: int | None, of: int, name: str | None, at_step: int
) -> dict[str, Any]:
    """Call one of these in one step; the update is what the gradients are."""
    as_gradients = {"weight_decay": 0.0, "betas": (0.0, 0.0), "eps": 1.0}
    run = short(stage, of, lr=1.0, **as_gradients)
    message = ""
    for step, micros in enumerate(BACKWARDS):
        run.optimizer.zero_grad()
        for micro in range(micros):
            run.backward(10 * step + micro)
        if step == at_step and name is not None:
            try:
                TORCHS[name](run.model)
            except RuntimeError as error:
                message = str(error)
        run.step()
    return {"params": whole(run.model, run.optimizer), "message": message}


@case
def torchs_functions(stage: int) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (name, at_step): _with_torchs(stage, world(), name, at_step)
        for name, at_step in ATTEMPTS
    }


@at_odd_worlds
@in_stages
@pytest.mark.parametrize(("name", "at_step"), ATTEMPTS)
def test_torchs_clipping_is_right_or_refused_by_name(
    name: str, at_step: int, stage: int, at: int
) -> None:
    """In the first step as in later ones; what is refused has changed nothing."""
    for results in case.done(at)["torchs_functions", stage]:
        result = results[name, at_step]
        message = result["message"]
        if message:
            assert "clip_grad_norm_" in message
            assert "full_grad" in message
        expected = _with_torchs(None, at, None if message else name, at_step)
        assert apart(result["params"], expected["params"]) == {}
