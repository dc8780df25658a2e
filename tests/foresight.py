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
        parts = [
            f"stage{self.stage}",
            f"world{self.world}",
            str(self.dtype).removeprefix("torch."),
        ]
        parts += [self.precision.master, self.precision.moments]
        parts += [
            str(kept).removeprefix("torch.")
            for kept in (self.precision.wire, self.precision.gradients)
        ]
        parts += [f"{self.accumulate}x{'no_sync' if self.no_sync else ''}"]
        timing = ("overlap", "update_in_backward", "gather_in_forward")
        parts += [name for name in timing if getattr(self.buckets, name)]
        parts += [
            name for name in ("checkpointing", "clips", "frozen") if getattr(self, name)
        ]
        return "-".join(
            [*parts, *(f"mesh{'x'.join(map(str, self.mesh))}" for _ in self.mesh[:1])]
        )


def cases(world: int) -> list[Case]:
    """Return every stage with every recipe, timing and accumulation mode, not each with
    each."""
    found = []
    buckets = [
        Buckets(
            bytes=size,
            overlap=overlap,
            update_in_backward=passing,
            gather_in_forward=late,
        )
        for size, overlap, passing, late in itertools.product(
            (100_000,), *[(True, False)] * 3
        )
    ]
    bf16 = torch.bfloat16
    for stage in (1, 2, 3):
        plain = Case(world, stage)
        found += [
            replace(plain, buckets=b, checkpointing=again)
            for b in buckets
            for again in (False, True)
        ]
        found += [
            replace(plain, buckets=b, accumulate=a, no_sync=n)
            for b in buckets
            for a, n in ((2, True), (2, False), (3, True), (3, False))
            if not (b.update_in_backward and not n)
        ]
        found += [
            replace(
                plain,
                dtype=dtype,
                precision=Precision(
                    master=master, moments=moments, wire=wire, gradients=kept
                ),
            )
            for dtype, master, moments, wire, kept in (
                (bf16, "fp32", "fp32", None, torch.float32),
                (bf16, "fp32", "fp32", torch.float32, torch.float32),
                (bf16, "split32", "bf16", None, bf16),
                (bf16, "split24", "8bit", None, bf16),
                (bf16, "none", "8bit", None, bf16),
                (torch.float16, "fp32", "bf16", None, torch.float32),
                (torch.float32, "fp32", "8bit", bf16, bf16),
                (torch.float32, "fp32", "bf16", bf16, torch.float32),
            )
        ]
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


def model(layers: int = 2) -> GPT:
    """Return a small GPT, the same on all ranks."""
    torch.manual_seed(0)
    return GPT(Shape(layers=layers, width=72, heads=3, context=32))


def train(case: Case, ledger: Ledger) -> dict[str, Any]:
    """Train a few steps; return what must be the same in earnest and in rehearsal."""
    net = model().to(case.dtype)
    if case.frozen:
        net.blocks[1].requires_grad_(False)
        net.byte_embedding.requires_grad_(False)
    if case.checkpointing:
        checkpoint_units(net, case.buckets)
    options: dict[str, Any] = {"precision": case.precision, "buckets": case.buckets}
    if case.mesh:
        names = ("outer", "inner")[-len(case.mesh) :]
        options["mesh"] = dist.init_device_mesh("cpu", case.mesh, mesh_dim_names=names)[
            "inner"
        ]
    if case.clips:
        options["max_grad_norm"] = 1.0
    optimizer = sharded(net, case.stage, **options)
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
