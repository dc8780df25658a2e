"""`optimizer.check`: a step on both sides, after which everything is as it was."""

from __future__ import annotations

from typing import Any

import models
import pytest
import ranks
import torch
from checked_loops import FAULTS, loss_of, small
from marks import in_stages
from oracle import differing, rank
from registry import SMALL, cases_of
from torch import Tensor, nn
from training import everything

import zerokern

case = cases_of("checks of a step")

at_worlds = pytest.mark.parametrize("at", ranks.worlds(2, rarely=(1, 3)))


class WithNoise(nn.Module):
    """Dropout, and a norm that counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(torch.tanh(block(x)), 0.2, self.training)
        return self.head(self.norm(x))


def noisy(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return WithNoise().to(dtype)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank())
    return torch.randn(6, 9, generator=generator).to(dtype)


RECIPES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "clipped": (torch.float32, {"max_grad_norm": 0.05}),
    "amsgrad": (torch.float32, {"amsgrad": True}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "split32": (torch.bfloat16, {"precision": zerokern.Precision(master="split32")}),
    "8-bit moments": (
        torch.bfloat16,
        {"precision": zerokern.Precision(master="split24", moments="8bit")},
    ),
    "no masters": (
        torch.bfloat16,
        {"precision": zerokern.Precision(master="none", moments="bf16")},
    ),
}


@case
def checks_of_recipes(stage: int) -> dict[str, list[str]]:
    """Return what a check, in the middle of training, has changed."""
    found = {}
    for name, (dtype, options) in RECIPES.items():
        model = noisy(dtype)
        optimizer = zerokern.AdamW(
            model.parameters(), model=model, stage=stage, buckets=SMALL, **options
        )
        changed = []
        for step in range(2):
            before = everything(model, optimizer)
            buffers = {n: b.clone() for n, b in model.named_buffers()}
            state = torch.get_rng_state()
            optimizer.check(squares, batch(step, dtype))
            changed += differing(everything(model, optimizer), before)
            changed += differing(dict(model.named_buffers()), buffers)
            assert torch.equal(torch.get_rng_state(), state)
            assert all(p.grad is None for p in model.parameters())
            squares(model, batch(step, dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = changed
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", RECIPES)
def test_a_check_passes_and_leaves_everything_as_it_was(
    name: str, stage: int, at: int
) -> None:
    for results in case.done(at)["checks_of_recipes", stage]:
        assert results[name] == []


FOUND = {name: FAULTS[name] for name in ("half a gradient", "sums in place of means")}


@case
def faults_in_a_check(stage: int) -> dict[str, str]:
    """Return what a check says of faults, and that it has changed nothing."""
    said = {}
    for name, (_, fault, _, _) in FOUND.items():
        with fault():
            model, optimizer = small(stage)
            before = everything(model, optimizer)
            try:
                optimizer.check(loss_of, 0)
                said[name] = ""
            except RuntimeError as error:
                said[name] = str(error)
            assert differing(everything(model, optimizer), before) == []
    return said


@at_worlds
@in_stages
@pytest.mark.parametrize("name", FOUND)
def test_a_check_finds_a_fault(name: str, stage: int, at: int) -> None:
    _, _, needed, words = FOUND[name]
    for results in case.done(at)["faults_in_a_check", stage]:
        if at >= needed:
            assert results[name].startswith("check: ")
            assert words in results[name]


@case
def refused_checks(stage: int) -> dict[str, str]:
    """Return what is said of checks that cannot be made."""
    model = models.toy(blocks=2)
    optimizer = zerokern.AdamW(model.parameters(), model=model, stage=stage)

    def of_another(_: nn.Module, step: int) -> Tensor:
        return models.loss_of(model, *models.batch(step))

    def fails(_: nn.Module, step: int) -> Tensor:
        raise ZeroDivisionError("the user's own")

    said = {}
    before = everything(model, optimizer)
    for name, loss in (("another model", of_another), ("an exception", fails)):
        try:
            optimizer.check(loss, 0)
        except (ValueError, ZeroDivisionError) as error:
            said[name] = str(error)
    assert differing(everything(model, optimizer), before) == []
    if stage < 3:
        optimizer = zerokern.AdamW(model.parameters(), stage=stage)
        try:
            optimizer.check(of_another, 0)
        except ValueError as error:
            said["no model"] = str(error)
    return said


@at_worlds
@in_stages
def test_what_cannot_be_checked_is_refused(stage: int, at: int) -> None:
    for said in case.done(at)["refused_checks", stage]:
        assert "use the model that it is given" in said["another model"]
        assert said["an exception"] == "the user's own"
        if stage < 3:
            assert "needs the model" in said["no model"]
