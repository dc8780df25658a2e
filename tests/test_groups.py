"""Sharding over a part of the ranks: a process group of two, or one dimension of a
mesh."""

from __future__ import annotations

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import zerokern

STAGES = (1, 2, 3)
STEPS = 3


def _train(
    stage: int, first_step: int, rank: int, world: int, **options: object
) -> tuple[list[Tensor], set[int]]:
    """Return the weights, and the group sizes in the log."""
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
    return weights, {call.group for call in optimizer.comm_log()}


def _alone(first_step: int) -> list[Tensor]:
    """Return what a world of two gets on the batches of one pair, computed by two ranks
    of the default group."""
    return ranks.run(2, lambda: _train(1, first_step, dist.get_rank(), 2))[0][0]


def _in_pairs(how: str) -> dict[int, tuple[list[Tensor], set[int]]]:
    """Ranks 0, 2 and ranks 1, 3 train apart, each pair on batches of its own."""
    pair, place = dist.get_rank() % 2, dist.get_rank() // 2
    if how == "mesh":
        options = {
            "mesh": dist.init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("shard", "replicate")
            )["shard"]
        }
    else:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        options = {"process_group": groups[pair]}
    return {stage: _train(stage, 10 * pair, place, 2, **options) for stage in STAGES}


@pytest.fixture(scope="module", params=["process_group", "mesh"])
def pairs(
    request: pytest.FixtureRequest,
) -> list[dict[int, tuple[list[Tensor], set[int]]]]:
    return ranks.run(4, _in_pairs, request.param)


@pytest.fixture(scope="module")
def expected() -> list[list[Tensor]]:
    return [_alone(0), _alone(10)]


@pytest.mark.parametrize("stage", STAGES)
def test_each_group_trains_by_itself(
    pairs: list, expected: list[list[Tensor]], stage: int
) -> None:
    for rank, result in enumerate(pairs):
        weights, groups = result[stage]
        assert groups == {2}
        assert all(map(torch.equal, weights, expected[rank % 2])), rank
