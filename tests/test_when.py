"""When things happen does not change what happens: updates in backward, gathers in forward, and the default agree."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ranks
import torch
from oracle import STAGES, Run, differing
from test_gradients import SCRIPTS

from zerokern import Buckets

WORLDS = (1, 2, 3)
IN_BACKWARD = [
    *("zero_grad_sets_to_none", "zero_grad_in_place", "zeroed_after_the_step", "model_zero_grad"),
    *("no_sync_but_for_the_last", "used_only_under_no_sync", "no_sync_around_all_backwards"),
    *("unused_on_all_ranks_is_left_alone", "unused_on_one_rank_counts_as_zeros", "used_on_one_rank_only"),
    *("a_unit_is_skipped_and_the_order_changes", "a_unit_is_used_twice", "two_forwards_one_backward"),
    *("checkpoint_reentrant", "checkpoint_not_reentrant", "checkpoint_reentrant_used_twice"),
    *("checkpoint_with_accumulation", "closure", "scheduler_lambda", "groups_inside_one_bucket"),
    *("a_frozen_parameter_stays", "every_gradient_set_by_hand", "step_before_any_backward", "blocks_called_directly"),
]  # fmt: skip
"""Scripts that need no gradient after the backward in which it was formed."""
WAYS = {
    "default": Buckets(bytes=6000),
    "in backward": Buckets(bytes=6000, update_in_backward=True),
    "in forward": Buckets(bytes=6000, gather_in_forward=True),
    "both": Buckets(bytes=6000, update_in_backward=True, gather_in_forward=True),
}


def play(name: str, stage: int, world: int, way: str) -> dict[str, Any]:
    """Run one script."""
    function, options = SCRIPTS[name]
    torch.manual_seed(0)
    run = Run(stage, world, **{**options, "buckets": WAYS[way]})
    function(run)
    return run.result()


def scripts(way: str) -> list[str]:
    """Return the scripts that make sense."""
    return IN_BACKWARD if way in ("in backward", "both") else list(SCRIPTS)


@pytest.fixture(scope="module", params=WORLDS, ids="world{}".format)
def played(request: pytest.FixtureRequest) -> ranks.Cases:
    """Every script in every stage and way, on one group of ranks."""
    cases = {
        (name, stage, way): functools.partial(play, name, stage, request.param, way)
        for stage in STAGES
        for way in WAYS
        for name in scripts(way)
        if way in ("default", "in backward") or stage != 3
    }
    return ranks.run_cases(request.param, cases)


@pytest.mark.parametrize(
    ("name", "stage", "way"),
    [
        (name, stage, way)
        for way in ("in backward", "in forward", "both")
        for name in scripts(way)
        for stage in STAGES
        if way == "in backward" or stage != 3
    ],
)
def test_same_bits(played: ranks.Cases, name: str, stage: int, way: str) -> None:
    """Parameters, moments, counters, and no memory left."""
    for ours, default in zip(played[name, stage, way], played[name, stage, "default"], strict=True):
        assert differing(ours["params"], default["params"]) == []
        assert differing(ours["state"], default["state"]) == []
        assert differing(ours["seen"], default["seen"]) == []
        assert not any(ours["buffers"])
