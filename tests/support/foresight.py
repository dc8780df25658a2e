"""One run, in earnest or as a rehearsal: what both must agree on."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from oracle import sharded

from zerokern import Buckets, Precision
from zerokern.examples.gpt import GPT, Shape
from zerokern.plan.forecast import checkpoint_units
from zerokern.plan.ledger import Ledger
from zerokern.plan.rehearsal import Rehearsal

STEPS = 2


@dataclass(frozen=True)
class Case:
    """How to train."""

    world: int
    stage: int
    dtype: torch.dtype = torch.float32
    precision: Precision = field(default_factory=Precision)
    buckets: Buckets = field(default_factory=lambda: Buckets(bytes=100_000))
    accumulate: int = 1
    no_sync: bool = False
    checkpointing: bool = False
    clips: bool = False
    frozen: bool = False
    mesh: tuple[int, ...] = ()
    """Sizes of a mesh, over the last dimension of which is sharded."""

    def __str__(self) -> str:
        timings = ("overlap", "update_in_backward", "gather_in_forward")
        options = ("checkpointing", "clips", "frozen")
        parts = [
            f"stage{self.stage}",
            f"world{self.world}",
            short(self.dtype),
            self.precision.master,
            self.precision.moments,
            short(self.precision.wire),
            short(self.precision.gradients),
            f"{self.accumulate}x{'no_sync' if self.no_sync else ''}",
            *(name for name in timings if getattr(self.buckets, name)),
            *(name for name in options if getattr(self, name)),
        ]
        if self.mesh:
            parts.append(f"mesh{'x'.join(map(str, self.mesh))}")
        return "-".join(parts)


def short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def cases(world: int) -> list[Case]:
    """Return every stage with every recipe, timing and accumulation mode, not each with
    each."""
    found = []
    for stage in (1, 2, 3):
        plain = Case(world, stage)
        found += with_timings(plain)
        found += with_recipes(plain)
        found += [
            replace(plain, clips=True),
            replace(plain, frozen=True),
            replace(plain, frozen=True, accumulate=2),
        ]
    if world == 4:
        found += [
            Case(world, stage, mesh=mesh)
            for stage in (1, 2, 3)
            for mesh in ((2, 2), (4, 1), (1, 4), (4,))
        ]
    return found


def with_timings(plain: Case) -> list[Case]:
    """Return a case with every timing: with checkpoints, and with every accumulation
    that the timing allows."""
    timings = [
        Buckets(
            bytes=100_000,
            overlap=overlap,
            update_in_backward=passing,
            gather_in_forward=late,
        )
        for overlap, passing, late in itertools.product((True, False), repeat=3)
    ]
    found = [
        replace(plain, buckets=buckets, checkpointing=again)
        for buckets in timings
        for again in (False, True)
    ]
    for buckets in timings:
        for accumulate, no_sync in ((2, True), (2, False), (3, True), (3, False)):
            if no_sync or not buckets.update_in_backward:
                found.append(
                    replace(
                        plain, buckets=buckets, accumulate=accumulate, no_sync=no_sync
                    )
                )
    return found


def with_recipes(plain: Case) -> list[Case]:
    """Return a case with parameters, state, messages and gradients of various
    types."""
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    recipes = (
        (bf16, "fp32", "fp32", None, fp32),
        (bf16, "fp32", "fp32", fp32, fp32),
        (bf16, "split32", "bf16", None, bf16),
        (bf16, "split24", "8bit", None, bf16),
        (bf16, "none", "8bit", None, bf16),
        (fp16, "fp32", "bf16", None, fp32),
        (fp32, "fp32", "8bit", bf16, bf16),
        (fp32, "fp32", "bf16", bf16, fp32),
    )
    found = []
    for dtype, master, moments, wire, gradients in recipes:
        precision = Precision(
            master=master, moments=moments, wire=wire, gradients=gradients
        )
        found.append(replace(plain, dtype=dtype, precision=precision))
    return found


def model(layers: int = 2) -> GPT:
    """Return a small GPT, the same on all ranks."""
    torch.manual_seed(0)
    return GPT(Shape(layers=layers, width=72, heads=3, context=32))


def built(case: Case) -> tuple[GPT, Any]:
    """Return the model and its optimizer."""
    net = model().to(case.dtype)
    if case.frozen:
        net.blocks[1].requires_grad_(False)
        net.byte_embedding.requires_grad_(False)
    if case.checkpointing:
        checkpoint_units(net, case.buckets)
    options: dict[str, Any] = {"precision": case.precision, "buckets": case.buckets}
    if case.mesh:
        names = ("outer", "inner")[-len(case.mesh) :]
        mesh = dist.init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
        options["mesh"] = mesh["inner"]
    if case.clips:
        options["max_grad_norm"] = 1.0
    return net, sharded(net, case.stage, **options)


def train(case: Case, ledger: Ledger) -> dict[str, Any]:
    """Train a few steps; return what must be the same in earnest and in rehearsal."""
    net, optimizer = built(case)
    gc.collect()
    peaks = []
    for _ in range(STEPS):
        ledger.reset_peak()
        step(case, net, optimizer)
        peaks.append(ledger.peak.bytes)
    return {
        "log": optimizer.comm_log(),
        "memory": optimizer.memory(),
        "peaks": peaks,
        "scratch": optimizer.coordinator.transport.peak_bytes,
    }


def step(case: Case, net: GPT, optimizer: Any) -> None:
    """Make a step of as many micro-batches as the case says."""
    optimizer.zero_grad()
    for micro_batch in range(case.accumulate):
        last = micro_batch == case.accumulate - 1
        with optimizer.no_sync() if case.no_sync and not last else nullcontext():
            net.loss(torch.arange(4 * 33, dtype=torch.int64).view(4, 33)).backward()
    optimizer.step()


def in_earnest(case: Case) -> dict[str, Any]:
    """Train on this rank of a real group."""
    with Ledger() as ledger:
        return train(case, ledger)


def in_rehearsal(case: Case, rank: int) -> dict[str, Any]:
    """Train on fakes."""
    gc.freeze()
    try:
        with Rehearsal(case.world, rank) as rehearsal:
            return train(case, rehearsal.ledger)
    finally:
        gc.unfreeze()


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> list[str]:
    """Return the first places where two logs differ."""
    pairs = itertools.zip_longest(ours, theirs)
    return [f"{i}: {a} != {b}" for i, (a, b) in enumerate(pairs) if a != b][:3]
