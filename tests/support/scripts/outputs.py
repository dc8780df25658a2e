"""Outputs of units or of the model that never enter the loss."""

from __future__ import annotations

import functools
from typing import Any

import models
import torch
from oracle import Run
from registry import script
from torch import Tensor, nn


class Pair(nn.Module):
    """A unit with two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dropped = nn.Linear(17, 17), nn.Linear(17, 17)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.used(x)), self.dropped(x)


class Paired(nn.Module):
    """Embedding, block, a pair whose second output leaves the model, head; a unit whose
    output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList([models.Block(), Pair(), models.Block()])
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: Tensor, both: bool = False) -> Any:
        x, beside = self.blocks[1](self.blocks[0](self.embedding(tokens)))
        self.blocks[2](x)
        return (self.head(x), beside) if both else self.head(x)


def paired() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Paired()


@script(build=paired, weight_decay=0.3)
def an_output_never_enters_the_loss(run: Run) -> None:
    """Six iterations; parameters behind it have no gradient and do not even
    decay."""
    for step in range(6):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        dropped = [
            *run.model.blocks[1].dropped.parameters(),
            *run.model.blocks[2].parameters(),
        ]
        if run.torch or run.ranks == 1:
            assert [p.grad for p in dropped] == [None] * len(dropped)
    run.rest()


@script(build=paired, weight_decay=0.3)
def an_output_of_the_model_never_enters_the_loss(run: Run) -> None:
    """It is alive while backward runs, and in the last two iterations it is
    used."""

    def loss(of_rank: int, step: int) -> Tensor:
        tokens, targets = (
            models.share(t, of_rank, run.ranks) for t in models.batch(step)
        )
        logits, beside = run.model(tokens, both=True)
        value = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return value + beside.square().mean() if step >= 4 else value

    for step in range(6):
        run.optimizer.zero_grad()
        run.backward(step, functools.partial(loss, step=step))
        run.step()
    run.rest()
