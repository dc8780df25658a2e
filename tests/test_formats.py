"""The storage formats: what each keeps of a number, and the device functions against
their twins, bit for bit.

Row numbers are those of a survey of faults that users of other optimizers reported;
each comment says what the fault was.
"""

from __future__ import annotations

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import (
    DEVICE,
    SPECIAL,
    VARIANTS,
    WEIGHTS,
    assert_same_bits,
    mapped,
    mixed,
    moments_of,
    placed,
    random_bits,
    scalars_of,
    seeded,
    shard_of,
    weights_of,
)
from kernel_cases import columns_of as columns_of_blocks
from torch import Tensor

from zerokern import ops
from zerokern.kernels import codecs, formats, storage
from zerokern.kernels.codecs import E3M4, UE3M5, Format8
from zerokern.kernels.launch import INTERPRETED, cdiv, launch
from zerokern.ops import BLOCK

FORMATS8 = pytest.mark.parametrize("form", [E3M4, UE3M5], ids=["E3M4", "UE3M5"])
NANS = torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000])
LOW_CLASSES = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
"""Lower halves of fp32 patterns on both sides of each border of rounding to bf16."""


def every_high() -> Tensor:
    """Return fp32 numbers with every upper half (sign, exponent, 7 bits) and the
    classes of lower halves."""
    return codecs.from_bits(
        ((torch.arange(1 << 16)[:, None] << 16) + LOW_CLASSES).flatten()
    )


def is_upper_tie(bits: Tensor) -> Tensor:
    """Return where an even upper half is followed by exactly one half: which `split32`
    cannot tell from the next."""
    return bits & 0x1FFFF == 0x8000


def low_bytes() -> Tensor:
    """Return fp32 numbers all over the range with every lower half in steps of 2^8, and
    one off them."""
    highs = torch.tensor(
        [
            0x0000,
            0x0001,
            0x0080,
            0x3F80,
            0x3F81,
            0x7F7E,
            0x7F7F,
            0x8000,
            0xBF80,
            0xC2F7,
            0xFF7F,
        ]
    )
    steps = torch.arange(0, 1 << 16, 1 << 8)[:, None] + torch.tensor([0, 1, 0x80, 0xFF])
    return codecs.from_bits(((highs[:, None, None] << 16) + steps).flatten())


# ---------------------------------------- device functions, each in a kernel of its own


@triton.jit
def split32_kernel(x_ptr, high_ptr, low_ptr, back_ptr, numel, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    high, low = formats.split32(tl.load(x_ptr + offsets, mask=inside))
    tl.store(high_ptr + offsets, high, mask=inside)
    tl.store(low_ptr + offsets, low, mask=inside)
    tl.store(back_ptr + offsets, formats.join(high, low), mask=inside)


@triton.jit
def split24_kernel(
    x_ptr, random_ptr, high_ptr, low_ptr, back_ptr, numel, TILE: tl.constexpr
):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    random = tl.load(random_ptr + offsets, mask=inside).to(tl.uint32)
    high, low = formats.split24(tl.load(x_ptr + offsets, mask=inside), random)
    tl.store(high_ptr + offsets, high, mask=inside)
    tl.store(low_ptr + offsets, low, mask=inside)
    tl.store(back_ptr + offsets, formats.join(high, low), mask=inside)


@triton.jit
def bf16_kernel(
    x_ptr,
    random_ptr,
    stochastic_ptr,
    nearest_ptr,
    residual_ptr,
    numel,
    TILE: tl.constexpr,
):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    x = tl.load(x_ptr + offsets, mask=inside)
    random = tl.load(random_ptr + offsets, mask=inside).to(tl.uint32)
    nearest = formats.narrow(x, tl.bfloat16)
    tl.store(stochastic_ptr + offsets, formats.bf16_stochastic(x, random), mask=inside)
    tl.store(nearest_ptr + offsets, nearest, mask=inside)
    tl.store(residual_ptr + offsets, x - formats.widen(nearest), mask=inside)


@triton.jit
def encode8_kernel(
    x_ptr,
    random_ptr,
    codes_ptr,
    scale_ptr,
    back_ptr,
    num_blocks,
    MANTISSA: tl.constexpr,
    SIGNED: tl.constexpr,
    FLOOR: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    offsets = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block < num_blocks
    random = tl.load(random_ptr + offsets, mask=inside).to(tl.uint32)
    codes, scale = formats.encode8(
        tl.load(x_ptr + offsets, mask=inside), random, MANTISSA, SIGNED, FLOOR
    )
    tl.store(codes_ptr + offsets, codes, mask=inside)
    tl.store(scale_ptr + block, scale, mask=inside)
    tl.store(
        back_ptr + offsets, formats.decode8(codes, scale, MANTISSA, SIGNED), mask=inside
    )


@triton.jit
def decode8_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    num_blocks,
    MANTISSA: tl.constexpr,
    SIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    offsets = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block < num_blocks
    codes, scale = (
        tl.load(codes_ptr + offsets, mask=inside),
        tl.load(scale_ptr + block, mask=inside, other=127),
    )
    tl.store(
        out_ptr + offsets, formats.decode8(codes, scale, MANTISSA, SIGNED), mask=inside
    )


@triton.jit
def words_kernel(
    key_ptr, block_ptr, first_ptr, second_ptr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.arange(0, TILE)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    first, second = formats.random_words(
        tl.load(key_ptr + row), tl.load(block_ptr + row), BLOCK
    )
    tl.store(first_ptr + offsets, first.to(tl.int64))
    tl.store(second_ptr + offsets, second.to(tl.int64))


def run(kernel: Any, inputs: list[Tensor], outputs: list[torch.dtype]) -> list[Tensor]:
    """Run an element-wise kernel; return outputs of these dtypes."""
    numel, tile = inputs[0].numel(), 1 << 16 if INTERPRETED else 1024
    made = [torch.zeros(numel, dtype=dtype, device=DEVICE) for dtype in outputs]
    launch(
        kernel,
        cdiv(numel, tile),
        made[0].device,
        *placed_all(inputs),
        *made,
        numel,
        TILE=tile,
    )
    return [t.cpu() for t in made]


def placed_all(tensors: list[Tensor]) -> list[Tensor]:
    return [placed(tensor) for tensor in tensors]


def test_split32_equals_its_twin() -> None:
    x = every_high()
    high, low = codecs.split32(x)
    done = run(split32_kernel, [x], [torch.bfloat16, torch.int16, torch.float32])
    for actual, expected in zip(
        done, (high, low, codecs.join32(high, low)), strict=True
    ):
        assert_same_bits(actual, expected)


def test_split24_equals_its_twin() -> None:
    x = torch.cat((every_high(), low_bytes(), seeded(1 << 16)))
    random = random_bits(x.numel())
    high, low = codecs.split24(x, random)
    done = run(split24_kernel, [x, random], [torch.bfloat16, torch.int8, torch.float32])
    for actual, expected in zip(
        done, (high, low, codecs.join24(high, low)), strict=True
    ):
        assert_same_bits(actual, expected)


def test_bf16_roundings_equal_their_twins() -> None:
    # Row 37: an interpreter that rounds differently from the GPU would hide what the
    # GPU does.
    x = torch.cat((every_high(), seeded(1 << 16)))
    random = random_bits(x.numel())
    stochastic, nearest, residual = run(
        bf16_kernel, [x, random], [torch.bfloat16, torch.bfloat16, torch.float32]
    )
    assert_same_bits(stochastic, codecs.bf16_stochastic(x, random))
    assert_same_bits(nearest, x.bfloat16())
    assert_same_bits(residual, x - x.bfloat16().float())
    # Row 36: compilers fold fp32 -> bf16 -> fp32 away, and the residual with it.
    _, _, tie = run(
        bf16_kernel,
        [torch.full((BLOCK,), 1.00390625), random],
        [torch.bfloat16] * 2 + [torch.float32],
    )
    assert (tie == 1.00390625 - 1.0).all()


def eight_bit_inputs() -> Tensor:
    """Return fp32 blocks of one exponent each, of all exponents mixed, of ordinary
    numbers, and of limits."""
    ordered = every_high().view(-1, BLOCK, len(LOW_CLASSES)).transpose(1, 2).flatten()
    shuffled = ordered[
        torch.randperm(ordered.numel(), generator=torch.Generator().manual_seed(0))
    ]
    decades = torch.logspace(-44, 38, 512)[:, None] * seeded(512 * BLOCK).view(
        512, BLOCK
    )
    limits = torch.tensor(SPECIAL).repeat_interleave(BLOCK)
    return torch.cat(
        (ordered, shuffled[: 1 << 16], decades.flatten(), limits, mixed(64 * BLOCK))
    )


@FORMATS8
def test_encode8_equals_its_twin(form: Format8) -> None:
    x = eight_bit_inputs()
    x = x if form.signed else x.abs()
    random, blocks, tile = (
        random_bits(x.numel()),
        x.numel() // BLOCK,
        1024 if INTERPRETED else 16,
    )
    codes, scale = codecs.encode8(x, random, form)
    done = [torch.zeros_like(t, device=DEVICE) for t in (codes, scale, x)]
    launch(
        encode8_kernel,
        cdiv(blocks, tile),
        done[0].device,
        *placed_all([x, random]),
        *done,
        blocks,
        MANTISSA=form.mantissa,
        SIGNED=form.signed,
        FLOOR=form.floor,
        TILE=tile,
        BLOCK=BLOCK,
    )
    for actual, expected in zip(
        done, (codes, scale, codecs.decode8(codes, scale, form)), strict=True
    ):
        assert_same_bits(actual, expected)


def all_codes(form: Format8) -> tuple[Tensor, Tensor]:
    """Return every code under every scale that `encode8` makes."""
    scales = torch.arange(form.floor, 255).repeat_interleave(4).to(torch.uint8)
    return torch.arange(256).repeat(255 - form.floor).to(torch.uint8), scales


@FORMATS8
def test_decode8_equals_its_twin(form: Format8) -> None:
    codes, scales = all_codes(form)
    out, blocks, tile = (
        torch.zeros(codes.numel(), device=DEVICE),
        scales.numel(),
        1024 if INTERPRETED else 16,
    )
    launch(
        decode8_kernel,
        cdiv(blocks, tile),
        out.device,
        *placed_all([codes, scales]),
        out,
        blocks,
        MANTISSA=form.mantissa,
        SIGNED=form.signed,
        TILE=tile,
        BLOCK=BLOCK,
    )
    assert_same_bits(out, codecs.decode8(codes, scales, form))


def test_random_words_equal_their_twin() -> None:
    keys = codecs.mix64(torch.arange(32))
    # Row 6: beyond 32 bits.
    blocks = torch.tensor([0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**40 + 7] * 4)
    done = [torch.zeros(32 * BLOCK, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    launch(
        words_kernel,
        1,
        done[0].device,
        *placed_all([keys, blocks]),
        *done,
        TILE=32,
        BLOCK=BLOCK,
    )
    pairs = [
        codecs.random_words(key, block[None])
        for key, block in zip(keys, blocks, strict=True)
    ]
    for actual, expected in zip(done, zip(*pairs, strict=True), strict=True):
        # Triton converts uint32 to int64 without a sign.
        assert_same_bits(actual, torch.cat(expected))


# ---------------------------------------------------------------- split masters


def check_split32(bits: Tensor) -> None:
    x = codecs.from_bits(bits)
    high, low = codecs.split32(x)
    assert_same_bits(high, x.bfloat16())
    nan = x.isnan()
    back = codecs.bits_of(codecs.join32(high, low))
    # One step nearer to zero.
    expected = torch.where(is_upper_tie(bits) & ~nan, bits - 1, bits)
    assert torch.equal(back[~nan], expected[~nan])
    assert codecs.join32(high, low)[nan].isnan().all()


def test_split32_is_the_cast_and_comes_back() -> None:
    """Row 22: a parameter and its remainder must be torch's cast and the whole number.

    All fp32 numbers come back but the upper ties, which come back one step nearer to
    zero. 16 bits can do no better: between an even bf16 and its neighbours lie 65,535
    fp32 numbers on either side; those up to the middle, 32,768 on either side with both
    ties, round to the even one, and it to itself: 65,537 numbers for one high half, of
    which a low half of 16 bits tells 65,536 apart. (An odd one gets 65,535.) So one
    number in 2 * 65,536 has to give way.
    """
    check_split32(codecs.bits_of(every_high()))
    # Every pattern around 1, on both sides of a binade's border.
    check_split32(torch.arange(0x3F7E0000, 0x3F860000))
    check_split32(torch.arange(0x00000000, 0x00020000))  # the least denormals
    around_one = codecs.split32(codecs.from_bits(torch.arange(0x3F7E0000, 0x3F830000)))[
        0
    ]
    assert [(around_one == x).sum().item() for x in (1.0, 1.0 + 2**-7)] == [
        65_537,
        65_535,
    ]


@pytest.mark.slow
def test_split32_of_all_numbers() -> None:
    # Row 22, all 2^32 patterns: two minutes. Chunks of 1 MiB stay in the cache.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        starts = range(0, 1 << 32, 1 << 17)
        for _ in pool.map(
            lambda start: check_split32(torch.arange(start, start + (1 << 17))), starts
        ):
            pass


@pytest.mark.parametrize("split", ["split32", "split24"])
def test_splits_keep_what_is_not_a_number(split: str) -> None:
    # Row S1: NaN masters became weights of -0.0 or infinity.
    x = torch.cat((codecs.from_bits(NANS), torch.tensor([math.inf, -math.inf])))
    for random in (0, 0x1FF, 0xFFFF):
        words = torch.full((7,), random)
        high, low = (
            codecs.split32(x) if split == "split32" else codecs.split24(x, words)
        )
        assert_same_bits(high, x.bfloat16())
        assert_same_bits(
            (
                codecs.join32(high, low)
                if split == "split32"
                else codecs.join24(high, low)
            ),
            x,
        )


def test_split24_is_the_cast_and_within_a_step() -> None:
    x = torch.cat((low_bytes(), every_high()))
    x = x[x.isfinite()]
    bits = codecs.bits_of(x)
    for seed in range(8):
        random = random_bits(x.numel(), seed)
        high, low = codecs.split24(x, random)
        back = codecs.join24(high, low)
        assert back.isfinite().all()
        assert_same_bits(high, back.bfloat16())
        # What would land on an upper tie goes one more step, either way.
        tie = is_upper_tie(bits + 0xFF & ~0xFF) | is_upper_tie(bits & ~0xFF)
        error = (codecs.bits_of(back) - bits).abs()
        assert (error[~tie] < 0x100).all() and (error < 0x200).all()
        exact = (bits & 0xFF == 0) & ~is_upper_tie(bits)
        assert exact.any() and torch.equal(back[exact], x[exact])


def test_split24_is_unbiased() -> None:
    # Over all its random words the mean is the number itself, also where an upper tie
    # is stepped over.
    x = torch.cat((low_bytes(), seeded(512)))
    x = x[x.abs() < 2.0**127 * 1.99]
    total = torch.zeros(x.numel(), dtype=torch.float64)
    for word in range(512):
        total += codecs.join24(
            *codecs.split24(x, torch.full((x.numel(),), word))
        ).double()
    assert torch.equal(total / 512, x.double())


# ---------------------------------------------------------------- bf16, stochastically


def test_bf16_stochastic_keeps_what_is_not_a_number() -> None:
    # Row S2: NaN became -0.0, and the largest finite number infinity, for most of the
    # random bits.
    words = torch.cat((random_bits(1000), torch.tensor([0, 0x7FFF, 0x8000, 0xFFFF])))
    for nan in codecs.from_bits(NANS):
        assert codecs.bf16_stochastic(nan.repeat(words.numel()), words).isnan().all()
    for x in (math.inf, -math.inf):
        assert (
            codecs.bf16_stochastic(torch.full((words.numel(),), x), words) == x
        ).all()
    largest = torch.finfo(torch.bfloat16).max  # just above 3.3895e38
    for x in (largest, 3.3895e38, 3.4e38, torch.finfo(torch.float32).max):
        for sign in (1, -1):
            rounded = sign * codecs.bf16_stochastic(
                torch.full((words.numel(),), sign * x), words
            )
            assert rounded.isfinite().all() and (rounded == largest).all() == (
                x != 3.3895e38
            )


def test_bf16_stochastic_is_unbiased() -> None:
    # Over all 65,536 random words the mean is the number itself: at a border of
    # binades, among denormals, negative.
    numbers = [
        1.00390625,
        1.9999999,
        -1.0000001,
        3e-39,
        1e-45,
        -7.7e-3,
        12345.678,
        3.0e38,
        *seeded(20).tolist(),
    ]
    words = torch.arange(1 << 16)
    for x in torch.tensor(numbers):
        assert (
            codecs.bf16_stochastic(x.repeat(1 << 16), words).double().mean()
            == x.double()
        )


def test_bf16_stochastic_leaves_bf16_alone() -> None:
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    for word in (0, 1, 0x8000, 0xFFFF):
        assert_same_bits(
            codecs.bf16_stochastic(x.float(), torch.full((1 << 16,), word)), x
        )


# ---------------------------------------------------------------- 8-bit blocks


def values8(form: Format8) -> list[float]:
    """Return what the codes mean under scale 127, from the definition: exponent field
    e, mantissa field f."""
    m, values = form.mantissa, []
    for code in range(256):
        e, f = (code & form.largest) >> m, code & (1 << m) - 1
        magnitude = f / 2**m * 2.0**-6 if e == 0 else (1 + f / 2**m) * 2.0 ** (e - 7)
        values.append(math.copysign(magnitude, -1.0 if code > form.largest else 1.0))
    return values


def test_code_values() -> None:
    # Row 31: a release had a wrong code table.
    for form, some in (
        (
            E3M4,
            {
                0: 0.0,
                1: 2**-10,
                15: 15 / 1024,
                16: 2**-6,
                0x70: 1.0,
                0x7F: 1.9375,
                0x80: -0.0,
                0xFF: -1.9375,
            },
        ),
        (
            UE3M5,
            {
                0: 0.0,
                1: 2**-11,
                31: 31 / 2048,
                32: 2**-6,
                0xE0: 1.0,
                0xE1: 1.03125,
                0xFF: 1.96875,
            },
        ),
    ):
        codes = torch.arange(256).to(torch.uint8)
        decoded = codecs.decode8(codes, torch.full((4,), 127, dtype=torch.uint8), form)
        assert_same_bits(decoded, torch.tensor(values8(form)))
        assert {code: decoded[code].item() for code in some} == some
        positive = decoded[: form.largest + 1]
        assert (positive.diff() > 0).all()
        # The scale is a power of two, exactly, over the whole range: no step
        # underflows, nor its square.
        codes, scales = all_codes(form)
        every = codecs.decode8(codes, scales, form).view(-1, 256).double()
        powers = torch.exp2(torch.arange(form.floor, 255, dtype=torch.float64) - 127)
        assert torch.equal(every, powers[:, None] * decoded.double())
        assert every[0, 1] >= 2.0**-126 and (
            form.signed or every[0, 1] ** 2 >= 2.0**-126
        )


@FORMATS8
def test_codes_come_back(form: Format8) -> None:
    # Row 31. Whatever the random bits: what is representable does not move.
    codes, scales = all_codes(form)
    shuffle = torch.randperm(codes.numel(), generator=torch.Generator().manual_seed(0))
    for order in (torch.arange(codes.numel()), shuffle):
        x = codecs.decode8(codes[order], scales, form)
        for word in (0, 0x5555, 0xFFFF):
            again = codecs.decode8(
                *codecs.encode8(x, torch.full(x.shape, word), form), form
            )
            assert_same_bits(again, x)


@FORMATS8
def test_zero_stays_zero(form: Format8) -> None:
    # Row 30: a dequantised moment that is not exactly zero moves weights that were
    # never used.
    x = eight_bit_inputs()
    x = (x if form.signed else x.abs()).view(-1, BLOCK)
    x[:, ::3] = 0.0
    for word in (0, 0xFFFF):
        again = codecs.decode8(
            *codecs.encode8(x.flatten(), torch.full((x.numel(),), word), form), form
        ).view(-1, BLOCK)
        assert_same_bits(again[:, ::3], x[:, ::3])
        if not form.signed:  # and a root that is not, does not become zero: it divides
            assert (again[x != 0] > 0).all()


@FORMATS8
@pytest.mark.parametrize(
    "magnitude", [1e-30, 1e-18, 1e-9, 1e-4, 1.0, 1e4, 1e9, 1e18, 1e30]
)
def test_encode8_is_monotone_close_and_unbiased(
    form: Format8, magnitude: float
) -> None:
    # Row S9: scales that underflow lose small moments.
    x = torch.logspace(-6, 0, 48, base=2)  # six binades down from the largest
    x = torch.cat((x, torch.linspace(0.0, 2.0**-6, 16))).sort().values * magnitude
    words = torch.arange(4, 1 << 16, 8)
    codes, scale = codecs.encode8(
        x.repeat(words.numel()), words.repeat_interleave(BLOCK), form
    )
    back = codecs.decode8(codes, scale, form).view(-1, BLOCK).double()
    assert (back.diff(dim=1) >= 0).all()  # the same random bits for the whole block
    x = x.double()
    least = max(
        2.0 ** (form.floor - 133 - form.mantissa),
        x[-1].item() * 2.0 ** (-5 - form.mantissa),
    )
    step = (torch.exp2(x.log2().floor()) * 2.0**-form.mantissa).clamp_min(least)
    assert ((back - x).abs() < step).all()
    # Below, steps are those of the least scale: for roots, 2^-63.
    normal = x >= 2.0 ** (form.floor - 133)
    assert normal[-16:].all() == (form.signed or magnitude >= 1e-9)
    bias = (back.mean(dim=0) - x).abs() / step
    assert (bias[form.signed | (x >= step)] <= 2.0**-13).all()
    nearest = codecs.decode8(
        *codecs.encode8(x.float(), torch.full((BLOCK,), 0x8000), form), form
    ).double()
    assert ((nearest - x).abs() <= step / 2)[form.signed | (x >= step)].all()
    # So a step is at most a sixteenth (a thirty-second) of what it rounds, within the
    # upper six binades.
    assert ((step / x)[normal & (x >= x[-1] / 32)] <= 2.0**-form.mantissa).all()


@FORMATS8
def test_the_largest_has_a_code(form: Format8) -> None:
    # No carry leaves the format when a block's largest is rounded up, and it is not
    # rounded down for that either: a largest between the last code and a power of two
    # takes the next scale.
    m = form.mantissa
    numbers = codecs.from_bits(
        torch.linspace(0x30000000, 0x7F000000, 1 << 9, dtype=torch.float64).long()
    )
    numbers = torch.cat((numbers, torch.linspace(2 - 2.0**-m, 2.0, 9)))
    words, x = torch.arange(128, 1 << 16, 256), torch.zeros(numbers.numel(), BLOCK)
    x[:, 7] = numbers
    total = torch.zeros(numbers.numel(), dtype=torch.float64)
    for word in words:
        random = torch.full((x.numel(),), int(word))
        back = codecs.decode8(*codecs.encode8(x.flatten(), random, form), form).view(
            -1, BLOCK
        )[:, 7]
        assert ((back / numbers - 1).abs() < 2.0**-m).all()
        total += back.double()
    assert (
        (total / words.numel() / numbers.double() - 1).abs() < 2.0 ** (-m - 8)
    ).all()


@FORMATS8
def test_encode8_saturates(form: Format8) -> None:
    # Row S8: one non-finite element must not reset its neighbours to something
    # unbounded, or itself to zero.
    x = torch.ones(5, BLOCK)
    x[:, 3] = torch.tensor(
        [math.inf, math.nan, math.nan, torch.finfo(torch.float32).max, -math.inf]
    )
    x[2, 3].neg_()  # a NaN's sign means nothing
    x = x if form.signed else torch.where(x < 0, -x, x)
    for word in (0, 0xFFFF):
        codes, scale = codecs.encode8(x.flatten(), torch.full((x.numel(),), word), form)
        back = codecs.decode8(codes, scale, form).view(-1, BLOCK)
        assert (scale == 254).all() and back.isfinite().all()
        largest = (2 - 2.0**-form.mantissa) * 2.0**127
        assert back[:, 3].tolist() == [largest] * 4 + [
            -largest if form.signed else largest
        ]


# ---------------------------------------------------------------- random bits


def test_random_words_are_those_of_every_release() -> None:
    # Checkpoints stay reproducible. SplitMix64 is the mixing of consecutive multiples
    # of the golden ratio; its first numbers for the seed 1234567 are published.
    mixed_words = codecs.mix64(1234567 + torch.arange(1, 4) * codecs.GOLDEN)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [word % 2**64 for word in mixed_words.tolist()] == published
    # The 32-bit mixing, written out in Python's integers.
    for x in (0, 1, 0x12345678, 0xFFFFFFFF):
        y = (x ^ x >> 16) * 0x7FEB352D % 2**32
        y = (y ^ y >> 15) * 0x846CA68B % 2**32
        assert codecs.mix32(torch.tensor(x)) == y ^ y >> 16
    first, second = codecs.random_words(
        torch.tensor(0x0123456789ABCDEF), torch.tensor([0, 2**40])
    )
    assert first[[0, 1, 63, 64]].tolist() == [
        616247225,
        425284141,
        2620632769,
        398447162,
    ]
    assert second[[0, 1, 63, 64]].tolist() == [
        1908608398,
        1511534561,
        2113392994,
        2106764827,
    ]


def test_random_words_are_uniform_and_independent() -> None:
    blocks = torch.arange(4096)
    # Of two consecutive steps.
    keys = codecs.mix64(7 + torch.arange(1, 3) * codecs.GOLDEN)
    streams = [word for key in keys for word in codecs.random_words(key, blocks)]
    bits = torch.stack(
        [(stream[:, None] >> torch.arange(32)) & 1 for stream in streams]
    ).float()  # [4, n, 32]
    n, deviations = bits.shape[1], 5.5
    assert ((bits.mean(dim=1) - 0.5).abs() < deviations * 0.5 / math.sqrt(n)).all()
    # No two of the 4 * 32 bits agree more or less often than chance, nor two
    # neighbours' bits.
    signs = (2 * bits - 1).permute(1, 0, 2).reshape(n, -1)
    for other in (signs, signs.roll(1, 0), signs.roll(BLOCK, 0)):
        correlation = signs.T @ other / n
        if other is signs:
            correlation.fill_diagonal_(0)
        assert (correlation.abs() < deviations / math.sqrt(n)).all()
    # The sixteen bits that a rounding takes: 1024 bins, chi-square within five
    # deviations of its mean.
    for stream in streams:
        for half in (stream & 0xFFFF, stream >> 16):
            counts = torch.bincount(half >> 6, minlength=1024).double()
            chi_square = ((counts - n / 1024) ** 2 / (n / 1024)).sum()
            assert abs(chi_square - 1023) < 5 * math.sqrt(2 * 1023)
    # The four roundings of an element, and those of the next step, by their upper five
    # bits in pairs: 32 * 32 bins.
    halves = [
        half >> 11 for stream in streams for half in (stream & 0xFFFF, stream >> 16)
    ]
    for one, other in itertools.combinations(halves, 2):
        counts = torch.bincount(one * 32 + other, minlength=1024).double()
        chi_square = ((counts - n / 1024) ** 2 / (n / 1024)).sum()
        assert abs(chi_square - 1023) < 5 * math.sqrt(2 * 1023)


def test_random_words_do_not_depend_on_the_cut() -> None:
    # Rows 34 and 35: an element's words are those of its place in the parameter,
    # whatever shard it is in.
    key, blocks = torch.tensor(-5), torch.arange(40) + 2**33
    whole = codecs.random_words(key, blocks)
    for cut in (1, 13, 39):
        parts = [
            codecs.random_words(key, part) for part in (blocks[:cut], blocks[cut:])
        ]
        for words, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(words, torch.cat(pieces))


# ---------------------------------------------------------- out of the formats and back


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_state_leaves_and_comes_back(weights: str, moments: str) -> None:
    # Row 24: what a checkpoint holds is fp32, and loading it gives the same numbers,
    # bit for bit.
    variant = VARIANTS["amsgrad"]
    shard = shard_of(variant, weights, moments, mixed(8 * BLOCK))
    # In formats that round at random, these are no roundings to nearest.
    for step in range(3):
        columns = columns_of_blocks([0] * 8)
        ops.update_(
            shard,
            seeded(8 * BLOCK, step),
            **scalars_of(variant, step=step),
            columns=columns,
            backend="torch",
        )
    again = mapped(shard, torch.zeros_like)
    again.param.copy_(weights_of(shard))
    storage.store_master(again, weights_of(shard))
    for moment, x, form in zip(
        again.moments, moments_of(shard), (E3M4, UE3M5, None), strict=True
    ):
        storage.store_moment(moment, x, None, form)
    assert_same_bits(again.param, shard.param)
    assert_same_bits(weights_of(again), weights_of(shard))
    for actual, expected in zip(moments_of(again), moments_of(shard), strict=True):
        assert_same_bits(actual, expected)
    # 8-bit blocks may come back with another scale for the same numbers.
    if moments != "8bit":
        assert_same_bits(again, shard)


def test_what_is_loaded_is_rounded_to_nearest() -> None:
    # Row 25: states from another recipe are taken as they are, or rounded once; no
    # random bits are spent on them.
    x = seeded(64 * BLOCK)
    shard = shard_of(VARIANTS["amsgrad"], "split24", "bf16", x, x, x.abs())
    step = torch.exp2(x.abs().log2().floor())
    for loaded, exact, bits in (
        (weights_of(shard), x, 15),
        *zip(moments_of(shard)[:2], (x, x.abs()), (7, 7), strict=True),
    ):
        error = (loaded - exact).abs()
        # What comes to lie on an upper tie of split24, one number in 512, goes one step
        # more.
        assert (error <= step * 1.5 * 2.0**-bits).all() and (
            error <= step * 2.0 ** (-bits - 1)
        ).float().mean() > 0.99
    blocks = x.sort().values  # neighbours in size share a block, and codes are normal
    m, v, _ = moments_of(
        shard_of(VARIANTS["amsgrad"], "fp32", "8bit", blocks, blocks, blocks**2)
    )
    for loaded, bits in ((m, 4), (v.sqrt(), 5)):  # type: ignore[union-attr]
        exact = blocks if bits == 4 else blocks.abs()
        largest = blocks.abs().view(-1, BLOCK).amax(dim=1).repeat_interleave(BLOCK)
        half = torch.exp2(
            torch.maximum(exact.abs(), largest / 32).log2().floor()
        ) * 2.0 ** (-bits - 1)
        assert ((loaded - exact).abs() <= half * (1 + 2**-10)).all()
