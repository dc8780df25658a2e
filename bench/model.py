"""The model that every peer trains: a GPT of a given size, and synthetic tokens that it
can learn."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {
    "tiny": (2, 64, 2, 256, 32),
    "10m": (7, 320, 5, 2048, 64),
    "30m": (12, 448, 7, 2048, 64),
}
"""Layers, width, heads, vocabulary, context."""


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.qkv(self.norm1(x)).view(
            batch, context, 3, self.heads, width // self.heads
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder that returns its loss. No dropout: every peer sees the same numbers."""

    def __init__(self, size: str) -> None:
        """Build one of SIZES; weights depend on torch's seed only."""
        super().__init__()
        layers, width, heads, self.vocabulary, context = SIZES[size]
        self.token, self.position = (
            nn.Embedding(self.vocabulary, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = (
            nn.LayerNorm(width),
            nn.Linear(width, self.vocabulary, bias=False),
        )
        for name, param in self.named_parameters():
            if param.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    param, std=0.02 / math.sqrt(2 * layers) if residual else 0.02
                )
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, self.vocabulary), targets.reshape(-1))


def build(size: str, seed: int = 0) -> GPT:
    """Return the model; the same weights for the same seed."""
    torch.manual_seed(seed)
    return GPT(size)


def batch(size: str, step: int, rank: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, int64 [rows, context]: a noisy recurrence, another for
    each step and rank."""
    vocabulary, context = SIZES[size][3:]
    generator = torch.Generator().manual_seed(7919 * step + rank + 1)
    column = torch.randint(0, vocabulary, (rows,), generator=generator)
    noise = torch.randint(0, 4, (context, rows), generator=generator)
    columns = [column]
    for jump in noise:
        columns.append((columns[-1] * 3 + 11 + jump) % vocabulary)
    sequence = torch.stack(columns, dim=1)
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
