"""Small models with odd sizes, and their data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 37


class Block(nn.Module):
    """Residual MLP: Linear 17 -> 33 -> 17, LayerNorm. No size divides a world of 2, 3
    or 4."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(17, 33),
            nn.Linear(33, 17),
            nn.LayerNorm(17),
        )

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


class Weighted(nn.Module):
    """Weights of any shape whose gradients are exactly the coefficients of the forward,
    in one unit each."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.terms = nn.ModuleList(Term(shape, dtype) for shape in shapes)

    def forward(self, coefficients: Sequence[Tensor]) -> Tensor:
        total = torch.zeros(())
        for term, coefficient in zip(self.terms, coefficients, strict=True):
            total = total + term(coefficient)
        return total


class Term(nn.Module):
    """sum(weight * coefficient)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape).to(dtype))

    def forward(self, coefficient: Tensor) -> Tensor:
        return (self.weight * coefficient.to(self.weight.dtype)).float().sum()


class Fork(nn.Module):
    """One unit with two branches; a forward takes those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(17, 17), nn.Linear(17, 17)

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        left = torch.tanh(self.left(x)) if use in ("both", "left") else 0.0
        right = torch.tanh(self.right(x)) if use in ("both", "right") else 0.0
        return x + left + right


class Forked(nn.Module):
    """Embedding, blocks that can be skipped or run twice, a fork, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 17)
        self.blocks = nn.ModuleList([Block(), Block(), Fork()])
        self.head = nn.Linear(17, VOCABULARY)
        self.checkpoint: bool | None = None
        """Recompute blocks in backward: True for the reentrant kind, False for the
        other, None for none."""

    def forward(
        self, tokens: Tensor, order: Sequence[int] = (0, 1), use: str = "both"
    ) -> Tensor:
        x = self.embedding(tokens)
        for index in order:
            x = self._run(self.blocks[index], x)
        return self.head(self._run(self.blocks[2], x, use))

    def _run(self, module: nn.Module, *args: Any) -> Tensor:
        if self.checkpoint is None:
            return module(*args)
        return checkpoint(module, *args, use_reentrant=self.checkpoint)


def forked(seed: int = 0) -> Forked:
    """Return the same model for the same seed."""
    torch.manual_seed(seed)
    return Forked()


class Gpt(nn.Module):
    """The parameters of a GPT: embeddings, attention and MLP, final norm. For its
    sizes; its maths is simple."""

    def __init__(
        self, width: int = 72, layers: int = 4, vocabulary: int = 256, context: int = 64
    ) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.ModuleList(GptBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class GptBlock(nn.Module):
    """One block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(torch.sigmoid(q) * k * v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt(seed: int = 0, **sizes: int) -> Gpt:
    """Return the same model for the same seed."""
    torch.manual_seed(seed)
    return Gpt(**sizes)


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), int64 [size, 5]; 12 rows divide by every world from 1
    to 4."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (size, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def share(tensor: Tensor, rank: int, world: int) -> Tensor:
    """Return the rows of one rank."""
    return tensor.chunk(world)[rank]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
