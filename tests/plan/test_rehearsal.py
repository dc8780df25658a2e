"""A rehearsal on tensors without values: the work that it records, what it refuses, and
the bytes that it counts."""

from __future__ import annotations

import gc
from typing import Any

import foresight
import models
import pytest
import torch
from oracle import sharded
from registry import cases_of
from torch._C._profiler import _EventType

from zerokern.plan.forecast import Setting, Strategy, forecast
from zerokern.plan.ledger import Ledger
from zerokern.plan.rehearsal import Rehearsal, Work
from zerokern.plan.workload import Workload

case = cases_of("plan")


def test_only_what_computes_takes_time() -> None:
    """Not views, bare memory, or questions about a device; but updates in place do."""
    with Rehearsal(1) as rehearsal:
        x = torch.empty(4, 8, device="cuda")
        assert x.device.type == "cuda" and x.view(32).t().shape == (32,)
        assert rehearsal.record().events == []
        x.add_(1.0)
        x @ x.t()
        assert rehearsal.record().events == [
            Work("forward", flops=2 * 4 * 8 * 4, bytes=2 * x.nbytes, operations=2)
        ]


def test_a_rehearsal_refuses_to_read_what_is_not_there() -> None:
    """As the run would, so that a dry run finds scripts that do it."""
    with Rehearsal(2):
        model = foresight.model()
        optimizer = sharded(model, 3)
        foresight.step(foresight.Case(2, 3), model, optimizer)
        weight = next(model.parameters())
        with pytest.raises(RuntimeError, match="is sharded"):
            weight + 1
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.full_params():
            assert (weight + 1).shape == weight.shape


# ---------------------------------------------------------------------- the ledger


def test_the_ledger_counts_what_lives() -> None:
    with Ledger() as ledger:
        a = torch.zeros(100)
        b = a.view(10, 10)
        assert ledger.live == 400
        del a
        assert ledger.live == 400 and b.numel() == 100
        c = torch.ones(50)
        assert ledger.live == 600
        del c
        b.untyped_storage().resize_(0)
        assert ledger.live == 0
        assert ledger.peak.bytes == 600
        assert set(ledger.peak.holders) == {"forward: zeros", "forward: ones"}


def allocated(profile: Any) -> int:
    """Return by how much allocated bytes grew at most."""
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    found = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            when = event.start_time_ns
            found.append((when, fields.total_allocated, fields.alloc_size))
    found.sort()
    _, total, size = found[0]
    return max(total for _, total, _ in found) - (total - size)


@case(stages=(3,))
def peaks_of_a_step(stage: int) -> tuple[int, int]:
    """Return by how much memory grows in a step at most, as the ledger and as torch's
    profiler say."""
    with Ledger() as ledger:
        small, model = foresight.Case(2, stage), foresight.model(layers=8)
        optimizer = sharded(model, stage)
        for _ in range(2):
            foresight.step(small, model, optimizer)
        gc.collect()
        ledger.reset_peak()
        before = ledger.live
        with torch.profiler.profile(profile_memory=True) as profile:
            foresight.step(small, model, optimizer)
        return ledger.peak.bytes - before, allocated(profile)


def test_the_ledger_agrees_with_the_allocator() -> None:
    """torch's profiler is told of every allocation on the CPU; the peak of a step is
    the same to 3 %."""
    for ours, allocators in case.done(2)["peaks_of_a_step", 3]:
        assert ours == pytest.approx(allocators, rel=0.03)


# ---------------------------------------------------------------------- bytes of state


def test_parameters_without_memory_are_counted_once_each() -> None:
    """On the meta device all addresses are equal, and ties are one parameter."""
    workload = Workload(
        title="", tokens=1, build=lambda: (models.Toy(20, tied=True), None)
    )
    found = forecast(workload, Strategy(stage=1), Setting(world=4))
    model = models.Toy(20, tied=True)
    assert found.params == sum(p.numel() for p in model.parameters())
    assert len(list(model.parameters())) == 121


def test_padding_is_what_equal_shards_add() -> None:
    """Without it a rank holds W-ths of parameters, gradients and two moments in fp32:
    16 bytes for each parameter."""
    workload = Workload(title="", tokens=1, build=lambda: (models.Toy(20), None))
    found = forecast(workload, Strategy(stage=3), Setting(world=4))
    held = found.memory.total - found.memory.tables
    assert 0 < found.padding < held
    assert held - found.padding == pytest.approx(16 * found.params / 4, abs=1)


@case(stages=(2,))
def gradients_and_buckets(stage: int) -> tuple[int, int, int]:
    """Return the bytes of gradients after a step, of scratch memory at its peak, and of
    the largest bucket."""
    small, model = foresight.Case(2, stage), foresight.model(layers=8)
    optimizer = sharded(model, stage, buckets=small.buckets)
    foresight.step(small, model, optimizer)
    coordinator = optimizer.coordinator
    return (
        optimizer.memory().gradients,
        coordinator.transport.peak_bytes,
        max(4 * bucket.numel for bucket in coordinator.layout.buckets),
    )


def test_stage_2_keeps_no_full_gradient_buffer() -> None:
    """4/N bytes per parameter and a few buckets, as planned; not 4."""
    full = 4 * sum(p.numel() for p in foresight.model(layers=8).parameters())
    with Rehearsal(2):
        planned = gradients_and_buckets(2)
    gradients, peak, largest = planned
    assert full / 2 <= gradients < 0.6 * full
    assert peak <= 4 * largest < full / 3
    assert case.done(2)["gradients_and_buckets", 2] == [planned, planned]
