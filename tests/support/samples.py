"""The numbers that the kernels are tested with: normal ones, limits of formats, and
systematic patterns of bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zerokern.kernels import codecs
from zerokern.kernels.codecs import E3M4, UE3M5, Format8
from zerokern.ops import BLOCK

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (64, 128, 4096 - 64, 4096, 4096 + 64, 3 * 4096 + 192)
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1e-38,
    65504.0,
    65520.0,
    3.3895e38,
    3.4e38,
    -3.4e38,
    math.inf,
    -math.inf,
    math.nan,
)
"""Limits of some format, and what is beyond them."""

FORMATS8 = pytest.mark.parametrize("form", [E3M4, UE3M5], ids=["E3M4", "UE3M5"])
NANS = torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000])
LOW_CLASSES = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
"""Lower halves of fp32 patterns on both sides of each border of rounding to bf16."""


def seeded(
    numel: int,
    seed: int = 0,
    special: bool = False,
) -> Tensor:
    """Return normal fp32 numbers; with `special`, every seventh is a limit of some
    format."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if special:
        positions = torch.arange(seed % 7, numel, 7)
        values[positions] = torch.tensor(SPECIAL)[positions % len(SPECIAL)]
    return values


def mixed(numel: int, seed: int = 0) -> Tensor:
    """Return normal numbers in every other block, and limits of formats among those of
    the rest."""
    odd = (torch.arange(numel) // BLOCK) % 2 == 1
    return torch.where(odd, seeded(numel, seed, special=True), seeded(numel, seed))


def random_bits(
    numel: int,
    seed: int = 0,
    bits: int = 16,
) -> Tensor:
    """Return uniform int64 words from torch's generator, which the code under test does
    not use."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0,
        1 << bits,
        (numel,),
        generator=generator,
    )


def ulp(value: Tensor) -> Tensor:
    """Return the distance of fp32 numbers at the magnitude of an fp64 value."""
    magnitude = value.abs().clamp_min(2.0**-126)
    return torch.exp2(torch.floor(torch.log2(magnitude)) - 23)


def every_high() -> Tensor:
    """Return fp32 numbers with every upper half (sign, exponent, 7 bits) and the
    classes of lower halves."""
    highs = torch.arange(1 << 16)[:, None]
    return codecs.from_bits(((highs << 16) + LOW_CLASSES).flatten())


def low_bytes() -> Tensor:
    """Return fp32 numbers all over the range with every lower half in steps of 2^8, and
    one off them."""
    positive = (0x0000, 0x0001, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F)
    negative = (0x8000, 0xBF80, 0xC2F7, 0xFF7F)
    highs = torch.tensor(positive + negative)
    steps = torch.arange(0, 1 << 16, 1 << 8)[:, None] + torch.tensor([0, 1, 0x80, 0xFF])
    return codecs.from_bits(((highs[:, None, None] << 16) + steps).flatten())


def is_upper_tie(bits: Tensor) -> Tensor:
    """Return where an even upper half is followed by exactly one half: which `split32`
    cannot tell from the next."""
    return bits & 0x1FFFF == 0x8000


def eight_bit_inputs() -> Tensor:
    """Return fp32 blocks of one exponent each, of all exponents mixed, of ordinary
    numbers, and of limits."""
    ordered = every_high().view(-1, BLOCK, len(LOW_CLASSES)).transpose(1, 2).flatten()
    generator = torch.Generator().manual_seed(0)
    shuffled = ordered[torch.randperm(ordered.numel(), generator=generator)]
    sizes = torch.logspace(-44, 38, 512)[:, None]
    decades = sizes * seeded(512 * BLOCK).view(512, BLOCK)
    limits = torch.tensor(SPECIAL).repeat_interleave(BLOCK)
    return torch.cat(
        (ordered, shuffled[: 1 << 16], decades.flatten(), limits, mixed(64 * BLOCK))
    )


def all_codes(form: Format8) -> tuple[Tensor, Tensor]:
    """Return every code under every scale that `encode8` makes."""
    scales = torch.arange(form.floor, 255)
    codes = torch.arange(256).repeat(scales.numel())
    return codes.to(torch.uint8), scales.repeat_interleave(4).to(torch.uint8)
