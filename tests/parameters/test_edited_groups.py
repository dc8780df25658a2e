"""Param groups that are edited while they are trained: what is refused, on all ranks,
and ranks that edit differently. The loops are in `support/scripts/regrouping.py`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import models
import pytest
from marks import at_worlds, in_stages
from oracle import STAGES, apart, differing, sharded, whole
from pairs import TIMEOUT_S, run_in_pairs
from registry import SMALL, cases_of
from scripts.thawing import freeze, of_part, thaw
from short_runs import everything, loss_of_share
from torch import nn

case = cases_of("parameters")


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": of_part(model, "embedding"), "lr": 3e-2},
        {"params": of_part(model, "blocks"), "lr": 1e-2},
        {"params": of_part(model, "head"), "lr": 1e-3},
    ]


def _built(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    model = models.toy(blocks=2)
    return model, sharded(model, stage, three_groups(model), **options)


def _step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of_share(model, step).backward()
    optimizer.step()


# ---------------------------------------------------------------------------- refused


def _twice_in_two_groups(optimizer: Any) -> None:
    params = optimizer.param_groups[1]["params"]
    optimizer.param_groups[0]["params"].append(params[0])


def _twice_in_one_group(optimizer: Any) -> None:
    params = optimizer.param_groups[1]["params"]
    params.append(params[2])


def _a_group_twice(optimizer: Any) -> None:
    optimizer.param_groups.append(optimizer.param_groups[0])


def _other_states(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["amsgrad"] = True


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "twice in two groups": (_twice_in_two_groups, "in the param groups twice"),
    "twice in one group": (_twice_in_one_group, "in the param groups twice"),
    "a group twice": (_a_group_twice, "in the param groups twice"),
    "other states": (_other_states, "max_exp_avg_sq"),
}


@case
def refused_edits(stage: int) -> dict[str, Any]:
    """Return what is said of each edit, what it has changed, and what differs once it
    was undone."""
    found = {}
    for name, (edit, _) in REFUSED.items():
        (model, optimizer), (twin, plain) = _built(stage), _built(stage)
        for m, o in ((model, optimizer), (twin, plain)):
            _step(m, o, 0)
        before = everything(model, optimizer)
        members = [list(group["params"]) for group in optimizer.param_groups]
        groups = list(optimizer.param_groups)
        edit(optimizer)
        with pytest.raises(ValueError) as error:
            _step(model, optimizer, 1)
        optimizer.param_groups[:] = groups
        for group, params in zip(groups, members, strict=True):
            group["params"], group["amsgrad"] = params, False
        changed = differing(everything(model, optimizer), before)
        for m, o in ((model, optimizer), (twin, plain)):
            _step(m, o, 2)
        after = everything(model, optimizer), everything(twin, plain)
        found[name] = str(error.value), changed, differing(*after)
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", REFUSED)
def test_an_edit_that_no_optimizer_is_built_from_is_refused(
    name: str, stage: int, at: int
) -> None:
    """On all ranks. Nothing was updated, and once it is undone training goes on."""
    for results in case.done(at)["refused_edits", stage]:
        message, changed, differs = results[name]
        assert REFUSED[name][1] in message
        assert "Nothing was updated" in message
        assert changed == []
        assert differs == []


# ------------------------------------------------------------------------ another owner


@case
def taken_over(stage: int) -> tuple[str, dict[str, float], dict[str, float]]:
    """A newer optimizer takes over parameters some of which were added later. Return
    what the older one says, and how the newer one trains."""
    model, twin = models.toy(blocks=2), models.toy(blocks=2)
    freeze(model, "blocks")
    ends = of_part(model, "embedding") + of_part(model, "head")
    older = sharded(model, stage, ends, lr=0.0)
    thaw(model, "blocks")
    older.add_param_group({"params": of_part(model, "blocks"), "lr": 0.0})
    _step(model, older, 0)
    params = None if stage == 3 else of_part(model, "blocks")
    newer = sharded(model, stage, params, lr=1e-2)
    with pytest.raises(RuntimeError) as error:
        older.step()
    plain = sharded(
        twin, stage, None if stage == 3 else of_part(twin, "blocks"), lr=1e-2
    )
    for m, o in ((model, newer), (twin, plain)):
        _step(m, o, 1)
    return str(error.value), apart(whole(model, newer), whole(twin, plain)), {}


@at_worlds
@in_stages
def test_a_newer_optimizer_takes_over_what_was_added(stage: int, at: int) -> None:
    for message, differs, _ in case.done(at)["taken_over", stage]:
        assert "newer optimizer" in message
        assert differs == {}


# ------------------------------------------------------------------------ on one rank


class Outcome(NamedTuple):
    """How a rank of a pair ended."""

    error: str
    seconds: float


def _thaws(model: nn.Module, optimizer: Any) -> None:
    thaw(model, "blocks.1")


def _reverses(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def _takes_out(model: nn.Module, optimizer: Any) -> None:
    del optimizer.param_groups[2]["params"][0]


def _adds(model: nn.Module, optimizer: Any) -> None:
    group = optimizer.param_groups[2]
    param = group["params"].pop()
    optimizer.add_param_group({"params": [param]})


def _thaws_otherwise(model: nn.Module, optimizer: Any) -> None:
    """The other rank thaws, too: another parameter."""
    thaw(model, "blocks.1.norm.bias")


ALONE = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (_thaws, _reverses, _takes_out, _adds, _thaws_otherwise)
}
PARTED = [(name, stage) for name in ALONE for stage in STAGES]


def part(key: tuple[str, int], place: int, group: Any) -> Outcome:
    """Edit on the second rank of a pair, and train on."""
    name, stage = key
    model = models.toy(blocks=2)
    freeze(model, "blocks.1")
    params = three_groups(model)
    optimizer = sharded(model, stage, params, buckets=SMALL, process_group=group)
    models.loss_of(model, *models.batch(0)).backward()
    optimizer.step()
    if place == 1:
        ALONE[name](model, optimizer)
    elif name == "thaws otherwise":
        thaw(model, "blocks.1.norm.weight")
    begun, error = time.perf_counter(), "no error"
    try:
        for step in range(1, 3):
            optimizer.zero_grad()
            models.loss_of(model, *models.batch(step)).backward()
            optimizer.step()
    except (RuntimeError, ValueError) as raised:
        error = str(raised)
    return Outcome(error, time.perf_counter() - begun)


@functools.cache
def parted() -> dict[tuple[str, int], list[Outcome]]:
    return run_in_pairs(PARTED, part)


@pytest.mark.parametrize(("name", "stage"), PARTED)
def test_an_edit_on_one_rank_ends_in_an_error_on_both(name: str, stage: int) -> None:
    """Not in a hang, and never in ranks that train different models."""
    for outcome in parted()[name, stage]:
        assert outcome.error != "no error"
        assert outcome.seconds < 4 * TIMEOUT_S + 2
