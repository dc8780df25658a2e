"""Sharding over a part of the ranks: a process group of two, or one dimension of a
mesh."""

from __future__ import annotations

import functools
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import STAGES
from torch import Tensor

import zerokern

HOW = ("process_group", "mesh")
STEPS = 3

Trained = tuple[list[Tensor], set[int]]
"""The weights, and the group sizes in the log."""


def _train(
    stage: int, first_step: int, rank: int, world: int, **options: Any
) -> Trained:
    model = models.toy()
    optimizer = zerokern.AdamW(
        model.parameters(), lr=1e-2, stage=stage, model=model, **options
    )
    for step in range(first_step, first_step + STEPS):
        tokens, targets = (models.share(t, rank, world) for t in models.batch(step))
        models.loss_of(model, tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.full_params():
        weights = [p.detach().clone() for p in model.parameters()]
    sizes = {call.group for call in optimizer.comm_log()}
    return weights, sizes


def _in_pairs(how: str) -> dict[int, Trained]:
    """Ranks 0, 2 and ranks 1, 3 train apart, each pair on batches of its own."""
    pair, place = dist.get_rank() % 2, dist.get_rank() // 2
    options: dict[str, Any]
    if how == "mesh":
        names = "shard", "replicate"
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        options = {"mesh": mesh["shard"]}
    else:
        members = [0, 2], [1, 3]
        groups = [dist.new_group(m) for m in members]
        options = {"process_group": groups[pair]}
    return {stage: _train(stage, 10 * pair, place, 2, **options) for stage in STAGES}


@functools.cache
def in_pairs() -> ranks.Cases:
    """Return weights and group sizes by stage, for each way to name the groups."""
    cases = {how: functools.partial(_in_pairs, how) for how in HOW}
    return ranks.run_cases(4, cases)


def _alone(first_step: int) -> list[Tensor]:
    weights, _ = _train(1, first_step, dist.get_rank(), 2)
    return weights


@functools.cache
def alone() -> ranks.Cases:
    """Return what a world of two gets on the batches of each pair."""
    cases = {0: functools.partial(_alone, 0), 1: functools.partial(_alone, 10)}
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stage", STAGES)
def test_each_group_trains_by_itself(stage: int, how: str) -> None:
    for rank, result in enumerate(in_pairs()[how]):
        weights, groups = result[stage]
        expected = alone()[rank % 2][0]
        assert groups == {2}
        assert len(weights) == len(expected)
        assert all(map(torch.equal, weights, expected)), rank
