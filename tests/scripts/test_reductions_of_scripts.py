"""How often gradients are reduced: each bucket once a step, whatever else a script asks
of autograd, and whichever outputs a model returns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import ranks
from marks import in_stages, in_stages_1_and_2
from scripts import SCRIPTS, attacks, features

at_several = pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))
STEPS = 3
UNITS = 4
"""The root and three units, each of one bucket."""


def reductions(result: Any, step: int) -> Counter[str]:
    """Return how often each bucket, or unit of stage 3, was reduced in a step."""
    return Counter(
        call.unit
        for call in result["log"]
        if call.op == "reduce_scatter" and call.step == step
    )


@at_several
@pytest.mark.parametrize("name", [*features.NAMES, *attacks.NAMES])
def test_each_unit_is_reduced_once_a_step(name: str, at: int) -> None:
    for result in SCRIPTS.played(name, 3, at):
        for step in range(STEPS):
            assert list(reductions(result, step).values()) == [1] * UNITS


@at_several
@in_stages_1_and_2
@pytest.mark.parametrize("name", [*features.NAMES, *attacks.NAMES])
def test_each_bucket_is_reduced_once_a_step(
    name: str,
    stage: int,
    at: int,
) -> None:
    for result in SCRIPTS.played(name, stage, at):
        for step in range(STEPS):
            assert set(reductions(result, step).values()) == {1}


@at_several
@in_stages
@pytest.mark.parametrize(
    "name",
    [
        "a_probe_before_backward",
        "a_probe_between_backward_and_step",
        "penalty_of_parameter_gradients",
        "backward, all",
    ],
)
def test_gradients_of_parameters_cost_no_reduction(
    name: str, stage: int, at: int
) -> None:
    """Those that `autograd.grad` returns are one rank's own."""
    for result in SCRIPTS.played(name, stage, at):
        for step in range(STEPS):
            assert set(reductions(result, step).values()) == {1}
