"""How tests train: on integer gradients assigned by hand, whose sums are exact in any
world, or on each rank's share of a batch; and all that comes of it."""

from __future__ import annotations

from typing import Any

import models
from oracle import rank, set_integer_gradients, state_of, whole
from torch import Tensor, nn

import zerokern


def params_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters that are there."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return parameters and state, in fp32 as checkpoints hold it."""
    return whole(model, optimizer) | state_of(model, optimizer)


def step_by_hand(model: nn.Module, optimizer: Any, step: int) -> None:
    """Take one step on integer gradients."""
    optimizer.zero_grad()
    set_integer_gradients(model, step)
    optimizer.step()


def train_by_hand(model: nn.Module, optimizer: Any, steps: range = range(3)) -> None:
    """Take steps on integer gradients."""
    for step in steps:
        step_by_hand(model, optimizer, step)


def train_shares(model: nn.Module, optimizer: Any, steps: range, of: int) -> None:
    """Train on this rank's share of each batch; with torch's optimizer, on the shares
    of `of` ranks in turn."""
    ours = isinstance(optimizer, zerokern.AdamW)
    for step in steps:
        optimizer.zero_grad()
        for r in [rank()] if ours else range(of):
            shares = (models.share(t, r, of) for t in models.batch(step))
            loss = models.loss_of(model, *shares)
            (loss if ours else loss / of).backward()
        optimizer.step()


def interleaved(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups that take alternate parameters."""
    params = list(model.parameters())
    return [
        {"params": params[::2], "weight_decay": 0.2},
        {"params": params[1::2], "lr": 3e-3},
    ]
