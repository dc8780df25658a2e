"""Loading a state: what it becomes in the optimizer, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from oracle import differing, state_of
from torch import nn
from torch.optim import lr_scheduler
from training import everything, interleaved, step_by_hand, train_by_hand

import zerokern

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
State = dict[str, Any]
in_dtypes = pytest.mark.parametrize("dtype", DTYPES)


# -------------------------------------------------------------- what becomes of a state


def test_loading_copies() -> None:
    """The state that was loaded and ours share no memory."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    train_by_hand(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    before = state_of(model, optimizer)
    for entry in saved["state"].values():
        entry["exp_avg"].fill_(7.0)
    assert differing(state_of(model, optimizer), before) == []


def test_a_state_without_steps_loads() -> None:
    """What torch saves before its first step is an empty state; our next step is the
    first."""
    model = models.toy()
    ours = zerokern.AdamW(model.parameters())
    train_by_hand(model, ours)
    empty = torch.optim.AdamW(copy.deepcopy(model).parameters()).state_dict()
    ours.load_state_dict(empty)
    assert all(not value.any() for value in state_of(model, ours).values())


@in_dtypes
def test_loading_its_own_state_is_a_no_op(dtype: str) -> None:
    """What accelerate does at once, before and after steps."""
    model = models.toy().to(DTYPES[dtype])
    twin = models.toy().to(DTYPES[dtype])
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-2)
    untouched = zerokern.AdamW(twin.parameters(), lr=1e-2)
    for steps in (range(2), range(2, 4)):
        optimizer.load_state_dict(optimizer.state_dict())
        train_by_hand(model, optimizer, steps)
        train_by_hand(twin, untouched, steps)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert differing(everything(model, optimizer), everything(twin, untouched)) == []


def test_moments_of_a_bf16_model_keep_their_precision() -> None:
    """torch's own loader would round them to bf16."""
    model = models.toy().bfloat16()
    optimizer = zerokern.AdamW(model.parameters())
    train_by_hand(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh_model = models.toy().bfloat16()
    fresh_model.load_state_dict(model.state_dict())
    fresh = zerokern.AdamW(fresh_model.parameters())
    fresh.load_state_dict(saved)
    state = state_of(fresh_model, fresh)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert differing(state, state_of(model, optimizer)) == []


# ---------------------------------------------------- what is refused, and what is kept


def loadable() -> tuple[nn.Module, Any]:
    """Return a trained optimizer."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-2)
    train_by_hand(model, optimizer)
    return model, optimizer


def _other_shape(saved: State) -> None:
    first = saved["state"][0]
    first["exp_avg"] = first["exp_avg"].t().contiguous()


def _other_shape_of_second_moment(saved: State) -> None:
    saved["state"][3]["exp_avg_sq"] = torch.zeros(3)


def _one_parameter_less(saved: State) -> None:
    saved["param_groups"][0]["params"].pop()


def _one_group_more(saved: State) -> None:
    saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))


def _of_sgd(saved: State) -> None:
    for entry in saved["state"].values():
        entry.clear()
        entry["momentum_buffer"] = torch.zeros(1)


def _moment_missing(saved: State) -> None:
    del saved["state"][2]["exp_avg_sq"]


def _shard(saved: State) -> None:
    for entry in saved["state"].values():
        entry["range"] = (0, 3)


WRONG = [
    _other_shape,
    _other_shape_of_second_moment,
    _one_parameter_less,
    _one_group_more,
    _of_sgd,
    _moment_missing,
    _shard,
]


@pytest.mark.parametrize("spoil", WRONG, ids=lambda f: f.__name__.strip("_"))
def test_the_state_of_another_model_is_refused_and_nothing_changes(
    spoil: Callable[[State], None],
) -> None:
    model, optimizer = loadable()
    saved = copy.deepcopy(optimizer.state_dict())
    train_by_hand(model, optimizer, range(3, 4))
    before = everything(model, optimizer)
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    saved["param_groups"][0]["lr"] = 77.0
    spoil(saved)
    with pytest.raises(ValueError, match=r"state"):
        optimizer.load_state_dict(saved)
    assert differing(everything(model, optimizer), before) == []
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(
    "saved",
    [{}, {"state": {}}, {"param_groups": []}],
    ids=["empty", "no groups", "no state"],
)
def test_what_is_no_state_dict_is_refused(saved: State) -> None:
    _, optimizer = loadable()
    with pytest.raises((ValueError, KeyError)):
        optimizer.load_state_dict(saved)


def test_options_come_from_the_state_and_groups_keep_their_identity() -> None:
    """The scheduler's list of groups stays the optimizer's."""
    model, optimizer = loadable()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(lr=0.25, betas=(0.5, 0.6))
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups is scheduler.optimizer.param_groups
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["betas"]) == (0.25, (0.5, 0.6))
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_a_scheduler_goes_on_after_loading() -> None:
    results = []
    for optimizer_class in (zerokern.AdamW, torch.optim.AdamW):
        model = models.toy()
        optimizer = optimizer_class(interleaved(model), lr=1e-2)
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.1, 0.2], total_steps=10
        )
        for steps in (range(2), range(2, 4)):
            for step in steps:
                step_by_hand(model, optimizer, step)
                scheduler.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        groups = optimizer.param_groups
        results.append([(group["lr"], group["betas"]) for group in groups])
    assert results[0] == results[1]


def test_a_frozen_parameter_of_a_later_run_loses_its_state_only() -> None:
    """Trained then, frozen now."""
    model, optimizer = loadable()
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    other.embedding.weight.requires_grad_(False)
    fresh = zerokern.AdamW(other.parameters())
    fresh.load_state_dict(saved)
    state = state_of(model, optimizer)
    expected = {k: v for k, v in state.items() if not k.startswith("embedding")}
    assert differing(state_of(other, fresh), expected) == []
