"""Small models with odd sizes, and their data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 37


class Block(nn.Module):
    """Residual MLP: Linear 17 -> 33 -> 17, LayerNorm. No size divides a world of 2, 3 or 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(17, 33), nn.Linear(33, 17), nn.LayerNorm(17)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(F.gelu(self.up(x))))


class Toy(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, blocks: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 17)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(17, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def toy(seed: int = 0, **options: bool) -> Toy:
    """Return the same model for the same seed."""
    torch.manual_seed(seed)
    return Toy(**options)


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), int64 [size, 5]; 12 rows divide by every world from 1 to 4."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (size, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def share(tensor: Tensor, rank: int, world: int) -> Tensor:
    """Return the rows of one rank."""
    return tensor.chunk(world)[rank]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
