"""A byte-level GPT: what is trained.

Letters: B sequences in a batch, T bytes in a sequence, C channels, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a GPT. The defaults give 1.0 M parameters, which two CPU cores train
    in seconds."""

    layers: int = 2
    """Number of blocks."""

    width: int = 192
    """C, the channels of the residual stream."""

    heads: int = 6
    """H, the attention heads of a block. Divides the width."""

    context: int = 64
    """The longest T, in bytes."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"Shape(width={self.width}, heads={self.heads}): the heads must divide"
                " the width"
            )


class Attention(nn.Module):
    """Causal self-attention over [B, T, C]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        # No bias: softmax cancels a bias of the keys exactly, so its gradient is
        # rounding noise, which Adam would scale up to full steps that differ between
        # any two ways to add the same numbers.
        self.project_in = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.project_out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what every position gathered from itself and those before it, [B, T,
        C]."""
        batch, length, width = x.shape
        split = self.project_in(x).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)
        gathered = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.project_out(
            gathered.transpose(1, 2).reshape(batch, length, width)
        )
        return mixed


class Block(nn.Module):
    """One layer: attention, then a two-layer perceptron, each added to the residual
    stream.

    A block takes one tensor and returns one, so that activation checkpointing can wrap
    it; and it is called as a module, so that ZeRO-3 gathers its parameters before it
    runs and releases them after.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this layer, [B, T, C]."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Predicts the next byte of a text.

    The blocks lie in a ModuleList: in ZeRO-3 each becomes one unit of communication,
    and the rest the root unit.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.byte_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's initialisation: 0.02 everywhere, less where 2 * layers branches add
        up in the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                branch_end = name.endswith(("project_out.weight", "mlp.2.weight"))
                nn.init.normal_(
                    parameter,
                    std=0.02 / (2 * self.shape.layers) ** 0.5 if branch_end else 0.02,
                )
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next byte: int64 [B, T] -> [B, T, 256] in the dtype
        of the parameters."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.byte_embedding(text) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean cross entropy of each byte of int64 [B, T + 1] given those
        before it: fp32, nats."""
        logits = self(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0
    ) -> bytes:
        """Return the prompt continued by `length` sampled bytes. The same seed gives
        the same text."""
        device = self.head.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(length):
            window = torch.tensor([text[-self.shape.context :]], device=device)
            chances = torch.softmax(
                self(window)[0, -1].float().cpu() / temperature, dim=0
            )
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text)
