"""The storage formats in plain torch: the specification of every device function in
`formats.py`, bit for bit.

A rounding that must not be biased is stochastic: it goes up with the probability of the
part that is cut off. Its random bits are a hash of (key of parameter and step, index of
the element in its parameter), so they depend neither on the world size nor on buckets
or stages, and torch's generators are never touched.

What is added is derived from magnitudes as integers, so what is representable is never
changed, and zero stays zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import BLOCK

NAN = 0x7FC0
"""The bf16 NaN that torch's own cast gives."""

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, as int64: consecutive multiples lie far apart (Knuth,
TAOCP 6.4)."""

MIX64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Multipliers of SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014; Stafford's
variant 13)."""

LANE = 0x9E3779B1
"""2^32 over the golden ratio, made odd: a product with it spreads what differs in low
bits over the upper ones."""

MIX32 = (0x7FEB352D, 0x846CA68B)
"""Multipliers of a 32-bit mixing function with low bias (C. Wellons,
hash-prospector)."""


class Format8(NamedTuple):
    """An 8-bit float: 3 bits of exponent, `mantissa` bits, subnormals, and a
    power-of-two scale per block of 64."""

    mantissa: int
    signed: bool
    floor: int
    """Least scale: far above the least fp32 exponent, so that no step, and no square of
    one, underflows."""

    @property
    def largest(self) -> int:
        """The largest magnitude code."""
        return (8 << self.mantissa) - 1


E3M4 = Format8(mantissa=4, signed=True, floor=16)
"""First moments: a sign and 7 bits; steps of 3 to 6 % down to 1/64 of the block's
largest, then even steps."""

UE3M5 = Format8(mantissa=5, signed=False, floor=75)
"""Roots of second moments: 8 bits, steps of 1.6 to 3 %. Never 0 unless the moment is,
for it divides."""


# ---------------------------------------------------------------- random bits


def mix64(x: Tensor) -> Tensor:
    """Return a bijective hash of int64 words."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * MIX64[0]
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * MIX64[1]
    return x ^ (x >> 31 & (1 << 33) - 1)


def mix32(x: Tensor) -> Tensor:
    """Return a bijective hash of 32-bit words, which are kept in int64."""
    x = (x ^ x >> 16) * MIX32[0] & WORD
    x = (x ^ x >> 15) * MIX32[1] & WORD
    return x ^ x >> 16


def random_words(key: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return two random 32-bit words for each element of some blocks of one parameter.

    Args:
        key: int64, of the parameter and the step (a row of `keys`).
        blocks: int64 [n], indices of blocks in the parameter.

    Returns:
        int64 [n * BLOCK], twice. The first serves the moments (16 bits each); of the
            second the lower half serves the
        largest moment and the upper one the weight.
    """
    block_key = mix64(key + blocks * GOLDEN)[:, None]
    lanes = torch.arange(BLOCK, device=blocks.device)
    first = mix32((block_key & WORD) + lanes * LANE & WORD)
    second = (first ^ (block_key >> 32 & WORD)) * LANE & WORD
    second = second ^ second >> 16
    return first.reshape(-1), second.reshape(-1)


# ---------------------------------------------------------------- bf16


def bits_of(x: Tensor) -> Tensor:
    """Return the patterns of fp32 numbers as int64 from 0 to 2^32 - 1."""
    return x.view(torch.int32).long() & WORD


def from_bits(bits: Tensor) -> Tensor:
    """Return the fp32 numbers with these patterns."""
    return bits.to(torch.int32).view(torch.float32)


def bf16_from_bits(bits: Tensor) -> Tensor:
    """Return the bf16 numbers with these 16-bit patterns."""
    return bits.to(torch.int16).view(torch.bfloat16)


def bf16_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down at random so that the expectation is x.

    NaN stays NaN, infinity infinity; a finite number stays finite: past the largest
    bf16, 3.3895e38, it saturates.

    Args:
        x: fp32.
        random: int64, 16 random bits each.
    """
    bits = bits_of(x)
    rounded = bits + random >> 16
    rounded = torch.where(rounded & 0x7FFF == 0x7F80, rounded - 1, rounded)
    special = torch.where(x.isnan(), NAN, bits >> 16)
    return bf16_from_bits(
        torch.where(bits & 0x7F800000 == 0x7F800000, special, rounded)
    )


def nearest_high(bits: Tensor) -> Tensor:
    """Return the upper half of fp32 patterns after rounding to bf16, to nearest even.
    For what is not NaN."""
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


# ---------------------------------------------------------------- split masters


def split32(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into its bf16 rounding and 16 more bits, from which `join32` makes x
    again.

    The high half is torch's cast to bf16, bit for bit. The low half is the distance
    from it in fp32 steps. 65,537 numbers round to an even bf16 (both ties do), and 16
    bits tell 65,536 apart; so the upper tie, one number in 131,072, is moved by one
    fp32 step toward zero. Every other number comes back exactly. NaN stays NaN.

    Args:
        x: fp32.

    Returns:
        bf16 and int16 of the same shape.
    """
    bits = bits_of(x)
    high = nearest_high(bits)
    low = (bits - (high << 16)).clamp(max=0x7FFF)
    nan = x.isnan()
    return bf16_from_bits(high.masked_fill(nan, NAN)), low.masked_fill(nan, 0).to(
        torch.int16
    )


def join32(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 numbers that `split32` took apart."""
    return from_bits((high.view(torch.int16).long() << 16) + low.long() & WORD)


def split24(x: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32, rounded stochastically to 24 bits, into its bf16 rounding and 8 more
    bits.

    What has no code (the upper tie, as in `split32`) goes one 24-bit step up or down,
    by one more random bit.

    Args:
        x: fp32.
        random: int64, 9 random bits each.

    Returns:
        bf16, torch's cast of what `join24` returns, and int8, of the same shape.
    """
    bits = bits_of(x)
    rounded = bits + (random & 0xFF) & ~0xFF
    rounded = torch.where(rounded & 0x7F800000 == 0x7F800000, rounded - 0x100, rounded)
    step = torch.where(random & 0x100 != 0, 0x100, -0x100)
    rounded = torch.where(rounded & 0x1FFFF == 0x8000, rounded + step, rounded)
    rounded = torch.where(bits & 0x7F800000 == 0x7F800000, bits, rounded)
    high = nearest_high(rounded)
    low = rounded - (high << 16) >> 8
    nan = x.isnan()
    return bf16_from_bits(high.masked_fill(nan, NAN)), low.masked_fill(nan, 0).to(
        torch.int8
    )


def join24(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 numbers, of 16 significant bits, that `split24` made."""
    return from_bits((high.view(torch.int16).long() << 16) + (low.long() << 8) & WORD)


# ---------------------------------------------------------------- 8-bit blocks


def encode8(x: Tensor, random: Tensor, form: Format8) -> tuple[Tensor, Tensor]:
    """Round fp32 stochastically to 8-bit floats with one scale per block.

    The scale is the least power of two for which the block's largest magnitude has a
    code, so rounding up cannot overflow. What is not finite counts as the largest fp32
    number.

    Args:
        x: fp32 [n * BLOCK].
        random: int64 [n * BLOCK], 16 random bits each.
        form: E3M4 or UE3M5.

    Returns:
        uint8 codes [n * BLOCK] and uint8 scales [n], biased exponents.
    """
    bits = bits_of(x)
    magnitude = (bits & 0x7FFFFFFF).clamp(max=0x7F7FFFFF).view(-1, BLOCK)
    m = form.mantissa
    largest = magnitude.amax(dim=1, keepdim=True)
    scale = (largest + (1 << 23 - m) - 1 >> 23).clamp(form.floor, 254)
    # In units of the smallest step.
    steps = from_bits(magnitude) * from_bits(260 + m - scale << 23)
    # Subnormal codes: even steps, as in the binade above, once this is added.
    below = steps < 1 << m
    steps = torch.where(below, steps + float(1 << m), steps)
    codes = bits_of(steps) + (random.view(-1, BLOCK) << 7 - m) >> 23 - m
    codes = (codes - torch.where(below, 127 + m << m, 126 + m << m)).clamp(
        max=form.largest
    )
    if form.signed:
        negative = (bits >> 31 & 1).masked_fill(x.isnan(), 0).view(-1, BLOCK)
        codes = codes | negative << 7
    else:
        codes = torch.where(magnitude > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view(-1), scale.to(torch.uint8).view(-1)


def decode8(codes: Tensor, scale: Tensor, form: Format8) -> Tensor:
    """Return the fp32 numbers [n * BLOCK] of 8-bit codes; `encode8` gives them back as
    they are."""
    m = form.mantissa
    code = codes.long().view(-1, BLOCK)
    magnitude = code & form.largest
    exponent = magnitude >> m
    steps = torch.where(
        exponent == 0,
        magnitude,
        (magnitude & (1 << m) - 1 | 1 << m) << (exponent - 1).clamp(min=0),
    )
    x = steps.float() * from_bits(scale.long()[:, None] - 6 - m << 23)
    return torch.where(code > form.largest, -x, x).view(-1)
