"""Odd parameters saved and resumed: frozen, scalar, empty, strided, of several dtypes;
saved in a world of 3, resumed in any."""

from __future__ import annotations

import functools
import io
import itertools
from typing import Any

import models
import pytest
import ranks
import torch
from marks import at_worlds, in_stages
from oracle import STAGES, apart, differing, sharded, world
from torch import Tensor, nn
from training import everything, interleaved, train_by_hand

import zerokern


def half_frozen(seed: int) -> nn.Module:
    """Return a model of which half of the parameters are frozen, far from where any
    initialisation puts them."""
    model = models.toy(seed)
    for param in list(model.parameters())[::2]:
        param.requires_grad_(False)
        param.data.mul_(1.0 + seed).add_(0.25 + seed)
    return model


class Odd(nn.Module):
    """Terms of all shapes, layouts and dtypes in one unit."""

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        unit = nn.ParameterDict()
        for index, value in enumerate(values):
            unit[f"p{index}"] = nn.Parameter(value)
        self.units = nn.ModuleList([unit])


SHAPES = ((8, 128), (), (3,), (0, 4), (7,), (13,), (1,), (3, 65))


def odd_shapes(seed: int) -> nn.Module:
    """Return a scalar, (8, 128), nothing, and sizes that neither 8 nor the world
    divides."""
    torch.manual_seed(seed)
    return Odd(*(torch.randn(shape) for shape in SHAPES))


def not_contiguous(seed: int) -> nn.Module:
    """Return parameters that are column-major, channels last, and of three dimensions
    in another order."""
    torch.manual_seed(seed)
    return Odd(
        torch.randn(6, 7).T,
        torch.randn(5, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.randn(3, 5, 7).permute(2, 0, 1),
        torch.randn(11, 3),
    )


def three_dtypes(seed: int) -> nn.Module:
    """Return fp32, bf16 and fp16 in one unit."""
    torch.manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    pairs = zip(SHAPES, itertools.cycle(dtypes), strict=False)
    return Odd(*(torch.randn(shape).to(dtype) for shape, dtype in pairs))


def nothing_in_a_dtype(seed: int) -> nn.Module:
    """Return parameters whose 16-bit buckets have no element."""
    torch.manual_seed(seed)
    return Odd(
        torch.randn(0, 4, dtype=torch.bfloat16),
        torch.randn(3),
        torch.randn(0, dtype=torch.float16),
    )


SAVED = {
    m.__name__: m
    for m in (half_frozen, odd_shapes, not_contiguous, three_dtypes, nothing_in_a_dtype)
}
of_saved = pytest.mark.parametrize("name", SAVED)
SAVED_AT = 3


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Return an empty group, then two that take alternate parameters."""
    return [{"params": []}, *interleaved(model)]


def _uninterrupted(name: str) -> dict[str, Tensor]:
    model = SAVED[name](0)
    optimizer = zerokern.AdamW(grouped(model), lr=1e-2)
    train_by_hand(model, optimizer, range(4))
    return everything(model, optimizer)


def _save(name: str, stage: int) -> dict[str, Any]:
    model = SAVED[name](0)
    optimizer = sharded(model, stage, grouped(model), lr=1e-2)
    train_by_hand(model, optimizer, range(2))
    file = io.BytesIO()
    with optimizer.full_params():
        strides = {n: p.stride() for n, p in model.named_parameters()}
        saved = {"model": model.state_dict(), "optimizer": optimizer.full_state_dict()}
        torch.save(saved, file)
    return {
        "file": file.getvalue(),
        "strides": strides,
        "grad": [p.grad is None for p in model.parameters()],
    }


def _resume(name: str, stage: int, file: bytes) -> dict[str, Tensor]:
    saved = torch.load(io.BytesIO(file), weights_only=True)
    model = SAVED[name](7)
    optimizer = sharded(model, stage, grouped(model), lr=9.0)
    with optimizer.full_params():
        model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train_by_hand(model, optimizer, range(2, 4))
    return everything(model, optimizer)


@functools.cache
def saves() -> ranks.Cases:
    """Train two steps and save."""
    cases = itertools.product(SAVED, STAGES)
    return ranks.run_cases(SAVED_AT, {c: functools.partial(_save, *c) for c in cases})


@functools.cache
def resumed(at: int) -> ranks.Cases:
    """Load in new processes, which start from other values, and train two steps
    more."""
    cases = {}
    for name, stage in itertools.product(SAVED, STAGES):
        file = saves()[name, stage][0]["file"]
        cases[name, stage] = functools.partial(_resume, name, stage, file)
    return ranks.run_cases(at, cases)


@at_worlds
@in_stages
@of_saved
def test_what_was_saved_resumes_to_the_bit(name: str, stage: int, at: int) -> None:
    """It is a run that was never interrupted."""
    expected = _uninterrupted(name)
    for result in resumed(at)[name, stage]:
        assert differing(result, expected) == []


@in_stages
@of_saved
def test_strides_stay_where_parameters_are_whole(name: str, stage: int) -> None:
    expected = {n: p.stride() for n, p in SAVED[name](0).named_parameters()}
    for result in saves()[name, stage]:
        assert result["strides"] == expected


@in_stages
def test_frozen_parameters_have_no_gradient(stage: int) -> None:
    frozen = [not p.requires_grad for p in half_frozen(0).parameters()]
    for result in saves()["half_frozen", stage]:
        for has_none, is_frozen in zip(result["grad"], frozen, strict=True):
            assert has_none or not is_frozen


@of_saved
def test_an_uninterrupted_run_is_torchs(name: str) -> None:
    """What the others are compared with: values and moments in the order of the
    parameter's own indices.

    torch trains 16-bit parameters without masters, so it gets fp32 copies: ours are
    their rounding.
    """
    model = SAVED[name](0)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    for param in model.parameters():
        param.data = param.data.float()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    train_by_hand(model, optimizer, range(4))
    expected = everything(model, optimizer)
    found = _uninterrupted(name)
    for n, dtype in dtypes.items():
        if dtype != torch.float32 and f"{n}/master" in found:
            assert torch.equal(found[n], found[f"{n}/master"].to(dtype))
            found[n] = found.pop(f"{n}/master")
    assert apart(found, expected, 1e-6) == {}
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in expected.items()
    }


def _coarse() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Odd(*(torch.randn(shape).bfloat16() for shape in SHAPES))
    precision = zerokern.Precision(
        master="split24", moments="8bit", gradients=torch.bfloat16
    )
    stage = 3 if world() > 2 else 2
    optimizer = sharded(model, stage, lr=1e-2, precision=precision)
    train_by_hand(model, optimizer)
    return everything(model, optimizer)


@pytest.mark.parametrize("at", (2, 3), ids="world{}".format)
def test_sizes_that_blocks_do_not_divide_are_quantised_alike_in_any_world(
    at: int,
) -> None:
    """Of 1, 3, 7, 13 and 195 elements in blocks of 64."""
    expected = _coarse()
    for result in ranks.run(at, _coarse):
        assert differing(result, expected) == []
