"""A language model of any size, to plan with when only its number of parameters is
known."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 32_000
HEAD = 64
"""Channels of an attention head; widths are multiples of it."""


def width_for(params: int, layers: int) -> int:
    """Return the width with which a decoder has about so many parameters.

    Raises:
        ValueError: they are too few for so many layers.
    """
    width = HEAD
    while Decoder.count(layers, width + HEAD) <= params:
        width += HEAD
    if Decoder.count(layers, width) > 2 * params:
        raise ValueError(
            f"{params:,} parameters are too few for {layers} layers and a vocabulary of"
            f" {VOCABULARY:,}; at least {Decoder.count(layers, HEAD):,} are needed:"
            " give fewer layers, or a model of your own"
        )
    larger = width + HEAD
    nearer = abs(Decoder.count(layers, larger) - params) < abs(
        Decoder.count(layers, width) - params
    )
    return larger if nearer else width


class Block(nn.Module):
    """Attention, and a perceptron four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.project_in = nn.Linear(width, 3 * width, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, C] of [B, T, C]."""
        batch, length, width = x.shape
        heads = self.project_in(self.attention_norm(x)).view(
            batch, length, 3, width // HEAD, HEAD
        )
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, head; the head is the embedding's weight."""

    def __init__(
        self,
        layers: int,
        width: int,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    @staticmethod
    def count(layers: int, width: int) -> int:
        """Return its number of parameters."""
        return layers * (12 * width**2 + 2 * width) + (VOCABULARY + 1) * width

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits, [B, T, V], of int64 [B, T]."""
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, text: Tensor) -> Tensor:
        """Return the cross entropy of the tokens of int64 [B, T + 1] given those
        before."""
        logits = self(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
