"""Several optimizers, each over a process group of its own: the norm of each, and one
norm over all of them."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from marks import in_stages
from oracle import STAGES, rank, sharded, whole, world
from short_runs import distance_moved
from torch import Tensor, nn

import zerokern

EXPERTS = 2
BOUND = 0.1

at_worlds = pytest.mark.parametrize("at", (2, 4), ids="world{}".format)


def _expert(index: int) -> nn.Linear:
    torch.manual_seed(50 + index)
    return nn.Linear(9, 5)


def _trunk() -> nn.Linear:
    torch.manual_seed(49)
    return nn.Linear(7, 9)


def _loss(trunk: nn.Module, expert: nn.Module, of_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(60 + of_rank)
    hidden = trunk(torch.randn(6, 7, generator=generator))
    return expert(torch.tanh(hidden)).square().mean()


def _expected_norms(at: int) -> tuple[float, list[float]]:
    """Return the norm of the trunk's mean gradient over all ranks, and of each expert's
    over the ranks that have it."""
    trunk = _trunk()
    experts = [_expert(index) for index in range(EXPERTS)]
    for r in range(at):
        _loss(trunk, experts[r % EXPERTS], r).backward()

    def norm_of_mean(model: nn.Module, members: int) -> float:
        grads = [p.grad / members for p in model.parameters()]  # type: ignore[operator]
        return float(nn.utils.get_total_norm(grads))

    of_experts = [norm_of_mean(expert, at // EXPERTS) for expert in experts]
    return norm_of_mean(trunk, at), of_experts


def _norms_of_two_optimizers(stage: int) -> dict[str, Any]:
    """Every rank has the trunk; rank r has expert r mod 2, shared with the other ranks
    that have it."""
    members = [range(index, world(), EXPERTS) for index in range(EXPERTS)]
    groups = [dist.new_group(list(m)) for m in members]
    own = rank() % EXPERTS
    trunk, expert = _trunk(), _expert(own)
    sgd: dict[str, Any] = {"adam": zerokern.SGD, "lr": 1.0}
    of_trunk = sharded(trunk, stage, **sgd)
    of_expert = sharded(expert, stage, **sgd, process_group=groups[own])
    optimizers = [of_trunk, of_expert]

    before = whole(trunk, of_trunk), whole(expert, of_expert)
    _loss(trunk, expert, rank()).backward()
    # Measures, and clips nothing.
    norms = [float(o.clip_grad_norm_(math.inf)) for o in optimizers]

    of_ranks: list[Any] = [None] * world()
    dist.all_gather_object(of_ranks, norms[1])
    # Each expert once; the bounds must agree on all ranks.
    total = math.hypot(norms[0], *of_ranks[:EXPERTS])
    for optimizer, norm in zip(optimizers, norms, strict=True):
        optimizer.clip_grad_norm_(BOUND * norm / total)
        optimizer.step()

    after = whole(trunk, of_trunk), whole(expert, of_expert)
    return {
        "norms": norms,
        "moved": list(map(distance_moved, before, after)),
        "reported": [float(o.grad_norm) for o in optimizers],
    }


@functools.cache
def two_optimizers(at: int) -> ranks.Cases:
    """Run all stages on one group."""
    cases = {s: functools.partial(_norms_of_two_optimizers, s) for s in STAGES}
    return ranks.run_cases(at, cases)


@at_worlds
@in_stages
def test_each_optimizer_has_the_norm_over_its_own_group(stage: int, at: int) -> None:
    """An expert's gradients are averaged over the ranks that have it, and its norm is
    neither averaged nor counted twice."""
    trunk, experts = _expected_norms(at)
    for r, result in enumerate(two_optimizers(at)[stage]):
        expected = [trunk, experts[r % EXPERTS]]
        assert result["norms"] == pytest.approx(expected, rel=1e-6)
        assert result["reported"] == pytest.approx(result["norms"], rel=1e-6)


@at_worlds
@in_stages
def test_a_total_norm_over_several_groups_is_a_root_of_squares(
    stage: int, at: int
) -> None:
    """`clip_grad_norm_(inf)` measures; each is then clipped to its part of the bound,
    and all together to it."""
    trunk, experts = _expected_norms(at)
    total = math.hypot(trunk, *experts)
    assert total > BOUND
    for r, result in enumerate(two_optimizers(at)[stage]):
        norms = trunk, experts[r % EXPERTS]
        expected = [BOUND * norm / total for norm in norms]
        assert result["moved"] == pytest.approx(expected, rel=1e-4)
