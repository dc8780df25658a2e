"""How a number is stored: device functions between fp32 and the storage formats. Twins,
and what each format is for, in `codecs.py`.

Rounding is done in integer arithmetic. Triton's interpreter truncates to bf16 where a
GPU rounds to nearest even, and breaks bf16 subnormals; integers give the same bits in
both, so what the tests verify is what ships. They also keep compilers from folding a
round trip through a storage format away.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
"""The floating formats, and what Triton calls them."""


@triton.jit
def bits_of(x):
    """Return the patterns of fp32 numbers as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def from_bits(bits):
    """Return the fp32 numbers with these uint32 patterns."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """Return x (bf16, fp16 or fp32) as fp32. Exact."""
    if x.dtype == tl.bfloat16:
        return from_bits(x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def nearest_high(bits):
    """Return the upper half of fp32 patterns after rounding to bf16, to nearest even.
    For what is not NaN."""
    # 0x7FFF plus the last bit that stays carries into it exactly when nearest even
    # rounds up.
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def bf16_from_bits(bits):
    """Return the bf16 numbers with these patterns."""
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return x (fp32) as dtype (bf16, fp16 or fp32), rounded to nearest even. NaN stays
    NaN."""
    if dtype == tl.bfloat16:
        # The carry would turn the NaN 0x7FFFFFFF into -0.0, hence the quiet NaN beside
        # it.
        return bf16_from_bits(tl.where(x == x, nearest_high(bits_of(x)), 0x7FC0))
    else:
        return x.to(dtype)


@triton.jit
def finite_room(bits, random):
    """Return random bits (uint32), cut so that adding them to a pattern never reaches
    infinity, nor leaves it."""
    room = 0x7F7FFFFF - (bits & 0x7FFFFFFF).to(tl.int32)
    random = random.to(tl.int32)
    random = tl.where(random > room, room, random)
    return tl.where(random < 0, 0, random).to(tl.uint32)


@triton.jit
def bf16_stochastic(x, random):
    """Return x (fp32) as bf16, rounded up or down by 16 random bits. Finite numbers
    stay finite."""
    bits = bits_of(x)
    rounded = bits + finite_room(bits, random)
    return bf16_from_bits(tl.where(x == x, rounded, 0x7FC00000) >> 16)


@triton.jit
def split32(x):
    """Return the bf16 rounding of x (fp32) and its int16 distance from it. The inverse
    is `join`."""
    bits = tl.where(x == x, bits_of(x), 0x7FC00000)
    high = nearest_high(bits)
    low = (bits - (high << 16)).to(tl.int32, bitcast=True)
    return bf16_from_bits(high), tl.where(low == 0x8000, 0x7FFF, low).to(tl.int16)


@triton.jit
def split24(x, random):
    """Return the bf16 rounding and an int8 low byte of x (fp32), rounded to 24 bits by
    9 random bits."""
    bits = tl.where(x == x, bits_of(x), 0x7FC00000)
    rounded = (bits + finite_room(bits, random & 0xFF)) & 0xFFFFFF00
    beside = tl.where((random & 0x100) != 0, rounded + 0x100, rounded - 0x100)
    rounded = tl.where((rounded & 0x1FFFF) == 0x8000, beside, rounded)
    high = nearest_high(rounded)
    low = (rounded - (high << 16)).to(tl.int32, bitcast=True) >> 8
    return bf16_from_bits(high), low.to(tl.int8)


@triton.jit
def join(high, low):
    """Return the fp32 numbers that `split32` (int16 low) or `split24` (int8 low) took
    apart."""
    top = high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    distance = low.to(tl.int32)
    if low.dtype == tl.int8:
        distance = distance << 8
    return from_bits(top + distance.to(tl.uint32, bitcast=True))


@triton.jit
def encode8(
    x, random, MANTISSA: tl.constexpr, SIGNED: tl.constexpr, FLOOR: tl.constexpr
):
    """Return the uint8 codes of x (fp32 [rows, BLOCK]), rounded by 16 random bits, and
    the uint8 scales [rows, 1].

    Scaled to the least exponents of fp32, a number's own bits end in those of its code,
    subnormal ones too.
    """
    # What lies beyond the largest code of the largest scale gets that code.
    largest: tl.constexpr = 0x7F800000 - (1 << (23 - MANTISSA))
    magnitude = bits_of(x) & 0x7FFFFFFF
    magnitude = tl.where(magnitude > largest, largest, magnitude)
    scale = (
        tl.max(magnitude.to(tl.int32), axis=1, keep_dims=True)
        + ((1 << (23 - MANTISSA)) - 1)
    ) >> 23
    scale = tl.where(scale < FLOOR, FLOOR, scale).to(tl.uint32)
    # 2 ** -126.
    tiny = (
        from_bits(magnitude) * from_bits((260 - scale) << 23) * 1.1754943508222875e-38
    )
    codes = (bits_of(tiny) + (random << (7 - MANTISSA))) >> (23 - MANTISSA)
    if SIGNED:
        codes = codes | tl.where(x == x, (bits_of(x) >> 31) << 7, 0)
    else:
        least = tl.where(magnitude > 1, 1, magnitude)
        codes = tl.where(codes > least, codes, least)
    return codes.to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def decode8(codes, scale, MANTISSA: tl.constexpr, SIGNED: tl.constexpr):
    """Return the fp32 numbers of uint8 codes [rows, BLOCK] and scales [rows, 1].
    Exact."""
    code = codes.to(tl.uint32)
    bits = (code & ((8 << MANTISSA) - 1)) << (23 - MANTISSA)
    if SIGNED:
        bits = bits | ((code >> 7) << 31)
    # 2 ** 120.
    return from_bits(bits) * 1.329227995784916e36 * from_bits(scale.to(tl.uint32) << 23)


@triton.jit
def mix64(x):
    """Return a bijective hash of int64 words."""
    x = (
        x ^ (x.to(tl.uint64, bitcast=True) >> 30).to(tl.int64, bitcast=True)
    ) * -4658895280553007687
    x = (
        x ^ (x.to(tl.uint64, bitcast=True) >> 27).to(tl.int64, bitcast=True)
    ) * -7723592293110705685
    return x ^ (x.to(tl.uint64, bitcast=True) >> 31).to(tl.int64, bitcast=True)


@triton.jit
def mix32(x):
    """Return a bijective hash of uint32 words."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_words(key, block, BLOCK: tl.constexpr):
    """Return two random uint32 words for each element of blocks of parameters.

    Args:
        key: int64 [rows, 1], of the block's parameter and the step.
        block: int64 [rows, 1], index of the block in its parameter.
    """
    block_key = mix64(key + block * -7046029254386353131)
    lanes = (tl.arange(0, BLOCK)[None, :]).to(tl.uint32) * 0x9E3779B1
    first = mix32(block_key.to(tl.uint32) + lanes)
    second = (
        first ^ (block_key.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    ) * 0x9E3779B1
    return first, second ^ (second >> 16)
