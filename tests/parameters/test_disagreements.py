"""Ranks that disagree about the model, the groups or the order of parameters: all get
one error, which names the first difference, and nothing has changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import STAGES, differing, rank, set_integer_gradients, sharded, whole
from registry import cases_of
from torch import nn

import zerokern

case = cases_of("groups of parameters")


# ------------------------------------------------------------------------- other models


def _other_size(model: nn.Module) -> None:
    model.head = nn.Linear(17, 38)


def _other_name(model: nn.Module) -> None:
    model.tail = model.head
    del model.head


def _other_dtype(model: nn.Module) -> None:
    model.blocks[2].down.bfloat16()


def _one_more(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.ones(3))


def _one_frozen(model: nn.Module) -> None:
    model.blocks[1].norm.bias.requires_grad_(False)


def _reversed(params: list[Any]) -> list[Any]:
    return params[::-1]


def _two_groups(params: list[Any]) -> list[Any]:
    return [{"params": params[:5]}, {"params": params[5:]}]


def places(model: nn.Module) -> dict[str, int]:
    """Return where parameters lie in memory."""
    return {name: p.data_ptr() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Disagreement:
    """What one rank does otherwise, and what the error says of it."""

    message: str
    change: Callable[[nn.Module], None] = lambda model: None
    arrange: Callable[[list[Any]], list[Any]] = list
    options: dict[str, Any] = field(default_factory=dict)


SMALL_BUCKETS = {"buckets": zerokern.Buckets(bytes=100)}
DISAGREEMENTS = {
    "size": Disagreement(r"head\.(weight|bias).*38", _other_size),
    "name": Disagreement(r"tail\.weight", _other_name),
    "dtype": Disagreement(r"blocks\.2\.down\.weight.*bfloat16", _other_dtype),
    "one more": Disagreement(r"extra", _one_more),
    "frozen": Disagreement(r"blocks\.1\.norm\.bias.*frozen", _one_frozen),
    "order": Disagreement(r"parameter 0", arrange=_reversed),
    "groups": Disagreement(r"param group", arrange=_two_groups),
    "bucket size": Disagreement(r"bucket 0", options=SMALL_BUCKETS),
}
DISAGREE = [
    (stage, name)
    for stage in STAGES
    for name in DISAGREEMENTS
    # Stage 3 takes the model's order, and units.
    if not (stage == 3 and name in ("order", "bucket size"))
]


def _disagree(stage: int, name: str) -> tuple[str, bool]:
    """Return the error that a change on rank 1 makes, and whether parameters are where
    they were."""
    model = models.toy()
    one = DISAGREEMENTS[name] if rank() == 1 else Disagreement("")
    one.change(model)
    params = one.arrange(list(model.named_parameters()))
    before = places(model)
    try:
        sharded(model, stage, params, **one.options)
    except ValueError as error:
        return str(error), places(model) == before
    return "", False


@case
def disagreements(stage: int) -> dict[str, tuple[str, bool]]:
    return {name: _disagree(stage, name) for at, name in DISAGREE if at == stage}


@pytest.mark.parametrize(("stage", "name"), DISAGREE)
def test_ranks_that_disagree_get_one_error_on_all(stage: int, name: str) -> None:
    """It names the first difference and the rank; nothing was changed, and nobody
    hangs."""
    for results in case.done(3)["disagreements", stage]:
        message, untouched = results[name]
        assert "Rank 1 has" in message
        assert re.search(DISAGREEMENTS[name].message, message)
        assert untouched


def test_after_a_disagreement_the_ranks_can_build_and_train() -> None:
    def build_and_train() -> list[str]:
        model = models.toy()
        params = list(model.parameters())
        with pytest.raises(ValueError, match="different models"):
            zerokern.AdamW(params if rank() else params[1:])
        optimizer = zerokern.AdamW(model.parameters())
        before = whole(model, optimizer)
        set_integer_gradients(model, 0)
        optimizer.step()
        return differing(whole(model, optimizer), before)

    assert all(ranks.run(2, build_and_train))


# ------------------------------------------------------------------------ another order


class Alike(nn.Module):
    """Parameters that only their names and values tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(6))


def _of_a_set(model: nn.Module) -> list[Any]:
    return list(model.layers.parameters())


def _of_a_named_set(model: nn.Module) -> list[Any]:
    return list(model.named_parameters())


def _groups_of_a_set(model: nn.Module) -> list[Any]:
    return [{"params": [layer.weight]} for layer in model.layers]


def _groups_of_sets(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    if rank() == 1:
        params = params[::-1]
    return [{"params": params[:3], "lr": 1e-2}, {"params": params[3:], "lr": 1e-3}]


PASSED = {
    f.__name__.strip("_"): f
    for f in (_of_a_set, _of_a_named_set, _groups_of_a_set, _groups_of_sets)
}


@case
def disordered(stage: int) -> dict[str, tuple[str, bool]]:
    """Return the error of each way, and whether parameters have kept their values."""
    found = {}
    for name, groups_of in PASSED.items():
        torch.manual_seed(0)
        model = Alike()
        groups = groups_of(model)
        # As the hash seed of another process has it.
        if rank() == 1 and name != "groups_of_sets":
            groups = [groups[i] for i in (3, 0, 5, 1, 4, 2)]
        before = [p.detach().clone() for p in model.parameters()]
        try:
            sharded(model, stage, groups)
        except ValueError as error:
            untouched = all(map(torch.equal, before, model.parameters()))
            found[name] = str(error), untouched
        else:
            found[name] = "", False
    return found


@pytest.mark.parametrize("at", (2, 3), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("name", PASSED)
def test_parameters_in_another_order_on_another_rank_are_refused(
    name: str, stage: int, at: int
) -> None:
    """Groups made of a set. All ranks get the error; nobody trains one weight as if it
    were another."""
    for results in case.done(at)["disordered", stage]:
        message, untouched = results[name]
        assert "Rank 1" in message
        assert untouched
