"""Methods other than forward."""

from __future__ import annotations

import models
import torch
from oracle import Run
from registry import script
from torch import Tensor, nn


class Encoder(models.Block):
    """A block with another way in."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) @ self.down.weight.T


class Encoding(nn.Module):
    """Uses its first unit by `encode`, its second one by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList([Encoder(), models.Block()])
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0].encode(self.embedding(tokens))))


def encoding() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Encoding()


@script(build=encoding, eps=1e-4)
def a_method_beside_forward(run: Run) -> None:
    """After it was registered."""
    if not run.torch:
        run.optimizer.register_forward_method(run.model.blocks[0], "encode")
    run.train()
