"""Loss scaling: an overflow on one rank skips all ranks, whatever the stage; unscaled
gradients, whatever the order."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import STAGES, apart, differing, rank, sharded, state_of, whole, world
from torch import Tensor, nn

import zerokern
from zerokern import GradScaler, Precision

ORDERS = ("step", "unscale step", "unscale clip step", "clip unscale step", "clip step")


def scaled_run(
    stage: int,
    order: str,
    dtype: torch.dtype,
    *,
    scale: float = 2.0**10,
    overflow: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Train with a loss scale; in some steps the gradients of one rank overflow."""
    model = models.toy().to(dtype)
    clip = 0.5 if "clip" in order else None
    optimizer = sharded(model, stage, lr=1e-2)
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        tokens, targets = (models.share(t, rank(), world()) for t in models.batch(step))
        infinite = step in overflow and rank() == world() - 1  # on one rank only
        scaler.scale(
            models.loss_of(model, tokens, targets) * (math.inf if infinite else 1.0)
        ).backward()
        for call in order.split():
            if call == "unscale":
                scaler.unscale_(optimizer)
            elif call == "clip":
                optimizer.clip_grad_norm_(clip)
            else:
                scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    calls = len(optimizer.comm_log())
    result = whole(model, optimizer) | state_of(model, optimizer)
    return {
        "state": result,
        "scales": scales,
        "skipped": int(optimizer.skipped_steps),
        "calls": calls,
    }


def torch_run(
    make: Any = torch.optim.AdamW,
    *,
    overflow: tuple[int, ...] = (),
    clip: bool = False,
    unscale: bool = False,
) -> dict[str, Any]:
    """Train the same in one process with torch's scaler, by default on torch's
    optimizer."""
    model = models.toy()
    optimizer = make(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(models.loss_of(model, *models.batch(step))).backward()
        if step in overflow:
            model.head.weight.grad.fill_(math.inf)  # type: ignore[union-attr]
        if clip or unscale:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    skipped = int(getattr(optimizer, "skipped_steps", len(overflow)))
    return {
        "params": {n: p.detach() for n, p in model.named_parameters()},
        "scales": scales,
        "skipped": skipped,
    }


FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {
    (stage, order, dtype, overflow): functools.partial(
        scaled_run, stage, order, FLOATS[dtype], overflow=overflow
    )
    for stage, order, dtype, overflow in itertools.product(
        STAGES, ORDERS, FLOATS, ((), (1, 2))
    )
}


@functools.cache
def done() -> ranks.Cases:
    """Return every case on two ranks."""
    return ranks.run_cases(2, CASES)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("overflow", [(), (1, 2)], ids=["finite", "overflow"])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_scaled_training_is_torchs(
    stage: int, overflow: tuple[int, ...], clip: bool
) -> None:
    """Rows 50, 53, 55 and 60: the same weights and the same scales, skipped steps
    included."""
    theirs = torch_run(overflow=overflow, clip=clip)
    for result in done()[
        stage, "unscale clip step" if clip else "step", "fp32", overflow
    ]:
        assert result["scales"] == theirs["scales"]
        assert result["skipped"] == len(overflow)
        ours = {
            name: value
            for name, value in result["state"].items()
            if name in theirs["params"]
        }
        assert apart(ours, theirs["params"]) == {}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("overflow", [(), (1, 2)], ids=["finite", "overflow"])
def test_the_order_of_unscale_and_clip_does_not_matter(
    stage: int, dtype: str, overflow: tuple[int, ...]
) -> None:
    """Rows 51 and 54; all ranks skip, with the bits they had (row 50)."""
    plain, clipped = (
        ("step", "unscale step"),
        ("unscale clip step", "clip unscale step", "clip step"),
    )
    for orders in (plain, clipped):
        results = [
            result
            for order in orders
            for result in done()[stage, order, dtype, overflow]
        ]
        for result in results[1:]:
            assert differing(result["state"], results[0]["state"]) == []
            assert result["scales"] == results[0]["scales"]
            assert result["skipped"] == len(overflow)
            assert result["calls"] == results[0]["calls"], (
                "the small vector is exchanged once per step"
            )


@pytest.mark.parametrize("scale", [2.0**4, 2.0**16])
def test_a_power_of_two_changes_no_bit(scale: float) -> None:
    """Row 52: the scale is divided out in fp32, exactly."""
    base = scaled_run(1, "step", torch.float32, scale=1.0)["state"]
    assert (
        differing(scaled_run(1, "step", torch.float32, scale=scale)["state"], base)
        == []
    )


def scaled_by_hand() -> tuple[nn.Module, Any, GradScaler, float]:
    """Return a model whose gradients are ones, scaled; its optimizer, its scaler, and
    the norm of the ones."""
    model = models.toy()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0**10)
    return (
        model,
        zerokern.AdamW(model.parameters()),
        scaler,
        math.sqrt(sum(p.numel() for p in model.parameters())),
    )


def test_without_a_scaler_the_scale_is_one() -> None:
    """Row 61: a scaler that is gone leaves nothing behind."""
    model, optimizer, scaler, norm = scaled_by_hand()
    scaler.step(optimizer)
    assert float(optimizer.grad_norm) == pytest.approx(norm)
    optimizer.zero_grad()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(norm)


def test_clipping_returns_the_unscaled_norm_after_unscale() -> None:
    _, optimizer, scaler, norm = scaled_by_hand()
    scaler.unscale_(optimizer)
    assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(norm)


def test_a_disabled_scaler_does_nothing() -> None:
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    scaler = GradScaler("cpu", enabled=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert next(iter(optimizer.state.values()))["step"] == 1


def test_misuse_is_named() -> None:
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    scaler = GradScaler("cpu")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="another unscale_"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="closures"):
        scaler.step(optimizer, lambda: 0.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)


def test_other_optimizers_are_left_to_torch() -> None:
    model = models.toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(models.loss_of(model, *models.batch(step))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (
        apart(
            {n: p.detach() for n, p in model.named_parameters()}, torch_run()["params"]
        )
        == {}
    )


# ------------------------------------------------------------------- torch's own scaler


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("overflow", [(), (1, 2)], ids=["finite", "overflow"])
def test_torchs_scaler_works_in_a_world_of_one(
    unscale: bool, overflow: tuple[int, ...]
) -> None:
    ours = torch_run(zerokern.AdamW, overflow=overflow, unscale=unscale)
    theirs = torch_run(overflow=overflow)
    assert (ours["scales"], ours["skipped"]) == (theirs["scales"], len(overflow))
    assert apart(ours["params"], theirs["params"]) == {}


def refused_by_name(stage: int) -> tuple[str, list[str]]:
    """Use torch's scaler where gradients are sharded."""
    model = models.toy()
    optimizer = sharded(model, stage, lr=1e-2)
    before = whole(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    tokens, targets = (models.share(t, rank(), world()) for t in models.batch(0))
    scaler.scale(models.loss_of(model, tokens, targets)).backward()
    with pytest.raises(RuntimeError) as error:
        scaler.step(optimizer)
    return str(error.value), differing(whole(model, optimizer), before)


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_scaler_is_refused_where_it_cannot_see(stage: int) -> None:
    for message, changed in ranks.run(2, refused_by_name, stage):
        assert "zerokern.GradScaler" in message
        assert changed == []


# ---------------------------------------------------------------------- fp16


def half_precision(stage: int) -> dict[str, Tensor]:
    """Gradients near fp16's least numbers, scaled up."""
    model = models.toy().half()
    optimizer = sharded(model, stage, lr=1e-3, precision=Precision(moments="bf16"))
    scaler = GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(torch.ones(()))
    for _ in range(2):
        for param in model.parameters():
            # 2^-22 unscaled: below fp16's subnormals' precision.
            param.grad = torch.full_like(param, 2.0**-10)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return state_of(model, optimizer)


def test_moments_are_of_the_unscaled_gradient() -> None:
    """Row 62: no step is lost on the way, because nothing is stored unscaled in 16
    bits."""
    for result in ranks.run(2, half_precision, 2):
        for name, value in result.items():
            if name.endswith("exp_avg"):
                torch.testing.assert_close(
                    value, torch.full_like(value, 0.19 * 2.0**-22), rtol=1e-2, atol=0.0
                )
