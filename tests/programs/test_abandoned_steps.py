"""Steps that are abandoned after a reduction, or zeroed in place before the update, on
ranks that use different branches of a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import models
import pytest
from oracle import STAGES, differing, rank, sharded, state_of, whole, world
from registry import cases_of
from torch import Tensor, nn
from torch.nn import functional as F

import zerokern

case = cases_of("programs")

FINE = zerokern.Buckets(bytes=1)
"""A bucket for each parameter: of some, a rank uses nothing."""

USES = (("left", "right"), ("right", "left"))
"""Branches of the fork, by rank."""

Zero = tuple[str, bool]
"""Who zeroes, and whether that sets to None."""

ZEROS: list[Zero] = list(itertools.product(("optimizer", "model"), (True, False)))


def layouts(stage: int) -> tuple[bool, ...]:
    """Return whether buckets are fine: one way and the other. Small units in stage 3
    would be units that only some ranks run."""
    return (False,) if stage == 3 else (False, True)


def built(stage: int, fine: bool) -> tuple[nn.Module, Any]:
    model = models.forked()
    options = {"buckets": FINE} if fine else {}
    return model, sharded(model, stage, **options)


def backward(model: nn.Module, use: str) -> None:
    tokens, targets = (models.share(t, rank(), world()) for t in models.batch(0))
    logits = model(tokens, (0, 1), use)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()


# ------------------------------------------------------------------ an abandoned step


def train(
    stage: int, fine: bool, uses: Sequence[str] | None, zero: Zero
) -> dict[str, Tensor]:
    """Abandon a step that was reduced, and then went on under no_sync. Make another;
    return parameters and state. Without uses there is no abandoned step."""
    model, optimizer = built(stage, fine)
    if uses is not None:
        mine = uses[rank() % 2]
        backward(model, mine)
        with optimizer.no_sync():
            backward(model, mine)

    who, set_to_none = zero
    (model if who == "model" else optimizer).zero_grad(set_to_none=set_to_none)
    backward(model, "both")
    optimizer.step()
    return {**whole(model, optimizer), **state_of(model, optimizer)}


@case
def left_of_abandoned_steps(stage: int) -> dict[tuple[bool, Zero], list[list[str]]]:
    """Return which parameters and states are not as if there had been one step."""
    found = {}
    for fine in layouts(stage):
        wanted = train(stage, fine, None, ZEROS[0])
        for zero in ZEROS:
            found[fine, zero] = [
                differing(train(stage, fine, uses, zero), wanted) for uses in USES
            ]
    return found


ABANDONED = [
    (stage, fine, zero) for stage in STAGES for fine in layouts(stage) for zero in ZEROS
]


@pytest.mark.parametrize("key", ABANDONED, ids=str)
def test_nothing_of_an_abandoned_step_is_left(key: Any) -> None:
    """Nor where a rank's shard holds what only another rank has contributed, whose
    p.grad it does not have."""
    stage, fine, zero = key
    for found in case.done(2)["left_of_abandoned_steps", stage]:
        assert found[fine, zero] == [[], []]


# ------------------------------------------------------------ gradients zeroed in place


def moments_not_zero(stage: int, fine: bool, uses: Sequence[str], who: str) -> Any:
    """Zero in place what was reduced, and step: gradients are zero. Return the names of
    moments that are not."""
    model, optimizer = built(stage, fine)
    backward(model, uses[rank() % 2])
    (model if who == "model" else optimizer).zero_grad(set_to_none=False)
    optimizer.step()
    state = state_of(model, optimizer)
    return [name for name, value in state.items() if "exp_avg" in name and value.any()]


@case
def left_of_zeroed_gradients(stage: int) -> dict[tuple[bool, str], list[Any]]:
    return {
        (fine, who): [moments_not_zero(stage, fine, uses, who) for uses in USES]
        for fine in layouts(stage)
        for who in ("optimizer", "model")
    }


ZEROED = [
    (stage, fine, who)
    for stage in STAGES
    for fine in layouts(stage)
    for who in ("optimizer", "model")
]


@pytest.mark.parametrize("key", ZEROED, ids=str)
def test_what_was_zeroed_in_place_is_zero_at_the_step(key: Any) -> None:
    """On every rank's shard, whoever had used the parameter."""
    stage, fine, who = key
    for found in case.done(2)["left_of_zeroed_gradients", stage]:
        assert found[fine, who] == [[], []]
