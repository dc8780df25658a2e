"""What a step sends and holds, of trainings of every kind, once everything is warm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import ranks
import torch
from oracle import STAGES, sharded
from torch import nn
from training import everything

import zerokern

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ACCUMULATED = 8
"""Micro-batches, where gradients are accumulated."""
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
            waits = no_sync and micro < micros - 1
            with optimizer.no_sync() if waits else nullcontext():
                tokens, targets = models.batch(step * micros + micro)
                models.loss_of(model, tokens, targets).backward()
        optimizer.step()
    return {
        "log": optimizer.comm_log(),
        "payload": zero.layout.numel,
        "padded": zero.layout.padded_numel,
        "columns": zero.handles.num_columns,
        "built": built,
        "memory": optimizer.memory(),
        "peak": scratch.peak_bytes,
        "largest": max(b.numel * b.itemsize for b in zero.layout.buckets),
        "params": everything(model, optimizer),
    }


def _small(**options: Any) -> Callable[[int], Any]:
    """Train a small model."""
    return functools.partial(train, build=models.toy, **options)


def _deep(layers: int) -> Callable[[], Any]:
    build = functools.partial(models.gpt, width=24, layers=layers)
    return functools.partial(train, 3, build=build)


OF_A_STAGE: dict[str, Callable[[int], Any]] = {
    "accumulated": _small(micros=ACCUMULATED),
    "no_sync": _small(micros=ACCUMULATED, no_sync=True),
    "clipped": functools.partial(train, max_grad_norm=0.1),
    "poison": _small(micros=2, poison=True),
    "no poison": _small(micros=2),
    "overlap off": functools.partial(
        train, buckets=zerokern.Buckets(bytes=40_000, overlap=False)
    ),
}


@functools.cache
def trained(at: int) -> ranks.Cases:
    """Return all of these by (name, stage), ("plain", stage, dtype) and ("layers",
    number), on one group of ranks."""
    cases: dict[Any, Callable[[], Any]] = {
        (name, stage): functools.partial(function, stage)
        for name, function in OF_A_STAGE.items()
        for stage in STAGES
    }
    cases |= {
        ("plain", stage, name): functools.partial(train, stage, dtype)
        for stage in STAGES
        for name, dtype in DTYPES.items()
    }
    cases |= {("layers", layers): _deep(layers) for layers in (5, 9)}
    return ranks.run_cases(at, cases)
