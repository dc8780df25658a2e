"""When buckets are updated and gathered does not change what happens: updates in
backward, gathers in forward, and the default agree."""

from __future__ import annotations

import functools
import gc
from typing import Any

import models
import pytest
import ranks
from marks import in_stages_1_and_2
from oracle import STAGES, differing, sharded, whole
from registry import cases_of
from scripts import SCRIPTS

from zerokern import Buckets

case = cases_of("gradients")

pytestmark = pytest.mark.slow

IN_BACKWARD = [
    "zero_grad_sets_to_none",
    "zero_grad_in_place",
    "zeroed_after_the_step",
    "model_zero_grad",
    "no_sync_but_for_the_last",
    "used_only_under_no_sync",
    "no_sync_around_all_backwards",
    "unused_on_all_ranks_is_left_alone",
    "unused_on_one_rank_counts_as_zeros",
    "used_on_one_rank_only",
    "a_unit_is_skipped_and_the_order_changes",
    "a_unit_is_used_twice",
    "two_forwards_one_backward",
    "checkpoint_reentrant",
    "checkpoint_not_reentrant",
    "checkpoint_reentrant_used_twice",
    "checkpoint_with_accumulation",
    "closure",
    "scheduler_lambda",
    "groups_inside_one_bucket",
    "a_frozen_parameter_stays",
    "every_gradient_set_by_hand",
    "step_before_any_backward",
    "blocks_called_directly",
]
"""Scripts that need no gradient after the backward in which it was formed."""
WAYS = {
    "in backward": Buckets(bytes=6000, update_in_backward=True),
    "in forward": Buckets(bytes=6000, gather_in_forward=True),
    "both": Buckets(bytes=6000, update_in_backward=True, gather_in_forward=True),
}
STAGES_OF = {"in forward": (1,), "both": (2,)}
"""Gathers of stages 1 and 2 are the same code."""


def _play(name: str, stage: int, world: int, way: str) -> dict[str, Any]:
    """Run one script."""
    return SCRIPTS.play(name, stage, world, buckets=WAYS[way])


def scripts(way: str) -> list[str]:
    """Return the scripts that make sense in a way; of those whose parameters are
    gathered in forward every other one."""
    if way in ("in backward", "both"):
        return IN_BACKWARD
    return SCRIPTS.of_common_model()[::2]


COMPARED = [
    (name, stage, way)
    for way in ("in backward", "in forward", "both")
    for name in scripts(way)
    for stage in STAGES_OF.get(way, STAGES)
]


@functools.cache
def played(at: int) -> ranks.Cases:
    """Return every script in every way, on one group of ranks."""
    return ranks.run_cases(
        at,
        {
            (name, stage, way): functools.partial(_play, name, stage, at, way)
            for name, stage, way in COMPARED
        },
    )


@pytest.mark.parametrize("at", ranks.worlds(2, rarely=(1, 3)))
@pytest.mark.parametrize(("name", "stage", "way"), COMPARED)
def test_same_bits(name: str, stage: int, way: str, at: int) -> None:
    """Parameters, moments, counters, and no memory left."""
    results = played(at)[name, stage, way]
    defaults = SCRIPTS.played(name, stage, at)
    for ours, default in zip(results, defaults, strict=True):
        assert differing(ours["params"], default["params"]) == []
        assert differing(ours["state"], default["state"]) == []
        assert differing(ours["seen"], default["seen"]) == []
        assert not any(ours["buffers"])


def _dropped(stage: int, way: str) -> list[str]:
    """Drop an optimizer while its gathers are under way, twice; return how the
    parameters differ from those of a run that kept it until they were there."""
    kept = []
    for keep in (False, True, False):
        model = models.toy()
        optimizer = sharded(model, stage, lr=1e-2, buckets=WAYS[way])
        models.loss_of(model, *models.batch(0)).backward()
        optimizer.step()
        if keep:
            whole(model, optimizer)
        del optimizer
        gc.collect()
        params = model.named_parameters()
        kept.append({name: param.detach().clone() for name, param in params})
    early, late, early_again = kept
    return differing(early, late) + differing(early_again, late)


@case(stages=(1, 2))
def dropped_while_gathering(stage: int) -> dict[str, list[str]]:
    return {way: _dropped(stage, way) for way in ("in forward", "both")}


@in_stages_1_and_2
@pytest.mark.parametrize("way", ("in forward", "both"))
def test_gathers_under_way_arrive_when_the_optimizer_is_dropped(
    stage: int, way: str
) -> None:
    """The model stays whole, and the next optimizer finds the group at rest."""
    differences = case.done(2)["dropped_while_gathering", stage]
    assert [of_rank[way] for of_rank in differences] == [[], []]
