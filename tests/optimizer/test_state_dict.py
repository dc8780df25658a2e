"""The state dict in torch's layout: to torch and back, every bit kept."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import models
import pytest
import torch
from oracle import apart, differing, state_of
from torch import Tensor, nn
from training import everything, interleaved, train_by_hand

import zerokern

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
in_dtypes = pytest.mark.parametrize("dtype", DTYPES)
with_groups = pytest.mark.parametrize(
    "groups",
    [nn.Module.parameters, interleaved],
    ids=["one group", "interleaved groups"],
)


@with_groups
def test_torch_loads_ours_and_goes_on(groups: Any) -> None:
    """Groups that take alternate parameters do not swap states."""
    model = models.toy()
    ours = zerokern.AdamW(groups(model), lr=1e-2)
    train_by_hand(model, ours)
    other = copy.deepcopy(model)
    theirs = torch.optim.AdamW(groups(other), lr=5.0)
    # Torch keeps the tensors that it is given.
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train_by_hand(model, ours, range(3, 5))
    train_by_hand(other, theirs, range(3, 5))
    assert apart(everything(model, ours), everything(other, theirs)) == {}


@with_groups
def test_ours_loads_torch_and_goes_on(groups: Any) -> None:
    model = models.toy()
    theirs = torch.optim.AdamW(groups(model), lr=1e-2)
    train_by_hand(model, theirs)
    other = copy.deepcopy(model)
    ours = zerokern.AdamW(groups(other), lr=5.0)
    ours.load_state_dict(theirs.state_dict())
    train_by_hand(model, theirs, range(3, 5))
    train_by_hand(other, ours, range(3, 5))
    assert apart(everything(other, ours), everything(model, theirs)) == {}


def test_a_round_trip_through_torch_keeps_every_bit() -> None:
    model = models.toy()
    ours = zerokern.AdamW(model.parameters())
    train_by_hand(model, ours)
    before = state_of(model, ours)
    theirs = torch.optim.AdamW(copy.deepcopy(model).parameters())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert differing(state_of(model, ours), before) == []


def described(entry: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in entry.items()}


def test_the_layout_is_that_of_torch() -> None:
    """Keys, shapes, dtypes and groups, but for options torch does not know."""
    model = models.toy()
    ours = zerokern.AdamW(model.parameters())
    theirs = torch.optim.AdamW(copy.deepcopy(model).parameters())
    train_by_hand(model, ours)
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    theirs.step()
    mine, its = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == its.keys()
    assert mine["state"].keys() == its["state"].keys()
    for key, entry in its["state"].items():
        assert described(mine["state"][key]) == described(entry)
    ours, theirs = mine["param_groups"][0], its["param_groups"][0]
    assert ours["params"] == theirs["params"]
    assert ours.keys() == theirs.keys()


@in_dtypes
def test_state_exists_before_the_first_step(dtype: str) -> None:
    """An empty state makes checkpoint libraries take a step of their own."""
    model = models.toy().to(DTYPES[dtype])
    optimizer = zerokern.AdamW(model.parameters())
    number = len(list(model.parameters()))
    assert len(optimizer.state) == number
    saved = optimizer.state_dict()["state"]
    assert saved.keys() == set(range(number))
    assert all(entry["step"] == 0 for entry in saved.values())


def test_hooks_around_state_dict_run() -> None:
    """The contract of torch: pre and post, saving and loading; a hook may replace the
    state."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-2)
    train_by_hand(model, optimizer)
    seen: list[str] = []

    def before_loading(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("load pre")
        kept = {key: value for key, value in state.items() if key != "extra"}
        return {**kept, "of the hook": None}

    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["save pre", "load pre", "load post"]


def test_the_state_dict_can_be_pickled_and_copied() -> None:
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    train_by_hand(model, optimizer, range(1))
    saved = optimizer.state_dict()
    for copied in (pickle.loads(pickle.dumps(saved)), copy.deepcopy(saved)):
        assert copied["param_groups"] == saved["param_groups"]
        for index, entry in saved["state"].items():
            assert differing(copied["state"][index], entry) == []
