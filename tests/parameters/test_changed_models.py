"""Models that change while they have an optimizer: an embedding that grows, parameters
that are cast or moved to other memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, set_integer_gradients, sharded, state_of, whole, world
from registry import cases_of
from torch import nn
from training import step_by_hand, train_shares

import zerokern

case = cases_of("parameters")


# ------------------------------------------------------------------ a resized embedding


@contextmanager
def gathered(optimizer: Any) -> Iterator[None]:
    """Have the parameters whole, of torch's optimizer too."""
    ours = hasattr(optimizer, "full_params")
    with optimizer.full_params() if ours else nullcontext():
        yield


def grow(model: nn.Module, *, tied: bool) -> None:
    """Give the embedding 45 rows, of which the first are those that it had."""
    larger = nn.Embedding(45, 17)
    with torch.no_grad():
        larger.weight.copy_(torch.linspace(-1, 1, 45 * 17).view(45, 17))
        larger.weight[: models.VOCABULARY] = model.embedding.weight
    model.embedding = larger
    if tied:
        model.head.weight, model.head.out_features = larger.weight, 45


def _resized(stage: int | None, of: int, *, tied: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = models.Toy(blocks=2, tied=tied)
    make: Any = functools.partial(torch.optim.AdamW, lr=1e-2)
    if stage is not None:
        make = functools.partial(sharded, model, stage, lr=1e-2)
    optimizer = make(model.parameters() if stage is None else None)
    train_shares(model, optimizer, range(2), of)
    with gathered(optimizer):
        grow(model, tied=tied)
    optimizer = make(model.parameters() if stage is None else None)
    # Up to the new rows.
    model.register_forward_pre_hook(lambda module, args: (args[0] + 8,))
    train_shares(model, optimizer, range(2, 4), of)
    return {"params": whole(model, optimizer), "state": state_of(model, optimizer)}


@case
def resized(stage: int) -> list[dict[str, Any]]:
    return [_resized(stage, world(), tied=tied) for tied in (False, True)]


@at_worlds
@in_stages
@pytest.mark.parametrize("tied", (False, True), ids=["untied", "tied"])
def test_a_resized_embedding_is_trained_by_a_new_optimizer(
    tied: bool, stage: int, at: int
) -> None:
    """Which takes the parameters over."""
    expected = _resized(None, at, tied=tied)
    for results in case.done(at)["resized", stage]:
        params, state = results[tied]["params"], results[tied]["state"]
        assert params["embedding.weight"].shape == (45, 17)
        assert state["embedding.weight/exp_avg"].shape == (45, 17)
        assert apart(params, expected["params"]) == {}


# -------------------------------------------------------------- a model that moves away


@case
def data_replaced_inside(stage: int) -> str:
    """`p.data = ...` instead of a copy: the flat buffer does not learn of it."""
    model = models.toy()
    optimizer = sharded(model, stage, model.named_parameters())
    with pytest.raises(RuntimeError) as error:
        with optimizer.full_params():
            model.head.weight.data = torch.ones_like(model.head.weight)
        step_by_hand(model, optimizer, 0)
    return str(error.value)


@at_worlds
@in_stages
def test_data_replaced_inside_full_params_is_refused_by_name(
    stage: int, at: int
) -> None:
    """Never a write that is lost in silence."""
    for message in case.done(at)["data_replaced_inside", stage]:
        assert "head.weight" in message


def _cast(model: nn.Module) -> None:
    model.bfloat16()


def _replaced(model: nn.Module) -> None:
    model.head.weight.data = torch.zeros(model.head.weight.shape)


def _cast_and_back(model: nn.Module) -> None:
    model.double().float()


MOVES = {f.__name__.strip("_"): f for f in (_cast, _replaced, _cast_and_back)}


@case
def moved(stage: int) -> dict[str, str]:
    """Return what is said after each move."""
    found = {}
    for name, move in MOVES.items():
        model = models.toy()
        optimizer = sharded(model, stage, model.named_parameters())
        with pytest.raises(RuntimeError) as error:
            move(model)
            set_integer_gradients(model, 0)
            optimizer.step()
        found[name] = str(error.value)
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_moves_away_from_its_optimizer_is_told_so(
    move: str, stage: int, at: int
) -> None:
    """Before the update, on all ranks, never a loss that stands still."""
    for results in case.done(at)["moved", stage]:
        message = results[move]
        assert "parameter" in message
        assert "full_params" in message or "build a new optimizer" in message


def test_a_parameter_that_was_moved_away() -> None:
    """The optimizer would train memory that nobody reads."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    set_integer_gradients(model, 0)
    model.head.weight.data = model.head.weight.data.clone()
    with pytest.raises(
        RuntimeError, match=r"head\.weight|parameter .* no longer lives"
    ):
        optimizer.step()
