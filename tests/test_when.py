"""When things happen does not change what happens: updates in backward, gathers in
forward, and the default agree."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import STAGES, Run, differing, sharded, whole
from test_gradients import SCRIPTS
from torch import nn

import zerokern
from zerokern import Buckets

IN_BACKWARD = [
    *(
        "zero_grad_sets_to_none",
        "zero_grad_in_place",
        "zeroed_after_the_step",
        "model_zero_grad",
    ),
    *(
        "no_sync_but_for_the_last",
        "used_only_under_no_sync",
        "no_sync_around_all_backwards",
    ),
    *(
        "unused_on_all_ranks_is_left_alone",
        "unused_on_one_rank_counts_as_zeros",
        "used_on_one_rank_only",
    ),
    *(
        "a_unit_is_skipped_and_the_order_changes",
        "a_unit_is_used_twice",
        "two_forwards_one_backward",
    ),
    *(
        "checkpoint_reentrant",
        "checkpoint_not_reentrant",
        "checkpoint_reentrant_used_twice",
    ),
    *(
        "checkpoint_with_accumulation",
        "closure",
        "scheduler_lambda",
        "groups_inside_one_bucket",
    ),
    *(
        "a_frozen_parameter_stays",
        "every_gradient_set_by_hand",
        "step_before_any_backward",
        "blocks_called_directly",
    ),
]
"""Scripts that need no gradient after the backward in which it was formed."""
WAYS = {
    "default": Buckets(bytes=6000),
    "in backward": Buckets(bytes=6000, update_in_backward=True),
    "in forward": Buckets(bytes=6000, gather_in_forward=True),
    "both": Buckets(bytes=6000, update_in_backward=True, gather_in_forward=True),
}

STAGES_OF = {"in forward": (1,), "both": (2,)}
"""Gathers of stages 1 and 2 are the same code."""


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


@pytest.fixture(scope="module", params=ranks.worlds(2, rarely=(1, 3)))
def played(request: pytest.FixtureRequest) -> ranks.Cases:
    """Every script in every stage and way, on one group of ranks."""
    cases = {
        (name, stage, way): functools.partial(play, name, stage, request.param, way)
        for stage in STAGES
        for way in WAYS
        for name in scripts(way)
        if stage in STAGES_OF.get(way, STAGES)
    }
    return ranks.run_cases(request.param, cases)


@pytest.mark.parametrize(
    ("name", "stage", "way"),
    [
        (name, stage, way)
        for way in ("in backward", "in forward", "both")
        for name in scripts(way)
        for stage in STAGES_OF.get(way, STAGES)
    ],
)
def test_same_bits(played: ranks.Cases, name: str, stage: int, way: str) -> None:
    """Parameters, moments, counters, and no memory left."""
    for ours, default in zip(
        played[name, stage, way], played[name, stage, "default"], strict=True
    ):
        assert differing(ours["params"], default["params"]) == []
        assert differing(ours["state"], default["state"]) == []
        assert differing(ours["seen"], default["seen"]) == []
        assert not any(ours["buffers"])


# ------------------------------------------------------------------ updates in backward


def updating(stage: int, **options: Any) -> tuple[models.Toy, Any]:
    """Return a model and an optimizer that updates in backward."""
    model = models.toy()
    return model, sharded(model, stage, lr=1e-2, buckets=WAYS["in backward"], **options)


def memory(stage: int) -> list[tuple[int, int, int]]:
    """Return, per step, the peak of scratch memory in backward, gradients after it, and
    the largest bucket."""
    model = models.Toy(blocks=16)
    optimizer = sharded(model, stage, buckets=WAYS["in backward"])
    scratch = optimizer.coordinator.transport
    largest = max(4 * b.numel for b in optimizer.coordinator.layout.buckets)
    assert 4 * sum(p.numel() for p in model.parameters()) > 10 * largest
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        loss = models.loss_of(model, *models.batch(step))
        scratch.peak_bytes = scratch.live_bytes
        loss.backward()
        optimizer.step()
        seen.append((scratch.peak_bytes, optimizer.memory().gradients, largest))
    return seen


def refused(stage: int) -> dict[str, str]:
    """Return what is said to those who come too late, or need all gradients; and that
    training goes on."""
    said = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)

    model, optimizer = updating(stage)
    loss = lambda step: models.loss_of(model, *models.batch(step))  # noqa: E731
    for step in range(2):
        loss(step).backward()
        attempt("clip", lambda: optimizer.clip_grad_norm_(1.0))
        attempt("scale", lambda: optimizer.unscale_(torch.ones(1)))
        attempt("read", lambda: optimizer.full_grad(model.head.bias))
        if step:
            attempt("late", lambda: loss(9).backward())
        optimizer.step()
        optimizer.zero_grad()
    attempt("max_grad_norm", lambda: updating(stage, max_grad_norm=1.0))
    loss(3).backward()
    optimizer.step()
    return said


def dropped(stage: int, way: str) -> list[str]:
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
        kept.append(
            {name: param.detach().clone() for name, param in model.named_parameters()}
        )
    return [*differing(kept[0], kept[1]), *differing(kept[2], kept[1])]


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
@pytest.mark.parametrize("way", ("in forward", "both"))
def test_gathers_under_way_arrive_when_the_optimizer_is_dropped(
    stage: int, way: str
) -> None:
    """The model stays whole, and the next optimizer finds the group at rest."""
    assert ranks.run(2, dropped, stage, way) == [[], []]


def not_finite(stage: int) -> bool:
    """Return whether a gradient that is not finite reaches the weights, as in torch."""
    model, optimizer = updating(stage)
    (models.loss_of(model, *models.batch(0)) * float("inf")).backward()
    optimizer.step()
    return int(optimizer.skipped_steps) == 0 and not all(
        p.isfinite().all() for p in whole(model, optimizer).values()
    )


def interrupted(stage: int) -> list[str]:
    """An exception in a backward; what was updated is updated, and the next steps are
    like those of any other state."""
    model, optimizer = updating(stage)
    for step in range(2):
        models.loss_of(model, *models.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("a user's")

    hook = model.blocks[1].down.weight.register_hook(fail)
    with suppress(KeyError):
        models.loss_of(model, *models.batch(2)).backward()
    hook.remove()
    buffers = optimizer.memory().buffers
    optimizer.zero_grad()
    twin = models.toy()
    other = sharded(twin, stage, lr=1e-2)
    with other.full_params(), torch.no_grad():
        for name, value in whole(model, optimizer).items():
            twin.get_parameter(name).copy_(value)
    other.load_state_dict(optimizer.full_state_dict())
    for net, its in ((model, optimizer), (twin, other)):
        models.loss_of(net, *models.batch(3)).backward()
        its.step()
    return [
        *differing(whole(model, optimizer), whole(twin, other)),
        *(["buffers"] if buffers else []),
    ]


@functools.cache
def updated() -> ranks.Cases:
    """All of these, on two ranks."""
    tests: dict[str, Callable[[int], Any]] = {
        "memory": memory,
        "refused": refused,
        "not finite": not_finite,
        "interrupted": interrupted,
    }
    return ranks.run_cases(
        2, {(n, s): functools.partial(t, s) for n, t in tests.items() for s in STAGES}
    )


in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


@in_stages
def test_gradients_take_the_memory_of_a_few_buckets(stage: int) -> None:
    """Two under way, with as much again of chunks and shards, and one that fills. Stage
    3 has four gathered units besides: the root, the last one, the one in use and the
    next."""
    for result in updated()["memory", stage]:
        for step, (peak, gradients, bucket) in enumerate(result):
            assert gradients == 0
            if step:
                assert peak <= (5 if stage < 3 else 9) * bucket


@in_stages
def test_what_needs_all_gradients_is_refused(stage: int) -> None:
    for said in updated()["refused", stage]:
        assert set(said) == {"clip", "scale", "read", "late", "max_grad_norm"}
        assert "no_sync" in said.pop("late")
        assert all("update_in_backward" in message for message in said.values())


@in_stages
def test_without_the_guard_a_bad_gradient_reaches_the_weights(stage: int) -> None:
    assert updated()["not finite", stage] == [True, True]


@in_stages
def test_after_an_exception_the_next_step_is_right(stage: int) -> None:
    assert updated()["interrupted", stage] == [[], []]


def test_a_graph_that_still_needs_the_old_values_raises_torch_s_own_error() -> None:
    """The weight's gradient is there before a detached use of the weight has its own
    backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.detach() * x).exp().sum() + self.weight.sum()

    model = Net()
    optimizer = zerokern.AdamW(model.parameters(), buckets=WAYS["in backward"])
    model(torch.ones(3)).backward()
    optimizer.step()
    early = torch.ones(3, requires_grad=True)
    product = model.weight.detach() * early
    model.weight.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
