"""Beside FSDP2, live: the same scripts on the same ranks where it runs, where it ends
elsewhere, and where it ends the process.

What is said of FSDP2 is asserted, so that a torch that mends one of these makes its
test fail and say so. Most of it is documented there as what a user must not do, or must
call.
"""

from __future__ import annotations

import faulthandler
import functools
from collections.abc import Callable, Iterable
from typing import Any

import models
import pytest
import ranks
import torch
from fsdp2 import MODES, Fsdp2, Watched, shard_units
from oracle import REDUCED_SUMS, Run, apart, rank, sharded, world
from registry import Script
from scripts import SCRIPTS
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

# A module returned a view.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
WORLD = 2

in_modes = pytest.mark.parametrize("stage", MODES, ids="stage{}".format)


def a_branch_each(run: Run) -> None:
    """Ranks use different branches, of one size."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda of_rank, step=step: run.loss(
                step, of_rank, use=("left", "right")[of_rank]
            ),
        )
        run.step()


def script_of(name: str) -> Script:
    if name == "a_branch_each":
        return Script(a_branch_each, {}, tuple(MODES), exact=True)
    return SCRIPTS[name]


@functools.cache
def reference(name: str) -> dict[str, Any]:
    """Return what torch's AdamW on one process makes of a script."""
    script = script_of(name)
    torch.manual_seed(0)
    run = Run(None, WORLD, **script.options)
    script.loop(run)
    return run.result()


def play(name: str, stage: int, ours: bool) -> dict[str, Any]:
    """Run a script."""
    script = script_of(name)
    torch.manual_seed(0)
    if ours:
        run: Watched = Watched(stage, world(), **script.options)
    else:
        run = Fsdp2(MODES[stage], **script.options)
    script.loop(run)
    return run.found()


def play_on_both(names: Iterable[str]) -> ranks.Cases:
    """Run scripts on our optimizer and on FSDP2."""
    cases = {
        (name, stage, ours): functools.partial(play, name, stage, ours)
        for name in names
        for stage in MODES
        for ours in (True, False)
    }
    return ranks.run_cases(WORLD, cases)


# --------------------------------------------------------------------- where FSDP2 runs

SOME = (
    "zero_grad_sets_to_none",
    "never_zeroed_accumulates",
    "several_backwards_accumulate",
    "no_sync_but_for_the_last",
    "used_only_under_no_sync",
    "unused_on_all_ranks_is_left_alone",
    "a_unit_is_skipped_and_the_order_changes",
    "a_unit_is_used_twice",
    "two_forwards_one_backward",
    "a_frozen_parameter_stays",
    "checkpoint_with_accumulation",
    "evaluation_between_backwards",
    "clip_grad_norm",
    "groups_inside_one_bucket",
)
REST = (
    "zero_grad_in_place",
    "zeroed_after_the_step",
    "model_zero_grad",
    "zeroed_in_place_and_stepped_decays_only",
    "zeroed_to_none_and_stepped_does_nothing",
    "zeroed_between_backward_and_step",
    "one_parameter_zeroed_by_hand",
    "clipped_then_dropped",
    "one_gradient_dropped_before_the_step",
    "step_twice_without_backward",
    "step_before_any_backward",
    "number_of_backwards_changes",
    "no_sync_never_zeroed",
    "backward_by_parts_of_one_graph",
    "blocks_called_directly",
    "checkpoint_reentrant",
    "checkpoint_not_reentrant",
    "checkpoint_not_reentrant_used_twice",
    "closure",
    "scheduler_lambda",
    "scheduler_one_cycle_moves_betas",
    "scheduler_cosine",
    "exception_in_forward",
    "max_grad_norm",
    "clip_once_does_not_last",
    "clip_with_accumulation_and_an_unused_branch",
)


@functools.cache
def live(names: tuple[str, ...]) -> ranks.Cases:
    """Run scripts on both, once."""
    return play_on_both(names)


@in_modes
@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.long) for name in REST)]
)
def test_trains_as_fsdp2_does(name: str, stage: int) -> None:
    """Losses, norms and parameters agree on every rank."""
    cases = live(SOME if name in SOME else REST)
    for ours, theirs in zip(
        cases[name, stage, True], cases[name, stage, False], strict=True
    ):
        assert ours["losses"]["all"].numel() > 1 or name == "step_before_any_backward"
        for part in ("losses", "seen", "params"):
            assert apart(ours[part], theirs[part]) == {}, part


def in_bf16(ours: bool) -> tuple[nn.Module, Any]:
    """Return a model with fp32 masters, and its optimizer."""
    model = models.toy(blocks=2).bfloat16()
    if ours:
        return model, sharded(model, 3, lr=1e-2)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    shard_units(model.float(), model.blocks, mp_policy=precision)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses_in_bf16(ours: bool) -> torch.Tensor:
    """Return the losses of some steps."""
    model, optimizer = in_bf16(ours)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        mine = (models.share(t, rank(), world()) for t in models.batch(step))
        loss = models.loss_of(model, *mine)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_bf16_with_fp32_masters_trains_as_fsdp2s_mixed_precision() -> None:
    """The same arithmetic: bf16 gradients, summed in fp32. A last bit of an update may
    still turn a bf16 weight."""
    cases = ranks.run_cases(
        WORLD,
        {ours: functools.partial(losses_in_bf16, ours) for ours in (True, False)},
    )
    for ours, theirs in zip(cases[True], cases[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


# ---------------------------------------------------------- where its result is another

UNREDUCED = (
    "what no_sync left unreduced is not reduced at the step, which then does nothing or"
    " too little"
)
NOT_RESET = "after an exception in backward the caller must call reset_iter_state"
WRONG_IN_BOTH = {
    "a_branch_each": "one branch's gradients are added to the other's, being as many",
    "no_sync_around_all_backwards": UNREDUCED,
    "no_sync_after_a_reduced_backward": UNREDUCED,
    "zeroed_in_place_after_a_backward_that_added_to_a_reduced_gradient": (
        "zero_grad does not reach them"
    ),
    "checkpoint_reentrant_used_twice": (
        "the second recomputation is not told of by a hook"
    ),
    "exception_in_backward": NOT_RESET,
    "exception_in_recomputation": NOT_RESET,
    "exception_in_reentrant_recomputation": NOT_RESET,
}
WRONG = {(name, stage): why for name, why in WRONG_IN_BOTH.items() for stage in MODES}
"""Script and stage, and why FSDP2 silently ends elsewhere."""
WRONG["evaluation_between_steps", 2] = (
    "weights that a forward without backward left whole are not those of the update"
)


@functools.cache
def elsewhere() -> ranks.Cases:
    """Run those scripts on both, once."""
    return play_on_both(dict.fromkeys(name for name, _ in WRONG))


@pytest.mark.parametrize("key", WRONG, ids=lambda key: f"{key[0]}-stage{key[1]}")
def test_agrees_with_torch_where_fsdp2_does_not(key: tuple[str, int]) -> None:
    """FSDP2's parameters are not those of one process, and it does not say so."""
    expected = reference(key[0])
    for ours, theirs in zip(
        elsewhere()[(*key, True)], elsewhere()[(*key, False)], strict=True
    ):
        assert apart(ours["params"], expected["params"]) == {}
        assert apart(theirs["params"], expected["params"], 100 * REDUCED_SUMS) != {}, (
            f"FSDP2 agrees now: {WRONG[key]}"
        )


# ------------------------------------------------------------ where it ends the process

ABORTS = ("unused_on_one_rank_counts_as_zeros", "used_on_one_rank_only")


def play_and_abort(name: str, stage: int) -> None:
    faulthandler.disable()  # the stacks of an expected abort help nobody
    play(name, stage, False)


def play_when_told(name: str, stage: int) -> dict[str, Any]:
    """Run a script on an FSDP2 that was told that ranks leave parameters out."""
    torch.manual_seed(0)
    run = Fsdp2(MODES[stage])
    run.model.set_reduce_scatter_unused_params(True)
    SCRIPTS[name].loop(run)
    return run.found()


@functools.cache
def when_ranks_differ() -> ranks.Cases:
    """Run those scripts on ours, and on an FSDP2 that was told."""
    cases: dict[Any, Callable[[], Any]] = {}
    for name in ABORTS:
        for stage in MODES:
            cases[name, stage, True] = functools.partial(play, name, stage, True)
            cases[name, stage, False] = functools.partial(play_when_told, name, stage)
    return ranks.run_cases(WORLD, cases)


@in_modes
@pytest.mark.parametrize("name", ABORTS)
def test_a_parameter_that_one_rank_leaves_out_is_zeros_and_fsdp2_aborts(
    name: str, stage: int
) -> None:
    """The sizes of its reduce-scatter differ, which gloo ends the process for, unless
    it was told of them."""
    with pytest.raises(ranks.RankError, match=r"exit code -6|gloo"):
        ranks.run(WORLD, play_and_abort, name, stage)
    expected = reference(name)
    cases = when_ranks_differ()
    for ours, told in zip(
        cases[name, stage, True], cases[name, stage, False], strict=True
    ):
        assert apart(ours["params"], expected["params"]) == {}
        assert apart(told["params"], expected["params"]) == {}
