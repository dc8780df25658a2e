"""Uneven numbers of batches: ranks that have run out follow the others, and all end
with the same weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import STAGES, differing, rank, sharded, whole

import zerokern

BATCHES = {2: (5, 3), 3: (2, 4, 1), 4: (0, 3, 3, 1)}
"""Of each rank, by world."""


def train(
    stage: int, batches: Sequence[int], accumulation: int, *, follow: bool
) -> dict[str, Any]:
    """Train for as many batches as this rank has; or, if nobody follows, for as many as
    any has, with empty ones."""
    model = models.forked()
    optimizer = sharded(
        model, stage, lr=1e-2, buckets=zerokern.Buckets(bytes=6000), max_grad_norm=0.5
    )
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    mine, most = batches[rank()], max(batches)

    def iterate(index: int) -> None:
        batch = models.batch(index)
        tokens, targets = (models.share(t, rank(), len(batches)) for t in batch)
        loss = models.loss_of(model, tokens, targets)
        (loss * (1.0 if index < mine else 0.0)).backward()
        if (index + 1) % accumulation == 0 or index + 1 == most:
            optimizer.step()
            optimizer.zero_grad()
            falling.step()

    if follow:
        with optimizer.join():
            for index in range(mine):
                iterate(index)
    else:
        for index in range(most):
            iterate(index)
    return {
        "params": whole(model, optimizer),
        "lr": optimizer.param_groups[0]["lr"],
        "step": optimizer.metrics()["step"],
        "buffers": optimizer.memory().buffers,
    }


def evaluate(batches: Sequence[int]) -> list[float]:
    """Stage 3: evaluate as many batches as this rank has, then train a step."""
    model = models.forked()
    optimizer = sharded(model, 3, lr=1e-2)
    losses = []
    with optimizer.join(), torch.no_grad():
        for index in range(batches[rank()]):
            loss = models.loss_of(model, *models.batch(index))
            losses.append(float(loss))
    models.loss_of(model, *models.batch(7)).backward()
    optimizer.step()
    return losses


def parts_ways() -> str:
    """Two ranks have batches and run different units; return what they are told."""
    model = models.forked()
    optimizer = sharded(model, 3)
    try:
        with optimizer.join():
            if rank() < 2:
                tokens, _ = models.batch(0)
                model(tokens, order=(0, 1) if rank() else (1, 0))
    except RuntimeError as error:
        return str(error)
    return ""


@functools.cache
def trained(world: int) -> ranks.Cases:
    cases: dict[Any, Any] = {
        (stage, accumulation, follow): functools.partial(
            train, stage, BATCHES[world], accumulation, follow=follow
        )
        for stage in STAGES
        for accumulation in (1, 2)
        for follow in (True, False)
    }
    cases["evaluate"] = functools.partial(evaluate, BATCHES[world])
    cases["parts ways"] = parts_ways
    return ranks.run_cases(world, cases)


at_worlds = pytest.mark.parametrize("world", BATCHES)


@at_worlds
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", (1, 2))
def test_a_rank_without_batches_contributes_zeros(
    world: int, stage: int, accumulation: int
) -> None:
    """It is the same as if it had gone on with batches whose loss counts nothing."""
    following, going_on = (
        trained(world)[stage, accumulation, follow] for follow in (True, False)
    )
    for ours, expected in zip(following, going_on, strict=True):
        assert differing(ours["params"], expected["params"]) == []
        assert ours["step"] == expected["step"]
        assert ours["buffers"] == 0


@at_worlds
@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_end_with_the_same_weights_and_rates_of_the_last_step(
    world: int, stage: int
) -> None:
    first, *others = trained(world)[stage, 1, True]
    for other in others:
        assert differing(other["params"], first["params"]) == []


@at_worlds
def test_evaluation_loops_of_different_lengths(world: int) -> None:
    losses = trained(world)["evaluate"]
    assert [len(of_rank) for of_rank in losses] == list(BATCHES[world])
    longest = max(losses, key=len)
    assert all(of_rank == longest[: len(of_rank)] for of_rank in losses)


@at_worlds
def test_ranks_that_part_ways_are_told_so_at_once(world: int) -> None:
    for message in trained(world)["parts ways"]:
        assert "gather blocks.0" in message and "gather blocks.1" in message


def test_a_world_of_one_joins_nobody() -> None:
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    with optimizer.join():
        models.loss_of(model, *models.batch(0)).backward()
        optimizer.step()
    assert optimizer.comm_log() == ()


def test_updates_in_backward_refuse_it() -> None:
    optimizer = zerokern.AdamW(
        models.toy().parameters(), buckets=zerokern.Buckets(update_in_backward=True)
    )
    with (
        pytest.raises(ValueError, match=r"join\(\) needs all gradients"),
        optimizer.join(),
    ):
        pass
