"""Parity: a sharded run equals the unsharded one bit for bit, and is close to torch's
on the whole batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import (
    STAGES,
    Run,
    apart,
    differing,
    integer_gradient,
    rank,
    sharded,
    whole,
    world,
)
from torch import Tensor, nn
from training import everything, train_by_hand

import zerokern

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# ------------------------------------------ exact sums: any world equals a world of one

SHAPES = ((5, 7), (), (64,), (3, 65), (1,), (0, 4), (129,))


def exact_by_hand(stage: int, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Train on integer gradients assigned to p.grad."""
    model = models.toy().to(dtype)
    optimizer = sharded(
        model,
        stage,
        lr=1e-2,
        weight_decay=0.1,
        buckets=zerokern.Buckets(bytes=4000),
        **options,
    )
    train_by_hand(model, optimizer, range(4))
    return everything(model, optimizer)


def exact_by_autograd(
    stage: int, dtype: torch.dtype, **options: Any
) -> dict[str, Tensor]:
    """Train on a loss whose gradients are integers, two micro-batches per step."""
    torch.manual_seed(0)
    model = models.Weighted(SHAPES, dtype)
    optimizer = sharded(
        model,
        stage,
        lr=1e-2,
        weight_decay=0.1,
        buckets=zerokern.Buckets(bytes=600),
        **options,
    )
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            gradients = [
                integer_gradient(s, 10 * step + micro, i, rank(), world())
                for i, s in enumerate(SHAPES)
            ]
            model(gradients).backward()
        optimizer.step()
    return everything(model, optimizer)


EXACT: dict[str, Callable[..., dict[str, Tensor]]] = {
    "by_hand": exact_by_hand,
    "by_autograd": exact_by_autograd,
}
EXACT_CASES = {
    ("exact", kind, stage, dtype, clip): functools.partial(
        EXACT[kind], stage, DTYPES[dtype], max_grad_norm=clip
    )
    for kind, stage, dtype, clip in itertools.product(
        EXACT, STAGES, DTYPES, (None, 1.5)
    )
}

# ------------------------------------------ any data: stages, buckets and overlap agree

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "accumulated": {},
}


def random_data(
    mode: str, dtype: torch.dtype, stage: int, size: int, overlap: bool
) -> dict[str, Tensor]:
    """Train on real gradients; three steps, so that stage 1's guess of the last
    backward is in use."""
    run = Run(
        stage,
        world(),
        build=lambda: models.toy(blocks=2).to(dtype),
        buckets=zerokern.Buckets(bytes=size, overlap=overlap),
        lr=1e-3,
        **MODES[mode],
    )
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(2 if mode == "accumulated" else 1):
            last = micro == (1 if mode == "accumulated" else 0)
            with nullcontext() if last else run.no_sync():
                run.backward(2 * step + micro)
        run.step()
    return everything(run.model, run.optimizer)


BASE = (1, 2**20, False)
"""Stage, bucket size, overlap: the plainest way to do it, with which the others are
compared."""
VARIANTS = [
    *(
        (stage, size, overlap)
        for stage in (1, 2)
        for size in (64, 6000)
        for overlap in (True, False)
    ),
    (1, 2**20, True),
    (1, 2**20, False),
    (2, 2**20, True),
    (3, 2**20, True),
    (3, 2**20, False),
]
RANDOM_CASES = {
    (mode, dtype, *variant): functools.partial(
        random_data, mode, DTYPES[dtype], *variant
    )
    for mode in MODES
    for dtype in DTYPES
    for variant in VARIANTS
}


def reference_data(mode: str) -> dict[str, Tensor]:
    """Train the same with torch's AdamW, on one process and the concatenated batch."""
    model = models.toy(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2 if mode == "accumulated" else 1):
            models.loss_of(model, *models.batch(2 * step + micro)).backward()
        if mode == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return whole(model, optimizer)


@functools.cache
def trained(world: int) -> ranks.Cases:
    """Run all cases on one group; bf16, clipping and accumulation of random data in a
    world of 3 only, for time."""
    cases: dict[Any, Callable[[], Any]] = dict(EXACT_CASES)
    cases |= {
        key: case
        for key, case in RANDOM_CASES.items()
        if world == 3 or key[:2] == ("plain", "fp32")
    }
    return ranks.run_cases(world, cases)


at_worlds = pytest.mark.parametrize("at", ranks.worlds(2, 3, rarely=4))


@functools.cache
def alone(key: Any) -> dict[str, Tensor]:
    """Return what a world of one makes of an exact case."""
    return EXACT_CASES[key]()


@at_worlds
@pytest.mark.parametrize(
    "key", EXACT_CASES, ids=lambda key: "-".join(map(str, key[1:]))
)
def test_exact_sums_equal_a_world_of_one_bit_for_bit(at: int, key: Any) -> None:
    """Parameters, masters, moments and step counters, on every rank."""
    for result in trained(at)[key]:
        assert differing(result, alone(key)) == []


@at_worlds
@pytest.mark.parametrize(
    "variant",
    [v for v in VARIANTS if v != BASE],
    ids=lambda v: "stage{}-{}B-overlap{}".format(*v),
)
def test_stages_buckets_and_overlap_agree_bit_for_bit(at: int, variant: Any) -> None:
    """On any data at the same world; sums have one order."""
    for result, base in zip(
        trained(at)[("plain", "fp32", *variant)],
        trained(at)[("plain", "fp32", *BASE)],
        strict=True,
    ):
        assert differing(result, base) == []


@pytest.mark.parametrize(
    "variant",
    [v for v in VARIANTS if v != BASE],
    ids=lambda v: "stage{}-{}B-overlap{}".format(*v),
)
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [md for md in itertools.product(MODES, DTYPES) if md != ("plain", "fp32")],
)
def test_they_agree_with_bf16_clipping_and_accumulation_too(
    mode: str, dtype: str, variant: Any
) -> None:
    """In a world of 3, where the order of a sum shows."""
    for result, base in zip(
        trained(3)[(mode, dtype, *variant)],
        trained(3)[(mode, dtype, *BASE)],
        strict=True,
    ):
        assert differing(result, base) == []


@pytest.mark.parametrize("mode", MODES)
def test_close_to_torch_on_the_whole_batch(mode: str) -> None:
    """Every stage equals the base (above), so the base stands for all.

    torch itself, with the batch in three parts, differs from the whole batch by 3e-6
    here.
    """
    expected = reference_data(mode)
    for result in trained(3)[(mode, "fp32", *BASE)]:
        assert apart({name: result[name] for name in expected}, expected) == {}


@at_worlds
def test_all_ranks_hold_the_same(at: int) -> None:
    first, *others = trained(at)[("plain", "fp32", *BASE)]
    for other in others:
        assert differing(other, first) == []


def test_integer_gradients_have_one_mean_in_every_world() -> None:
    """What makes these tests exact."""
    for of in (1, 2, 3):
        mean = sum(integer_gradient((5, 7), 3, 1, r, of) for r in range(of)) / of
        assert torch.equal(mean, integer_gradient((5, 7), 3, 1, 0, 1))
