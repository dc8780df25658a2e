"""A state that checkpoint libraries ask for before the first step leaves that step the
first."""

from __future__ import annotations

import copy
import warnings

import pytest
from marks import at_odd_worlds, in_stages
from oracle import Run, apart, differing, quiet_state_dict, world
from registry import cases_of
from short_runs import short
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from training import everything

case = cases_of("gradients")


def _materialised(how: str, run: Run) -> None:
    """Do what checkpoint libraries do to have a state before the first step."""
    if how == "state_dict":
        run.optimizer.load_state_dict(copy.deepcopy(quiet_state_dict(run.optimizer)))
    elif how == "full_state_dict":
        run.optimizer.load_state_dict(run.optimizer.full_state_dict())
    elif how == "step without gradients":
        run.optimizer.step()
        run.optimizer.zero_grad()
    elif how == "torch's distributed checkpoint":
        run.optimizer.consolidate_state_dict(0)
        get_optimizer_state_dict(run.model, run.optimizer)


HOW = (
    "nothing",
    "state_dict",
    "full_state_dict",
    "step without gradients",
    "torch's distributed checkpoint",
)


def _first_steps(stage: int | None, of: int, how: str) -> dict[str, Tensor]:
    run = short(stage, of)
    if stage is not None:
        _materialised(how, run)
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    return everything(run.model, run.optimizer)


@case
def first_steps(stage: int) -> dict[str, dict[str, Tensor]]:
    with warnings.catch_warnings():
        a_shard = r".*state_dict\(\) holds this rank's shards only"
        warnings.filterwarnings("ignore", message=a_shard)
        return {how: _first_steps(stage, world(), how) for how in HOW}


@at_odd_worlds
@in_stages
@pytest.mark.parametrize("how", HOW)
def test_a_state_that_was_asked_for_leaves_the_first_step_the_first(
    how: str, stage: int, at: int
) -> None:
    """A step counter that had moved would make it 1.34 times too small."""
    expected = _first_steps(None, at, "")
    for results in case.done(at)["first_steps", stage]:
        result = results[how]
        counters = [name for name in result if name.endswith("/step")]
        assert {float(result[name]) for name in counters} == {2.0}
        as_in_torch = {name: result[name] for name in expected}
        assert apart(as_in_torch, expected, 1e-4) == {}
        assert differing(result, results["nothing"]) == []
