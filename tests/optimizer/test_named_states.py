"""States of named parameters load by name: the order in which two programs list their
parameters does not matter. Without names it is by position, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import at_worlds, in_stages
from oracle import differing, sharded
from registry import cases_of
from torch import Tensor, nn

case = cases_of("optimizer")

Named = list[tuple[str, nn.Parameter]]
Groups = list[dict[str, Any]]


def _in_order(named: Named) -> Groups:
    return [{"params": named}]


def _reversed(named: Named) -> Groups:
    return [{"params": named[::-1]}]


def _sorted_by_size(named: Named) -> Groups:
    return [{"params": sorted(named, key=lambda pair: pair[1].numel())}]


def _decay_first(named: Named) -> Groups:
    return [
        {"params": [pair for pair in named if pair[1].dim() > 1], "weight_decay": 0.3},
        {"params": [pair for pair in named if pair[1].dim() < 2], "weight_decay": 0.0},
    ]


def _decay_last(named: Named) -> Groups:
    groups = _decay_first(named)[::-1]
    groups[0]["params"].reverse()
    return groups


Order = Callable[[Named], Groups]
ORDERS: dict[str, tuple[Order, Order]] = {
    "reversed": (_in_order, _reversed),
    "by size": (_in_order, _sorted_by_size),
    "and back": (_sorted_by_size, _reversed),
    "groups in another order": (_decay_first, _decay_last),
}


def _built(stage: int, order: Order) -> tuple[nn.Module, Any]:
    # Square weights: a state that changes places fits.
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)))
    return model, sharded(model, stage, order(list(model.named_parameters())))


def _by_name(optimizer: Any) -> dict[str, Tensor]:
    """Return the whole state, and the decay, of each parameter."""
    packed = optimizer.full_state_dict()
    found = {}
    for group in packed["param_groups"]:
        for name, key in zip(group["param_names"], group["params"], strict=True):
            found[f"{name}/decay"] = torch.tensor(group["weight_decay"])
            for kind, value in packed["state"][key].items():
                found[f"{name}/{kind}"] = value
    return found


def _train(model: nn.Module, optimizer: Any) -> None:
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 9), step + 1.0)).square().mean().backward()
        optimizer.step()


@case
def states_in_another_order(stage: int) -> dict[str, list[str]]:
    """Return what has changed places, by the two orders."""
    found = {}
    for name, (saving, loading) in ORDERS.items():
        model, saved = _built(stage, saving)
        _train(model, saved)
        _, loaded = _built(stage, loading)
        loaded.load_state_dict(saved.full_state_dict())
        found[name] = differing(_by_name(loaded), _by_name(saved))
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", ORDERS)
def test_nothing_changes_places(name: str, stage: int, at: int) -> None:
    for results in case.done(at)["states_in_another_order", stage]:
        assert results[name] == []


@case
def states_of_other_groups(stage: int) -> dict[str, str]:
    """Return what is said where the same names are grouped otherwise."""
    model, saved = _built(stage, _decay_first)
    _train(model, saved)
    state = saved.full_state_dict()
    _, one = _built(stage, _in_order)
    with pytest.raises(ValueError) as refused:
        one.load_state_dict(state)
    without_names = saved.full_state_dict()
    for group in without_names["param_groups"]:
        del group["param_names"]
    with pytest.raises(ValueError) as by_position:
        one.load_state_dict(without_names)
    return {"by name": str(refused.value), "by position": str(by_position.value)}


@at_worlds
@in_stages
def test_groups_of_other_parameters_are_refused(stage: int, at: int) -> None:
    for results in case.done(at)["states_of_other_groups", stage]:
        assert "build the groups as they were" in results["by name"]
        assert "it is of another model" in results["by position"]


@case
def edited_names(stage: int) -> list[str]:
    """Return what differs after a state of a group that has fewer names than
    parameters, as lists are edited."""
    model, optimizer = _built(stage, _in_order)
    optimizer.param_groups[0]["params"].reverse()
    optimizer.param_groups[0]["param_names"].pop()
    _train(model, optimizer)
    before = optimizer.full_state_dict()
    optimizer.load_state_dict(before)
    after = optimizer.full_state_dict()["state"]
    return [
        f"{index}/{kind}"
        for index, entry in before["state"].items()
        for kind, value in entry.items()
        if not torch.equal(value, after[index][kind])
    ]


@at_worlds
@in_stages
def test_names_that_do_not_fit_any_more_are_not_used(stage: int, at: int) -> None:
    for differs in case.done(at)["edited_names", stage]:
        assert differs == []
