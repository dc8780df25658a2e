"""A part that some ranks skip."""

from __future__ import annotations

import models
import torch
from oracle import Run
from registry import script
from torch import Tensor, nn


class Multimodal(nn.Module):
    """A tower that runs only where there are images."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.tower = nn.ModuleList([models.Block(), models.Block()])
        self.blocks = nn.ModuleList([models.Block(), models.Block()])
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: Tensor, images: bool = True) -> Tensor:
        x = self.embedding(tokens)
        for block in self.tower if images else ():
            x = x + block(torch.ones_like(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def multimodal() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Multimodal()


@script(build=multimodal, stages=(1, 2))
def a_tower_is_skipped_on_some_ranks(run: Run) -> None:
    """Zeros come from whoever skips it; every rank does in one step. Stage 3 forbids
    it."""
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda r, step=step: run.loss(step, r, images=step != 2 and r != 1),
        )
        run.step()
