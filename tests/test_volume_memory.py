"""Bytes on the wire and bytes held: exactly what the formulas say, padding stated."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import STAGES, differing, sharded, state_of, whole, world
from torch import nn

import zerokern

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ACCUMULATED = 8
SMALL = zerokern.Buckets(bytes=40_000)


def train(
    stage: int,
    dtype: torch.dtype = torch.float32,
    *,
    micros: int = 1,
    no_sync: bool = False,
    poison: bool = False,
    build: Callable[[], nn.Module] = models.gpt,
    **options: Any,
) -> dict[str, Any]:
    """Train two steps and return logs and memory of the second, when everything is
    warm."""
    model = build().to(dtype)
    optimizer = sharded(model, stage, lr=1e-3, **{"buckets": SMALL, **options})
    zero = optimizer.coordinator
    scratch = zero.transport
    scratch.poison = poison
    built = optimizer.memory()
    for step in range(2):
        if step == 1:
            optimizer.comm_log(clear=True)
            scratch.peak_bytes = scratch.live_bytes
        optimizer.zero_grad()
        for micro in range(micros):
            if no_sync and micro < micros - 1:
                with optimizer.no_sync():
                    _backward(model, step * micros + micro)
            else:
                _backward(model, step * micros + micro)
        optimizer.step()
    log = optimizer.comm_log()
    return {
        "log": log,
        "payload": zero.layout.numel,
        "padded": zero.layout.padded_numel,
        "columns": zero.handles.num_columns,
        "built": built,
        "memory": optimizer.memory(),
        "peak": scratch.peak_bytes,
        "largest": max(b.numel * b.itemsize for b in zero.layout.buckets),
        "params": whole(model, optimizer) | state_of(model, optimizer),
    }


def _backward(model: nn.Module, step: int) -> None:
    tokens, targets = models.batch(step)
    models.loss_of(model, tokens, targets).backward()


CASES: dict[Any, Callable[[], Any]] = {
    **{
        ("plain", s, d): functools.partial(train, s, DTYPES[d])
        for s in STAGES
        for d in DTYPES
    },
    **{
        ("accumulated", s): functools.partial(
            train, s, micros=ACCUMULATED, build=models.toy
        )
        for s in STAGES
    },
    **{
        ("no_sync", s): functools.partial(
            train, s, micros=ACCUMULATED, no_sync=True, build=models.toy
        )
        for s in STAGES
    },
    **{("clipped", s): functools.partial(train, s, max_grad_norm=0.1) for s in STAGES},
    **{
        ("poison", s): functools.partial(
            train, s, micros=2, poison=True, build=models.toy
        )
        for s in STAGES
    },
    **{
        ("no poison", s): functools.partial(train, s, micros=2, build=models.toy)
        for s in STAGES
    },
    **{
        ("layers", n): functools.partial(
            train, 3, build=lambda n=n: models.gpt(width=24, layers=n)
        )
        for n in (5, 9)
    },
    **{
        ("overlap off", s): functools.partial(
            train, s, buckets=zerokern.Buckets(bytes=40_000, overlap=False)
        )
        for s in STAGES
    },
}


@functools.cache
def trained(at: int) -> ranks.Cases:
    """Run all cases on one group."""
    return ranks.run_cases(at, CASES)


at_worlds = pytest.mark.parametrize("at", ranks.worlds(2, 4, rarely=3))
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


def elements(result: dict[str, Any]) -> dict[str, int]:
    """Return the elements of whole buffers in one step, by operation."""
    total: Counter[str] = Counter()
    for call in result["log"]:
        total[call.op] += call.elements
    return dict(total)


def sent(result: dict[str, Any], op: str) -> int:
    """Return the bytes one rank sent in one step, by operation."""
    return sum(call.bytes for call in result["log"] if call.op == op)


# ---------------------------------------------------------------------- volume


@at_worlds
@in_stages
@pytest.mark.parametrize("dtype", DTYPES)
def test_volume_of_a_step(at: int, stage: int, dtype: str) -> None:
    """H10: 2P, 2P and 3P elements times (W - 1) / W, with the layout's padding, and one
    small vector."""
    itemsize = torch.empty((), dtype=DTYPES[dtype]).element_size()
    for result in trained(at)["plain", stage, dtype]:
        padded = result["padded"]
        gathers = 2 if stage == 3 else 1
        words = at * (1 + -(-result["columns"] // 32))
        assert elements(result) == {
            "reduce_scatter": padded,
            "all_gather": gathers * padded,
            "all_gather_words": words,
        }
        assert sent(result, "reduce_scatter") == padded * itemsize * (at - 1) // at
        assert (
            sent(result, "all_gather") == gathers * padded * itemsize * (at - 1) // at
        )


@at_worlds
@in_stages
def test_padding_on_the_wire_is_small(at: int, stage: int) -> None:
    result = trained(at)["plain", stage, "fp32"][0]
    # Buckets of 40 kB; 1 % of a real model's, see test_layout.
    assert result["padded"] < 1.02 * result["payload"]


@at_worlds
def test_stage1_reduces_once_however_many_backwards(at: int) -> None:
    """2P after 8 micro-batches without any context."""
    for result in trained(at)["accumulated", 1]:
        assert elements(result)["reduce_scatter"] == result["padded"]
        assert elements(result)["all_gather"] == result["padded"]


@at_worlds
def test_stage2_reduces_every_backward(at: int) -> None:
    """A x P + P: the price of keeping gradients sharded."""
    for result in trained(at)["accumulated", 2]:
        assert elements(result)["reduce_scatter"] == ACCUMULATED * result["padded"]
        assert elements(result)["all_gather"] == result["padded"]


@at_worlds
def test_stage3_gathers_and_reduces_every_backward(at: int) -> None:
    for result in trained(at)["accumulated", 3]:
        assert elements(result)["reduce_scatter"] == ACCUMULATED * result["padded"]
        assert elements(result)["all_gather"] == 2 * ACCUMULATED * result["padded"]


@at_worlds
@in_stages
def test_no_sync_reduces_once(at: int, stage: int) -> None:
    """F6: not a silent no-op."""
    for result in trained(at)["no_sync", stage]:
        assert elements(result)["reduce_scatter"] == result["padded"]
        assert (
            elements(result)["all_gather"]
            == (2 * ACCUMULATED if stage == 3 else 1) * result["padded"]
        )


@at_worlds
@in_stages
def test_clipping_and_overlap_change_no_volume(at: int, stage: int) -> None:
    """A6, H13: the norm rides on the one small vector; a collective per bucket and
    direction, no more."""
    plain = trained(at)["plain", stage, "fp32"][0]
    for other in ("clipped", "overlap off"):
        result = trained(at)[other, stage][0]
        assert elements(result) == elements(plain)
        assert Counter(call.op for call in result["log"]) == Counter(
            call.op for call in plain["log"]
        )


@at_worlds
@in_stages
def test_every_record_says_group_and_step(at: int, stage: int) -> None:
    for call in trained(at)["plain", stage, "fp32"][0]["log"]:
        assert (call.group, call.step) == (at, 1)
        assert call.phase in ("forward", "backward", "step")


@at_worlds
def test_stages_1_and_2_reduce_in_backward_and_gather_in_the_step(at: int) -> None:
    for stage in (1, 2):
        log = trained(at)["plain", stage, "fp32"][0]["log"]
        assert {call.phase for call in log if call.op == "reduce_scatter"} == {
            "backward"
        }
        assert {call.phase for call in log if call.op == "all_gather"} == {"step"}


@in_stages
def test_a_world_of_one_sends_nothing(stage: int) -> None:
    """J8, with and without a process group."""
    assert train(stage)["log"] == ()
    assert ranks.run(1, functools.partial(train, stage))[0]["log"] == ()


# ---------------------------------------------------------------------- memory


def theory(stage: int, dtype: str, w: int) -> dict[str, float]:
    """Return bytes per parameter by role; fp32 models have no master of their own."""
    if dtype == "fp32":
        gradients = {1: 4, 2: 4 / w, 3: 4 / w}[stage]
        return {
            "parameters": 4 / w if stage == 3 else 4,
            "gradients": gradients,
            "master": 0,
            "moments": 8 / w,
        }
    gradients = {1: 2 + 4 / w, 2: 4 / w, 3: 4 / w}[stage]
    return {
        "parameters": 2 / w if stage == 3 else 2,
        "gradients": gradients,
        "master": 4 / w,
        "moments": 8 / w,
    }


@at_worlds
@in_stages
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ["parameters", "gradients", "master", "moments"])
def test_bytes_of_each_role(at: int, stage: int, dtype: str, role: str) -> None:
    """D25, K3: at rest after a step, on every rank."""
    for result in trained(at)["plain", stage, dtype]:
        expected = theory(stage, dtype, at)[role] * result["payload"]
        assert getattr(result["memory"], role) == pytest.approx(expected, rel=0.02)


@at_worlds
@in_stages
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_in_total(at: int, stage: int, dtype: str) -> None:
    """fp32: 16P -> 8P + 8P/W, 4P + 12P/W, 16P/W; tables and counters included."""
    for result in trained(at)["plain", stage, dtype]:
        expected = sum(theory(stage, dtype, at).values()) * result["payload"]
        assert result["memory"].total == pytest.approx(expected, rel=0.02)


@at_worlds
@in_stages
def test_training_adds_nothing_to_what_was_built(at: int, stage: int) -> None:
    for result in trained(at)["plain", stage, "fp32"]:
        assert result["memory"] == result["built"]


@at_worlds
@in_stages
@pytest.mark.parametrize(
    "case", ["plain", "accumulated", "no_sync", "clipped", "overlap off"]
)
def test_scratch_memory_returns_to_zero(at: int, stage: int, case: str) -> None:
    """C1. After evaluations and exceptions: test_gradients."""
    key = (case, stage, "fp32") if case == "plain" else (case, stage)
    assert [result["memory"].buffers for result in trained(at)[key]] == [0] * at


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
def test_peak_scratch_is_a_few_buckets(stage: int) -> None:
    """At most two exchanges under way, each a bucket and its chunks, and the bucket
    that fills."""
    result = trained(4)["plain", stage, "fp32"][0]
    assert 0 < result["peak"] <= 5 * result["largest"]


def test_peak_scratch_of_stage3_is_a_few_units() -> None:
    """The root, two units whole, the gradients of one that fills and of two that travel
    with their chunks."""
    result = trained(4)["plain", 3, "fp32"][0]
    assert 0 < result["peak"] <= 8 * result["largest"]


def test_peak_scratch_of_stage3_does_not_grow_with_depth() -> None:
    shallow, deep = (trained(2)["layers", layers][0]["peak"] for layers in (5, 9))
    assert deep == shallow


@in_stages
def test_a_world_of_one_holds_16_bytes_per_parameter(stage: int) -> None:
    result = train(stage)
    assert result["memory"].total == pytest.approx(16 * result["payload"], rel=0.02)


@at_worlds
@in_stages
def test_poisoned_scratch_changes_nothing(at: int, stage: int) -> None:
    """A1, A2, A3: nobody reads a buffer before it is filled or after it was given
    back."""
    for poisoned, plain in zip(
        trained(at)["poison", stage], trained(at)["no poison", stage], strict=True
    ):
        assert differing(poisoned["params"], plain["params"]) == []


def test_world_is_one_without_a_process_group() -> None:
    assert world() == 1
