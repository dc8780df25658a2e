"""Models that FSDP2 refuses or warns of, live: stages 2 and 3 train them like torch.

What is said of FSDP2 is asserted, so that a torch that mends one of these makes its
test fail and say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import odd_models
import pytest
import ranks
import torch
from fsdp2 import MODES, full, shard_units
from marks import in_stages
from oracle import apart, differing, rank, sharded, whole, world
from registry import cases_of
from torch import Tensor, nn

# A module returned a view.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
WORLD = 2

case = cases_of("programs")


# ---------------------------------------------------------------------- what it refuses

REFUSES = {
    "scalar": "fully_shard doesn't support scalar parameters",
    "root_scalar": "fully_shard doesn't support scalar parameters",
    "transposed": "does not support non-contiguous parameters",
    "expanded": "does not support non-contiguous parameters",
    "channels_last": "does not support non-contiguous parameters",
    "mixed_dtypes": "expects uniform original parameter dtype",
    "tied": "is shared with a parameter already managed by another FSDP group",
    "empty_parameters": "_chunk_cat expects non-empty tensor",
}
"""Model of odd_models, and what FSDP2 says of it."""
DIFFERENT_SUMS = {"mixed_dtypes": 2e-2}


def train_with_fsdp2(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = odd_models.MODELS[name]()
    shard_units(model, getattr(model, "units", ()))
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        mine = odd_models.rows(step).chunk(world())[rank()]
        odd_models.loss_of(model(mine)).backward()
        optimizer.step()
    return {name: full(param) for name, param in params.items()}


def parameters_or_error(name: str) -> str | dict[str, Tensor]:
    """Return what FSDP2 makes of a model."""
    try:
        return train_with_fsdp2(name)
    except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
        return str(error)


@functools.cache
def odd() -> ranks.Cases:
    """Train odd models under FSDP2, and what it refuses in our stages."""
    cases: dict[Any, Callable[[], Any]] = {
        (name, "FSDP2"): functools.partial(parameters_or_error, name)
        for name in odd_models.MODELS
    }
    for name in REFUSES:
        for stage in MODES:
            cases[name, stage] = functools.partial(odd_models.train, name, stage)
    return ranks.run_cases(WORLD, cases)


@pytest.mark.parametrize("stage", MODES, ids="stage{}".format)
@pytest.mark.parametrize("name", REFUSES)
def test_trains_what_fsdp2_refuses(name: str, stage: int) -> None:
    expected = odd_models.reference(name, WORLD)
    limit = DIFFERENT_SUMS.get(name, 1e-5)
    for message, ours in zip(odd()[name, "FSDP2"], odd()[name, stage], strict=True):
        assert isinstance(message, str), "FSDP2 trains it now"
        assert REFUSES[name] in message
        assert apart(ours["params"], expected["params"], limit) == {}
        assert differing(ours["params"], ours["start"]) != []


@pytest.mark.parametrize(
    "name", [name for name in odd_models.MODELS if name not in REFUSES]
)
def test_fsdp2_trains_the_other_odd_models(name: str) -> None:
    """So what is above is a list and not a selection; ours are in test_odd_models."""
    expected = odd_models.reference(name, WORLD)
    for params in odd()[name, "FSDP2"]:
        assert not isinstance(params, str), params
        assert apart(params, expected["params"], 1e-5) == {}


# ---------------------------------------------------------------------- where it warns


class Viewing(nn.Module):
    """Returns a view of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).view(len(x), 2, 3)


class ChangesViews(nn.Module):
    """Changes in place what its unit returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.units = nn.ModuleList([Viewing(), Viewing()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in self.units:
            x = unit(torch.sin(x)).add_(1.0).reshape(len(x), 6)
        x = x.view(len(x), 3, 2)
        x.mul_(1.5)
        return self.last(torch.sin(x.reshape(len(x), 6))).view(-1, 2, 3)


def train_views(stage: int | None, at: int) -> dict[str, Tensor]:
    """Return the parameters after some steps; stage None is torch's AdamW, which plays
    all ranks."""
    torch.manual_seed(0)
    model = ChangesViews()
    if stage is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        played, weight = range(at), 1 / at
    else:
        optimizer = sharded(model, stage, lr=1e-2)
        played, weight = range(rank(), rank() + 1), 1.0
    for step in range(3):
        optimizer.zero_grad()
        chunks = odd_models.rows(step).chunk(at)
        for of_rank in played:
            loss = (model(chunks[of_rank]).mul_(2.0) ** 2).mean()
            (loss * weight).backward()
        optimizer.step()
    return whole(model, optimizer)


@case
def views_changed_in_place(stage: int) -> dict[str, Tensor]:
    return train_views(stage, world())


@in_stages
def test_a_view_that_a_unit_returned_may_be_changed_in_place(stage: int) -> None:
    """A view that is changed leaves its node in the graph, and a hook with it. FSDP2
    warns of wrong gradients."""
    expected = train_views(None, WORLD)
    for params in case.done(WORLD)["views_changed_in_place", stage]:
        assert apart(params, expected) == {}
