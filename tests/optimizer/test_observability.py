"""What can be seen of a run: gradients, metrics, profiler ranges; and that the library
prints nothing."""

from __future__ import annotations

import functools
import math
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import STAGES, rank, sharded, world

import zerokern
from zerokern import Buckets, GradScaler

SCALE = 64.0


def metrics(stage: int, clip: float | None) -> list[dict[str, float]]:
    """Return the metrics of three steps; the gradients of the second are not finite on
    the last rank."""
    model = models.toy()
    optimizer = sharded(model, stage, max_grad_norm=clip, buckets=Buckets(bytes=6000))
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        optimizer.comm_log(clear=True)
        loss = models.loss_of(model, *models.batch(step))
        spoiled = step == 1 and rank() == world() - 1
        (loss * float("inf") if spoiled else loss).backward()
        optimizer.step()
        logged = sum(call.bytes for call in optimizer.comm_log())
        seen.append({**optimizer.metrics(), "logged": logged})
    return seen


def scaled(stage: int) -> dict[str, float]:
    """Return the metrics of a step under loss scaling."""
    model = models.toy()
    optimizer = sharded(model, stage)
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(models.loss_of(model, *models.batch(0))).backward()
    scaler.step(optimizer)
    scaler.update()
    return optimizer.metrics()


def ranges(stage: int, **buckets: Any) -> set[str]:
    """Return the names of our ranges in torch's profiler over a training step and the
    next forward."""
    model = models.toy()
    optimizer = sharded(model, stage, buckets=Buckets(bytes=6000, **buckets))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        models.loss_of(model, *models.batch(0)).backward()
        optimizer.step()
        models.loss_of(model, *models.batch(0))
    return {
        event.name for event in profile.events() if event.name.startswith("zerokern::")
    }


@functools.cache
def seen() -> ranks.Cases:
    cases: dict[Any, Any] = {}
    for stage in STAGES:
        cases |= {
            ("metrics", stage, clip): functools.partial(metrics, stage, clip)
            for clip in (None, 1e-3)
        }
        cases["scaled", stage] = functools.partial(scaled, stage)
        cases["ranges", stage] = functools.partial(ranges, stage)
    cases["ranges", "in backward"] = functools.partial(
        ranges, 2, update_in_backward=True
    )
    return ranks.run_cases(2, cases)


@in_stages
@pytest.mark.parametrize("clip", (None, 1e-3))
def test_metrics_of_each_step(stage: int, clip: float | None) -> None:
    """The norm before clipping and the coefficient, skipped steps, bytes;
    the same on all ranks."""
    ours, theirs = seen()["metrics", stage, clip]
    for mine, other in zip(ours, theirs, strict=True):
        same = {
            key: value
            for key, value in mine.items()
            if key not in ("wait_ms", "bytes_sent", "logged")
        }
        assert repr(same) == repr({key: other[key] for key in same})
        assert mine["bytes_sent"] == mine["logged"] > 0
        assert mine["wait_ms"] > 0
    first, second, third = ours
    assert [m["step"] for m in ours] == [1, 2, 3]
    assert [m["skipped_steps"] for m in ours] == [0, 1, 1]
    assert first["grad_norm"] > 1e-3 and not math.isfinite(second["grad_norm"])
    for m in (first, third):
        assert m["clip_coefficient"] == pytest.approx(
            1.0 if clip is None else clip / (m["grad_norm"] + 1e-6)
        )


@in_stages
def test_metrics_tell_the_loss_scale(stage: int) -> None:
    for result in seen()["scaled", stage]:
        assert result["loss_scale"] == SCALE


def test_metrics_of_a_world_of_one() -> None:
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    models.loss_of(model, *models.batch(0)).backward()
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    optimizer.step()
    found = optimizer.metrics()
    assert found.pop("grad_norm") == pytest.approx(float(norm), rel=1e-6)
    expected = {
        "step": 1,
        "clip_coefficient": 1.0,
        "skipped_steps": 0,
        "loss_scale": 1.0,
        "bytes_sent": 0,
    }
    assert found == expected | {"wait_ms": 0.0}


@in_stages
def test_profiler_ranges_name_phase_and_unit(stage: int) -> None:
    for names in seen()["ranges", stage]:
        unit = "blocks.0" if stage == 3 else "bucket"
        for phase in ("reduce", "update", "wait reduce_scatter", "wait all_gather"):
            assert any(
                name.startswith(f"zerokern::{phase}") and unit in name for name in names
            ), (phase, names)
        assert {"zerokern::scalars", "zerokern::synchronize gradients"} <= names
        assert ("zerokern::gather blocks.0" in names) == (stage == 3)


def test_profiler_ranges_of_updates_in_backward() -> None:
    for names in seen()["ranges", "in backward"]:
        assert any(name.startswith("zerokern::update bucket") for name in names)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """The library leaves output to its users, also where it refuses something."""
    seen.cache_clear()
    seen()
    out, err = capfd.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if "zerokern" in line] == []
