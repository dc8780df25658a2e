"""Gradients of several micro-batches are added up: in every format, without losing
small ones, and the same in whatever number of micro-batches."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from marks import at_odd_worlds, in_stages
from oracle import Run, apart, differing, distance, sharded, state_of, whole, world
from registry import cases_of
from short_runs import short
from torch import Tensor
from training import everything

import zerokern
from zerokern import Precision

case = cases_of("gradients at odd worlds")

# -------------------------------------------------------------- accumulation in 16 bits

SHAPES = ((5, 7), (), (64,), (3, 65), (1,), (129,))
FORMATS = {
    "bf16 on the wire": Precision(),
    "fp32 on the wire": Precision(wire=torch.float32),
    "bf16 shards": Precision(gradients=torch.bfloat16),
    "fp32 on the wire, bf16 shards": Precision(
        wire=torch.float32, gradients=torch.bfloat16
    ),
}


def _coefficients(step: int, micro: int) -> list[Tensor]:
    """Return the gradients of a micro-batch: integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    return [
        torch.randint(-4, 5, shape, generator=generator).float() for shape in SHAPES
    ]


def _accumulated(stage: int, precision: Precision, no_sync: bool) -> dict[str, Tensor]:
    """Three micro-batches a step, whose gradients are integers that bf16 adds up
    exactly."""
    torch.manual_seed(0)
    model = models.Weighted(SHAPES, torch.bfloat16)
    optimizer = sharded(
        model, stage, lr=1e-2, precision=precision, buckets=zerokern.Buckets(bytes=300)
    )
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            waits = no_sync and micro < 2
            with optimizer.no_sync() if waits else nullcontext():
                model(_coefficients(step, micro)).backward()
        optimizer.step()
    return everything(model, optimizer)


@functools.cache
def _accumulated_by_torch() -> dict[str, Tensor]:
    """Return the masters: torch's AdamW in fp32 on the sums."""
    torch.manual_seed(0)
    model = models.Weighted(SHAPES, torch.bfloat16).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            model(_coefficients(step, micro)).backward()
        optimizer.step()
    return dict(model.named_parameters())


@case
def accumulated(stage: int) -> dict[Any, dict[str, Tensor]]:
    return {
        (name, no_sync): _accumulated(stage, precision, no_sync)
        for name, precision in FORMATS.items()
        for no_sync in (False, True)
    }


@at_odd_worlds
@in_stages
@pytest.mark.parametrize("no_sync", (False, True), ids=["reduced each time", "no_sync"])
@pytest.mark.parametrize("name", FORMATS)
def test_accumulation_in_every_format_is_the_sum(
    name: str, no_sync: bool, stage: int, at: int
) -> None:
    """Neither the last micro-batch only, nor a buffer of another dtype."""
    expected = _accumulated_by_torch()
    for results in case.done(at)["accumulated", stage]:
        result = results[name, no_sync]
        params = {n: result[n] for n in expected}
        masters = {n: result[f"{n}/master"] for n in expected}
        assert apart(masters, expected, 1e-6) == {}
        rounded = {n: master.bfloat16() for n, master in masters.items()}
        assert differing(params, rounded) == []


MICROS = 256
SMALL_BESIDE_LARGE = [
    (1, False),
    (2, False),
    (2, True),
    (3, False),
]
"""Stage and no_sync: with it, all stages add up in the bucket as stage 1 always
does."""


def _small_beside_large(stage: int, no_sync: bool) -> Tensor:
    """Return the mean gradient over ranks and the sum over micro-batches, as the first
    moment has it."""
    model = models.Weighted([(70,)], torch.bfloat16)
    precision = Precision(wire=torch.float32)
    optimizer = sharded(model, stage, precision=precision, betas=(0.0, 0.0))
    with optimizer.no_sync() if no_sync else nullcontext():
        for value in (1.0, *[1e-3] * MICROS):
            model([torch.full((70,), value)]).backward()
    optimizer.step()
    return state_of(model, optimizer)["terms.0.weight/exp_avg"]


@case
def small_beside_large(stage: int) -> dict[bool, Tensor]:
    return {
        no_sync: _small_beside_large(stage, no_sync)
        for at, no_sync in SMALL_BESIDE_LARGE
        if at == stage
    }


@at_odd_worlds
@pytest.mark.parametrize(("stage", "no_sync"), SMALL_BESIDE_LARGE)
def test_small_gradients_of_many_micro_batches_are_not_lost(
    stage: int, no_sync: bool, at: int
) -> None:
    """With fp32 on the wire, whether they add up in the bucket or in the shard."""
    small = float(torch.tensor(1e-3).bfloat16())  # what autograd hands over
    expected = torch.full((70,), 1.0 + MICROS * small)
    for results in case.done(at)["small_beside_large", stage]:
        assert distance(results[no_sync], expected) < 1e-6


# ---------------------------------------------------------- the number of micro-batches

ROWS = 8
SPLITS = {"8x1": 8, "4x2": 4, "1x8": 1}
"""Micro-batches and their rows; the number of the former."""
SPLIT_CASES = [
    ("8x1", False),
    ("8x1", True),
    ("4x2", False),
    ("4x2", True),
    ("1x8", False),
]
"""With and without no_sync."""


def _loss_of_part(run: Run, step: int, micro: int, micros: int, r: int) -> Tensor:
    """Return the loss of one micro-batch of a rank, as a part of their mean."""
    own = []
    for tensor in models.batch(step, size=ROWS * run.ranks):
        of_rank = models.share(tensor, r, run.ranks)
        own.append(models.share(of_rank, micro, micros))
    return models.loss_of(run.model, *own) / micros


def _split(stage: int | None, of: int, micros: int, no_sync: bool) -> dict[str, Tensor]:
    """Train on 8 rows per rank and step, cut into micro-batches."""
    run = short(stage, of)
    for step in range(2):
        run.optimizer.zero_grad()
        for micro in range(micros):
            waits = no_sync and micro < micros - 1
            with run.no_sync() if waits else nullcontext():
                loss = functools.partial(_loss_of_part, run, step, micro, micros)
                run.backward(step, loss)
        run.step()
    return whole(run.model, run.optimizer)


@case
def splits(stage: int) -> dict[Any, dict[str, Tensor]]:
    return {
        (name, no_sync): _split(stage, world(), SPLITS[name], no_sync)
        for name, no_sync in SPLIT_CASES
    }


@functools.cache
def _on_whole_batches(of: int) -> dict[str, Tensor]:
    return _split(None, of, 1, False)


@at_odd_worlds
@in_stages
@pytest.mark.parametrize(("name", "no_sync"), SPLIT_CASES)
def test_the_number_of_micro_batches_changes_nothing(
    name: str, no_sync: bool, stage: int, at: int
) -> None:
    for results in case.done(at)["splits", stage]:
        assert apart(results[name, no_sync], _on_whole_batches(at)) == {}
