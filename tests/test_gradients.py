"""Gradients mean what they mean in torch: a script runs on torch's AdamW and on every
stage and world; all agree."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from oracle import STAGES, Run, apart
from torch.optim import lr_scheduler

import zerokern

Script = Callable[[Run], None]
SCRIPTS: dict[str, tuple[Script, dict[str, Any]]] = {}


def script(**options: Any) -> Callable[[Script], Script]:
    """Register a script; options go to the optimizer."""

    def register(function: Script) -> Script:
        SCRIPTS[function.__name__] = function, options
        return function

    return register


# ---------------------------------------------------------------------- zeroing (F15)


@script()
def zero_grad_sets_to_none(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=True)
        run.backward(step)
        run.step()


@script()
def zero_grad_in_place(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(step)
        run.step()


@script()
def zeroed_after_the_step(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.step()
        run.optimizer.zero_grad()


@script()
def model_zero_grad(run: Run) -> None:
    for step in range(3):
        run.model.zero_grad()
        run.backward(step)
        run.step()


@script()
def never_zeroed_accumulates(run: Run) -> None:
    for step in range(4):
        run.backward(step)
        run.step()


@script()
def zeroed_in_place_and_stepped_decays_only(run: Run) -> None:
    """In torch a gradient of zero is a gradient: moments decay, the step counts."""
    run.backward(0)
    run.step()
    run.optimizer.zero_grad(set_to_none=False)
    run.step()
    run.backward(1)
    run.step()


@script()
def zeroed_to_none_and_stepped_does_nothing(run: Run) -> None:
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    run.step()
    run.backward(1)
    run.step()


@script()
def zeroed_between_backward_and_step(run: Run) -> None:
    run.backward(0)
    run.optimizer.zero_grad()
    run.backward(1)
    run.step()
    run.backward(2)
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(3)
    run.step()


@script()
def zeroed_in_place_after_a_backward_that_added_to_a_reduced_gradient(run: Run) -> None:
    run.backward(0)
    run.step()
    with run.no_sync():
        run.backward(1)
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(2)
    run.step()


@script()
def one_parameter_zeroed_by_hand(run: Run) -> None:
    """Never zeroed, but for one parameter: its gradient alone starts afresh."""
    for step in range(3):
        run.backward(step)
        run.step()
        run.model.head.bias.grad.zero_()


# -------------------------------------------------------- clipping, then something else


@script()
def clipped_then_dropped(run: Run) -> None:
    """A step that the user leaves out after a look at the norm, and one without
    clipping after it."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.1)
        if step == 1:
            run.optimizer.zero_grad()
            run.backward(7)
        run.step()


# ---------------------------------------------------------------------- p.grad by hand


def _hand(shape: torch.Size, step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(100 * step + rank)
    )


@script()
def every_gradient_set_by_hand(run: Run) -> None:
    for step in range(3):
        for name, param in run.model.named_parameters():
            run.set_gradient(
                name,
                lambda rank, shape=param.shape, step=step: _hand(shape, step, rank),
            )
        run.step()


@script()
def one_gradient_replaced_after_backward(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.set_gradient(
            "head.bias",
            lambda rank, step=step: _hand(run.model.head.bias.shape, step, rank),
        )
        run.step()


@script()
def one_gradient_dropped_before_the_step(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        if step == 1:
            run.model.blocks[0].up.weight.grad = None
        run.step()


# ------------------------------------------------------------------ steps and backwards


@script()
def step_twice_without_backward(run: Run) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        run.step()


@script()
def step_before_any_backward(run: Run) -> None:
    run.step()
    run.backward(0)
    run.step()


@script()
def several_backwards_accumulate(run: Run) -> None:
    """F1, F8: sum, not the last one, and nothing reduced twice."""
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(3):
            run.backward(10 * step + micro)
        run.step()


@script()
def number_of_backwards_changes(run: Run) -> None:
    """Stage 1 foresees the last backward from the step before; a wrong guess must cost
    traffic only."""
    for step, micros in enumerate((1, 3, 2, 1, 1, 2)):
        run.optimizer.zero_grad()
        for micro in range(micros):
            run.backward(10 * step + micro)
        run.step()


@script()
def no_sync_but_for_the_last(run: Run) -> None:
    """F7: works in every stage."""
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step)
            run.backward(10 * step + 1)
        run.backward(10 * step + 2)
        run.step()


@script()
def no_sync_around_all_backwards(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step)
            run.backward(10 * step + 1)
        run.step()


@script()
def no_sync_after_a_reduced_backward(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(10 * step)
        with run.no_sync():
            run.backward(10 * step + 1)
        run.step()


@script()
def no_sync_never_zeroed(run: Run) -> None:
    for step in range(3):
        with run.no_sync():
            run.backward(10 * step)
        run.backward(10 * step + 1)
        run.step()


@script()
def used_only_under_no_sync(run: Run) -> None:
    """B7: left only in the first micro-batch, right only in the last."""
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step, use="left")
        run.backward(10 * step + 1, use="right")
        run.step()


@script()
def backward_by_parts_of_one_graph(run: Run) -> None:
    """Two losses of one forward, two backward calls."""
    for step in range(3):
        run.optimizer.zero_grad()
        for rank in run.each():
            loss = run.loss(step, rank) / (run.ranks if run.torch else 1)
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        run.step()


# ---------------------------------------------------------------------- used and unused


@script()
def unused_on_all_ranks_is_left_alone(run: Run) -> None:
    for step, use in enumerate(("both", "left", "right", "both")):
        run.optimizer.zero_grad()
        run.backward(step, use=use)
        run.step()


@script()
def unused_on_one_rank_counts_as_zeros(run: Run) -> None:
    """B6: the last rank does not use the right branch."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, step=step: run.loss(
                step, rank, use="left" if rank == 0 else "both"
            ),
        )
        run.step()


@script()
def used_on_one_rank_only(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, step=step: run.loss(
                step, rank, use="both" if rank == run.ranks - 1 else "left"
            ),
        )
        run.step()


def _accumulate_where_one_rank_uses_nothing(run: Run, *, zero: bool) -> None:
    for step in range(3):
        if zero:
            run.optimizer.zero_grad()
        run.backward(
            10 * step,
            lambda rank, step=step: run.loss(
                10 * step, rank, use="none" if rank else "both"
            ),
        )
        run.backward(
            10 * step + 1,
            lambda rank, step=step: run.loss(
                10 * step + 1, rank, use="both" if rank else "none"
            ),
        )
        run.step()


@script(buckets=zerokern.Buckets(bytes=1))
def a_bucket_is_unused_on_one_rank_in_each_of_two_backwards(run: Run) -> None:
    """B7's kind: such a rank has no p.grad that could tell whether the others'
    contributions are still wanted."""
    _accumulate_where_one_rank_uses_nothing(run, zero=True)


@script(buckets=zerokern.Buckets(bytes=1))
def a_bucket_is_unused_on_one_rank_and_never_zeroed(run: Run) -> None:
    _accumulate_where_one_rank_uses_nothing(run, zero=False)


@script()
def a_unit_is_skipped_and_the_order_changes(run: Run) -> None:
    """B17, B18: the order of the last iteration is a hint only."""
    for step, order in enumerate(((0, 1), (1,), (1, 0), (), (0, 1))):
        run.optimizer.zero_grad()
        run.backward(step, order=order)
        run.step()


@script()
def a_unit_is_used_twice(run: Run) -> None:
    """B1, A16."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 0, 1, 0))
        run.step()


@script()
def two_forwards_one_backward(run: Run) -> None:
    """B13."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, step=step: (
                run.loss(2 * step, rank) + run.loss(2 * step + 1, rank)
            ),
        )
        run.step()


@script(groups=lambda model: [p for p in model.parameters() if p.requires_grad])
def a_frozen_parameter_stays(run: Run) -> None:
    run.model.blocks[0].up.weight.requires_grad_(False)
    before = run.model.blocks[0].up.bias.shape
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    assert run.model.blocks[0].up.bias.shape == before


@script()
def blocks_called_directly(run: Run) -> None:
    """B12: a part of the model, outside of the model's forward."""
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    x = torch.linspace(-1, 1, 17)
    run.backward(1, lambda rank: run.model.blocks[1]((rank + 1) * x).square().mean())
    run.step()
    run.optimizer.zero_grad()
    run.backward(2)
    run.step()


# --------------------------------------------------- checkpointing (B15, B20, B24, B25)


def _checkpointed(run: Run, reentrant: bool) -> None:
    run.model.checkpoint = reentrant
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def checkpoint_reentrant(run: Run) -> None:
    _checkpointed(run, True)


@script()
def checkpoint_not_reentrant(run: Run) -> None:
    _checkpointed(run, False)


@script()
def checkpoint_reentrant_used_twice(run: Run) -> None:
    run.model.checkpoint = True
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 1, 0))
        run.step()


@script()
def checkpoint_not_reentrant_used_twice(run: Run) -> None:
    run.model.checkpoint = False
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 1, 0))
        run.step()


@script()
def checkpoint_with_accumulation(run: Run) -> None:
    for step in range(3):
        run.model.checkpoint = step != 1
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(2 * step)
        run.backward(2 * step + 1)
        run.step()


# ---------------------------------------------------------------------- the loop around


@script()
def closure(run: Run) -> None:
    """L2: forward and backward inside of step."""
    for step in range(3):

        def compute(step: int = step) -> torch.Tensor:
            run.optimizer.zero_grad()
            run.backward(step)
            return torch.tensor(float(step))

        run.seen.append(run.optimizer.step(compute))


def _scheduled(
    run: Run, make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    scheduler = make(run.optimizer)
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        scheduler.step()
    run.seen.append(torch.tensor(run.optimizer.param_groups[0]["lr"]))


@script()
def scheduler_lambda(run: Run) -> None:
    _scheduled(
        run,
        lambda optimizer: lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (step + 1)
        ),
    )


@script()
def scheduler_one_cycle_moves_betas(run: Run) -> None:
    _scheduled(
        run,
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=6
        ),
    )


@script()
def scheduler_cosine(run: Run) -> None:
    _scheduled(
        run, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    )


@script()
def evaluation_between_steps(run: Run) -> None:
    """A14, C8."""
    run.evaluate(50)
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.evaluate(51)
        run.step()
        run.evaluate(52)


@script()
def evaluation_between_backwards(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(2 * step)
        run.evaluate(51)
        run.backward(2 * step + 1)
        run.step()


class Boom(Exception):
    """Raised by a user's code."""


def _raise(*_: Any) -> None:
    raise Boom


def _failing(run: Run, install: Callable[[], Any]) -> None:
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    handle = install()
    with pytest.raises(Boom):
        run.backward(1)
    handle.remove()
    run.optimizer.zero_grad()
    for step in range(2, 5):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def exception_in_forward(run: Run) -> None:
    """B29: the next step works, nothing needs resetting by hand."""
    _failing(run, lambda: run.model.blocks[1].down.register_forward_hook(_raise))


@script()
def exception_in_backward(run: Run) -> None:
    _failing(run, lambda: run.model.blocks[1].up.register_full_backward_hook(_raise))


@script()
def exception_in_recomputation(run: Run) -> None:
    run.model.checkpoint = False
    calls = []

    def second_time(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Boom

    _failing(run, lambda: run.model.blocks[0].up.register_forward_hook(second_time))


@script()
def exception_in_reentrant_recomputation(run: Run) -> None:
    run.model.checkpoint = True
    calls = []

    def second_time(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Boom

    _failing(run, lambda: run.model.blocks[0].up.register_forward_hook(second_time))


# ---------------------------------------------------------------- not finite (E13, E17)


def _with_bad_gradient(run: Run, value: float) -> None:
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    if not run.torch:
        run.backward(
            1,
            lambda rank: run.loss(1, rank) * (value if rank == run.ranks - 1 else 1.0),
        )
        run.step()
    for step in range(2, 4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def infinite_on_one_rank_skips_all(run: Run) -> None:
    _with_bad_gradient(run, math.inf)


@script()
def nan_on_one_rank_skips_all(run: Run) -> None:
    _with_bad_gradient(run, math.nan)


@script(max_grad_norm=0.5)
def nan_on_one_rank_skips_all_with_clipping(run: Run) -> None:
    _with_bad_gradient(run, math.nan)


# ---------------------------------------------------------------- clipping (E5, E8, E9)


@script(max_grad_norm=0.3)
def max_grad_norm(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def clip_grad_norm(run: Run) -> None:
    for step, bound in enumerate((0.3, 100.0, 0.1)):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(bound)
        run.step()


@script()
def clip_once_does_not_last(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        if step == 0:
            run.clip(0.1)
        run.step()


@script()
def clip_with_accumulation_and_an_unused_branch(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step, use="left")
        run.backward(10 * step + 1, use="left")
        run.clip(0.2)
        run.step()


@script(
    groups=lambda model: [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": 0.3,
            "betas": (0.8, 0.95),
        },
        {
            "params": [p for p in model.parameters() if p.dim() < 2],
            "weight_decay": 0.0,
            "lr": 3e-2,
            "eps": 1e-5,
        },
    ]
)
def groups_inside_one_bucket(run: Run) -> None:
    """D12, D14."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


# ---------------------------------------------------------------------- the tests

SMALL = zerokern.Buckets(bytes=6000)


def play(name: str, stage: int | None, world: int) -> dict[str, Any]:
    """Run one script."""
    function, options = SCRIPTS[name]
    torch.manual_seed(0)
    run = Run(stage, world, **{"buckets": SMALL, **options})
    function(run)
    return run.result()


@functools.cache
def reference(name: str, world: int) -> dict[str, Any]:
    """Return what torch's AdamW on one process makes of a script."""
    return play(name, None, world)


@pytest.fixture(scope="module", params=ranks.worlds(1, 3, rarely=2))
def played(request: pytest.FixtureRequest) -> tuple[int, ranks.Cases]:
    """All scripts in all stages, on one group of ranks."""
    world = request.param
    cases = {
        (name, stage): functools.partial(play, name, stage, world)
        for name in SCRIPTS
        for stage in STAGES
    }
    return world, ranks.run_cases(world, cases)


@pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
@pytest.mark.parametrize("name", SCRIPTS)
def test_agrees_with_torch(
    played: tuple[int, ranks.Cases], name: str, stage: int
) -> None:
    """Parameters, moments, step counters and whatever the script observed, on every
    rank."""
    world, cases = played
    expected = reference(name, world)
    for result in cases[name, stage]:
        assert apart(result["params"], expected["params"]) == {}
        ours = {
            key: value
            for key, value in result["state"].items()
            if key in expected["state"] or value.any()
        }
        # Squares double a relative difference.
        assert apart(ours, expected["state"], limit=1e-4) == {}
        assert apart(result["seen"], expected["seen"]) == {}


@pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
@pytest.mark.parametrize("name", SCRIPTS)
def test_leaves_no_scratch_memory(
    played: tuple[int, ranks.Cases], name: str, stage: int
) -> None:
    """Nothing gathered and no bucket stays, after each step and each evaluation (C1,
    C8)."""
    _, cases = played
    assert [
        result["buffers"] for result in cases[name, stage] if any(result["buffers"])
    ] == []


@pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if "_skips_all" in name])
def test_a_skipped_step_is_counted_on_every_rank(
    played: tuple[int, ranks.Cases], name: str, stage: int
) -> None:
    _, cases = played
    assert {result["skipped"] for result in cases[name, stage]} == {1}


@pytest.mark.parametrize(
    "name",
    ["zero_grad_sets_to_none", "checkpoint_reentrant", "checkpoint_not_reentrant"],
)
def test_stage3_gathers_each_unit_twice_per_step(
    played: tuple[int, ranks.Cases], name: str
) -> None:
    """B25: once for the forward, once for the backward; a checkpoint's recomputation
    shares the latter's."""
    world, cases = played
    for result in cases[name, 3]:
        gathers = Counter(
            call.unit
            for call in result["log"]
            if call.op == "all_gather" and call.step == 2 and call.phase != "step"
        )
        by_training = {unit: count for unit, count in gathers.items() if count}
        units = {"blocks.0", "blocks.1", "blocks.2", "root"} if world > 1 else set()
        assert by_training == dict.fromkeys(units, 2)


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
def test_checkpointing_adds_no_gathers(
    played: tuple[int, ranks.Cases], stage: int
) -> None:
    """B26."""
    _, cases = played
    for plain, checkpointed in zip(
        cases["zero_grad_sets_to_none", stage],
        cases["checkpoint_reentrant", stage],
        strict=True,
    ):
        assert [call[:6] for call in plain["log"]] == [
            call[:6] for call in checkpointed["log"]
        ]


@pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_log_the_same_collectives(
    played: tuple[int, ranks.Cases], name: str, stage: int
) -> None:
    """B27: one global order, also when the ranks' graphs differ."""
    _, cases = played
    first, *others = (
        [call[:4] for call in result["log"]] for result in cases[name, stage]
    )
    assert [other for other in others if other != first] == []
