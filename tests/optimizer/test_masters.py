"""Master weights: 16-bit parameters are their rounding, small updates add up in them,
and they follow weights that somebody else writes."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from oracle import differing, state_of, whole
from recipes import MASTERS, Recipe, built
from torch import Tensor, nn
from training import params_of, train_by_hand

import zerokern


def noise(seed: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_the_rounded_master(dtype: torch.dtype) -> None:
    """The master takes the fp32 path bit for bit; the parameter is its rounding to
    nearest even."""
    results = []
    for kind in (dtype, torch.float32):
        model = nn.Linear(40, 30)
        for i, param in enumerate(model.parameters()):
            param.data = noise(i, param.shape).to(dtype).to(kind)
        optimizer = zerokern.AdamW(model.parameters(), lr=1e-3)
        for step in range(20):
            for i, param in enumerate(model.parameters()):
                param.grad = noise(10 * step + i, param.shape).to(dtype).to(kind)
            optimizer.step()
        results.append((whole(model, optimizer), state_of(model, optimizer)))
    (rounded, state), (full, _) = results
    assert differing({name: state[f"{name}/master"] for name in full}, full) == []
    rounding = {name: value.to(dtype) for name, value in full.items()}
    assert differing(rounded, rounding) == []


def test_small_updates_of_bf16_parameters_are_not_lost() -> None:
    """100 steps of 1e-5 move a bf16 weight of 1.0 by 1e-3 in its master, though not one
    of them moves the weight."""
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = zerokern.AdamW([param], lr=1e-5, weight_decay=0.0)
    for _ in range(100):
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state_dict()["state"][0]["master"]
    assert torch.allclose(master, torch.tensor(1 - 1e-3), atol=1e-6)


# ----------------------------------------------------- weights that somebody else wrote


def test_a_state_without_masters_makes_them_of_the_parameters() -> None:
    """A checkpoint of torch's AdamW of a bf16 model: its moments are bf16, and there is
    no master."""
    model = models.toy().bfloat16()
    theirs = torch.optim.AdamW(model.parameters())
    train_by_hand(model, theirs)
    other = copy.deepcopy(model)
    ours = zerokern.AdamW(other.parameters())
    ours.load_state_dict(theirs.state_dict())
    state = state_of(other, ours)
    for name, param in model.named_parameters():
        assert torch.equal(state[f"{name}/master"], param.float())
        expected = theirs.state[param]["exp_avg"].float()
        assert torch.equal(state[f"{name}/exp_avg"], expected)


def test_loaded_parameters_reach_the_masters() -> None:
    """A checkpoint is loaded into the model while the optimizer exists: the next step
    starts from it."""
    source = models.toy(seed=1).bfloat16()
    model = models.toy().bfloat16()
    optimizer = zerokern.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model.load_state_dict(source.state_dict())
    train_by_hand(model, optimizer, range(1))
    assert differing(whole(model, optimizer), params_of(source)) == []


def test_one_parameter_edited_in_place_keeps_the_low_bits_of_the_others() -> None:
    model = models.toy().bfloat16()
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-3)
    train_by_hand(model, optimizer)
    before = state_of(model, optimizer)
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    train_by_hand(model, optimizer, range(3, 4))
    after = state_of(model, optimizer)
    masters = {k: v for k, v in before.items() if k.endswith("/master")}
    assert differing({k: after[k] for k in masters}, masters) == ["head.bias/master"]
    assert (after["head.bias/master"] == 3.0).all()


@pytest.mark.parametrize("master", MASTERS)
def test_weights_written_from_outside_reach_the_master(master: str) -> None:
    """Also zeros of either sign."""
    model, optimizer = built("adamw", Recipe("bf16", master, "8bit"), 1)
    train_by_hand(model, optimizer)
    kept = params_of(model)
    masters = state_of(model, optimizer)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(-0.0)
        model.embedding.weight.fill_(3.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_by_hand(model, optimizer, range(3, 4))
    for name, param in model.named_parameters():
        if name.startswith("blocks"):
            assert torch.equal(param, kept[name])
    assert not model.head.weight.any() and not model.head.bias.any()
    assert (model.embedding.weight == 3.0).all()
    after = state_of(model, optimizer)
    for name in masters:
        if name.endswith("master") and name.startswith("blocks"):
            assert torch.equal(after[name], masters[name]), (
                "untouched weights keep their low bits"
            )
