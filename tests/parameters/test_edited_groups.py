"""Param groups that are edited while they are trained: what is refused, on all ranks,
and ranks that edit differently. The loops are in `support/scripts/regrouping.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
from marks import at_worlds, in_stages
from oracle import differing, rank, sharded, whole
from pairs import TIMEOUT_S
from registry import SMALL, cases_of
from scripts.thawing import freeze, of_part, thaw
from short_runs import loss_of_share
from torch import nn
from training import everything
from wire import short_group

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
    "other states": (_other_states, "amsgrad"),
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


# ------------------------------------------------------------------------ on one rank


def _thaws(model: nn.Module, optimizer: Any) -> None:
    thaw(model, "blocks.1")


def _reverses(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def _takes_out(model: nn.Module, optimizer: Any) -> None:
    del optimizer.param_groups[2]["params"][0]


ALONE = {
    f.__name__.strip("_").replace("_", " "): f for f in (_thaws, _reverses, _takes_out)
}


def part(stage: int, name: str) -> None:
    """Edit on the second rank, and train on."""
    model = models.toy(blocks=2)
    freeze(model, "blocks.1")
    groups = three_groups(model)
    group = short_group(TIMEOUT_S)
    optimizer = sharded(model, stage, groups, buckets=SMALL, process_group=group)
    _step(model, optimizer, 0)
    if rank() == 1:
        ALONE[name](model, optimizer)
    for step in range(1, 3):
        _step(model, optimizer, step)


@in_stages
@pytest.mark.parametrize("name", ALONE)
def test_an_edit_on_one_rank_ends_in_an_error_on_both(name: str, stage: int) -> None:
    """Not in a hang, and never in ranks that train different models."""
    begun = time.perf_counter()
    with pytest.raises(ranks.RankError) as error:
        ranks.run(2, part, stage, name)
    assert time.perf_counter() - begun < 4 * TIMEOUT_S + 2
    assert "rank 0:" in str(error.value)
    assert "rank 1:" in str(error.value)


def _thawed_otherwise(model: nn.Module, optimizer: Any) -> None:
    thaw(model, ("blocks.1.norm.bias", "blocks.1.norm.weight")[rank() % 2])


def _moved_otherwise(model: nn.Module, optimizer: Any) -> None:
    param = optimizer.param_groups[1]["params"].pop(rank())
    optimizer.param_groups[0]["params"].append(param)


def _added_otherwise(model: nn.Module, optimizer: Any) -> None:
    """Groups of other sizes."""
    params = optimizer.param_groups[2]["params"]
    taken = [params.pop() for _ in range(1 + rank() % 2)]
    optimizer.add_param_group({"params": taken})


OTHERWISE = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (_thawed_otherwise, _moved_otherwise, _added_otherwise)
}


@case
def edited_otherwise(stage: int) -> dict[str, tuple[str, list[str]]]:
    """Return what is said of edits that differ by rank, and what they have changed."""
    found = {}
    for name, edit in OTHERWISE.items():
        model = models.toy(blocks=2)
        freeze(model, "blocks.1")
        optimizer = sharded(model, stage, three_groups(model))
        _step(model, optimizer, 0)
        before = whole(model, optimizer)
        optimizer.zero_grad()
        loss_of_share(model, 1).backward()
        message = ""
        try:
            edit(model, optimizer)
            optimizer.step()
        except ValueError as error:
            message = str(error)
        found[name] = message, differing(whole(model, optimizer), before)
    return found


@pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))
@in_stages
@pytest.mark.parametrize("name", OTHERWISE)
def test_edits_that_differ_by_rank_get_one_error_on_all(
    name: str, stage: int, at: int
) -> None:
    """It names the first difference; no weight was changed."""
    for results in case.done(at)["edited_otherwise", stage]:
        message, changed = results[name]
        assert "Rank 1 has" in message
        assert changed == []
