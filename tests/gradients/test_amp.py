"""Loss scaling: an overflow on one rank skips all ranks, whatever the stage; unscaled
gradients, whatever the order; torch's own scaler works or is refused."""

from __future__ import annotations

import functools
import math
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import STAGES, Run, apart, differing, rank, sharded, state_of, whole, world
from registry import cases_of
from short_runs import loss_of_share, short
from torch import Tensor, nn
from training import everything

import zerokern
from zerokern import GradScaler, Precision

case = cases_of("gradients")

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
    optimizer = sharded(model, stage, lr=1e-2)
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of_share(model, step)
        if step in overflow and rank() == world() - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        for call in order.split():
            if call == "unscale":
                scaler.unscale_(optimizer)
            elif call == "clip":
                optimizer.clip_grad_norm_(0.5)
            else:
                scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    calls = len(optimizer.comm_log())
    return {
        "state": everything(model, optimizer),
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
        loss = models.loss_of(model, *models.batch(step))
        scaler.scale(loss).backward()
        if step in overflow:
            model.head.weight.grad.fill_(math.inf)  # type: ignore[union-attr]
        if clip or unscale:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {
        "params": dict(model.named_parameters()),
        "scales": scales,
        "skipped": int(getattr(optimizer, "skipped_steps", len(overflow))),
    }


FLOATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
OVERFLOWS = {"finite": (), "overflow": (1, 2)}
"""The steps in which gradients overflow."""
of_overflows = pytest.mark.parametrize(
    "overflow", OVERFLOWS.values(), ids=OVERFLOWS.keys()
)


@functools.cache
def scaled() -> ranks.Cases:
    """Return what each order does in each format, on two ranks."""
    cases = {
        (stage, order, dtype, overflow): functools.partial(
            scaled_run, stage, order, FLOATS[dtype], overflow=overflow
        )
        for stage in STAGES
        for order in ORDERS
        for dtype in FLOATS
        for overflow in OVERFLOWS.values()
    }
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("stage", STAGES)
@of_overflows
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_scaled_training_is_torchs(
    stage: int, overflow: tuple[int, ...], clip: bool
) -> None:
    """The same weights and the same scales, skipped steps included."""
    theirs = torch_run(overflow=overflow, clip=clip)
    order = "unscale clip step" if clip else "step"
    for result in scaled()[stage, order, "fp32", overflow]:
        assert result["scales"] == theirs["scales"]
        assert result["skipped"] == len(overflow)
        ours = {name: result["state"][name] for name in theirs["params"]}
        assert apart(ours, theirs["params"]) == {}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", FLOATS)
@of_overflows
def test_the_order_of_unscale_and_clip_does_not_matter(
    stage: int, dtype: str, overflow: tuple[int, ...]
) -> None:
    """And all ranks skip, with the bits they had."""
    plain = "step", "unscale step"
    clipped = "unscale clip step", "clip unscale step", "clip step"
    for orders in (plain, clipped):
        results = []
        for order in orders:
            results += scaled()[stage, order, dtype, overflow]
        first, *others = results
        for result in others:
            assert differing(result["state"], first["state"]) == []
            assert result["scales"] == first["scales"]
            assert result["skipped"] == len(overflow)
            # The small vector is exchanged once per step.
            assert result["calls"] == first["calls"]


@pytest.mark.parametrize("scale", [2.0**4, 2.0**16])
def test_a_power_of_two_changes_no_bit(scale: float) -> None:
    """The scale is divided out in fp32, exactly."""
    unscaled = scaled_run(1, "step", torch.float32, scale=1.0)
    result = scaled_run(1, "step", torch.float32, scale=scale)
    assert differing(result["state"], unscaled["state"]) == []


def scaled_by_hand() -> tuple[nn.Module, Any, GradScaler, float]:
    """Return a model whose gradients are ones, scaled; its optimizer, its scaler, and
    the norm of the ones."""
    model = models.toy()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    for param in model.parameters():
        param.grad = torch.full_like(param, 2.0**10)
    norm = math.sqrt(sum(p.numel() for p in model.parameters()))
    return model, zerokern.AdamW(model.parameters()), scaler, norm


def test_without_a_scaler_the_scale_is_one() -> None:
    """A scaler that is gone leaves nothing behind."""
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
        loss = models.loss_of(model, *models.batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    params = dict(model.named_parameters())
    assert apart(params, torch_run()["params"]) == {}


# ------------------------------------------------------------------- torch's own scaler


@pytest.mark.parametrize("unscale", [False, True])
@of_overflows
def test_torchs_scaler_works_in_a_world_of_one(
    unscale: bool, overflow: tuple[int, ...]
) -> None:
    ours = torch_run(zerokern.AdamW, overflow=overflow, unscale=unscale)
    theirs = torch_run(overflow=overflow)
    assert ours["scales"] == theirs["scales"]
    assert ours["skipped"] == len(overflow)
    assert apart(ours["params"], theirs["params"]) == {}


Try = tuple[str, list[str]]
"""What is said, and what has changed."""


@case
def stepped_by_torchs_scaler(stage: int) -> Try:
    run = short(stage, world())
    before = whole(run.model, run.optimizer)
    scaler = torch.amp.GradScaler("cpu")
    run.backward(0, lambda r: scaler.scale(run.loss(0, r)))
    message = ""
    try:
        scaler.step(run.optimizer)
    except RuntimeError as error:
        message = str(error)
    return message, differing(whole(run.model, run.optimizer), before)


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_scaler_is_refused_where_it_cannot_see(stage: int) -> None:
    for message, changed in case.done(2)["stepped_by_torchs_scaler", stage]:
        assert "zerokern.GradScaler" in message
        assert changed == []


def _unscaled(run: Run, step: int) -> Try:
    """Form gradients, unscale them and step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = everything(run.model, run.optimizer)
    run.optimizer.zero_grad()
    run.backward(step, lambda r: scaler.scale(run.loss(step, r)))
    message = ""
    try:
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
    except RuntimeError as error:
        message = str(error)
    after = everything(run.model, run.optimizer)
    return message, differing(after, before)


@case
def unscaled_by_torchs_scaler(stage: int) -> tuple[list[Try], list[str]]:
    """Return each try; and what is different later where nothing was tried."""
    run = short(stage, world())
    twin = short(stage, world())
    tries = []
    for step in range(2):  # later steps find gradients reduced already
        tries.append(_unscaled(run, step))
        for script in (run, twin):
            script.optimizer.zero_grad()
            script.backward(10 + step)
            script.step()
    ours = everything(run.model, run.optimizer)
    theirs = everything(twin.model, twin.optimizer)
    return tries, differing(ours, theirs)


@pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))
@in_stages
def test_torchs_scaler_that_unscales_is_refused_by_name(stage: int, at: int) -> None:
    """It would look for infinities in one rank's part; training goes on as if it had
    not been tried."""
    for tries, apart_later in case.done(at)["unscaled_by_torchs_scaler", stage]:
        assert len(tries) == 2
        for message, changed in tries:
            assert "zerokern.GradScaler" in message or "full_grad" in message
            assert changed == []
        assert apart_later == []


# --------------------------------------------------------------------------------- fp16


@case(stages=(2,))
def tiny_gradients_in_fp16(stage: int) -> dict[str, Tensor]:
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
    """No step is lost on the way, because nothing is stored unscaled in 16
    bits."""
    for result in case.done(2)["tiny_gradients_in_fp16", 2]:
        for name, value in result.items():
            if name.endswith("exp_avg"):
                expected = torch.full_like(value, 0.19 * 2.0**-22)
                torch.testing.assert_close(value, expected, rtol=1e-2, atol=0.0)
