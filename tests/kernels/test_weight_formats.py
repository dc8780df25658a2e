"""What split masters and stochastically rounded bf16 weights keep of a number."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from backends import assert_same_bits
from samples import NANS, every_high, is_upper_tie, low_bytes, random_bits, seeded
from torch import Tensor

from zerokern.kernels import codecs

# ------------------------------------------------------------------------ split masters


def check_split32(bits: Tensor) -> None:
    """Split numbers of these bits and join them: only upper ties may change."""
    x = codecs.from_bits(bits)
    high, low = codecs.split32(x)
    back = codecs.join32(high, low)
    nan = x.isnan()
    assert_same_bits(high, x.bfloat16())
    # One step nearer to zero.
    expected = torch.where(is_upper_tie(bits), bits - 1, bits)
    assert torch.equal(codecs.bits_of(back)[~nan], expected[~nan])
    assert back[nan].isnan().all()


def test_split32_is_the_cast_and_comes_back() -> None:
    """A parameter and its remainder must be torch's cast and the whole number.

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
    # The least denormals.
    check_split32(torch.arange(0x00000000, 0x00020000))

    around_one = codecs.from_bits(torch.arange(0x3F7E0000, 0x3F830000))
    highs, _ = codecs.split32(around_one)
    assert (highs == 1.0).sum() == 65_537
    assert (highs == 1.0 + 2**-7).sum() == 65_535


@pytest.mark.slow
def test_split32_of_all_numbers() -> None:
    """All 2^32 patterns, in two minutes."""
    # Chunks of 1 MiB stay in the cache.
    chunk = 1 << 17

    def check(start: int) -> None:
        check_split32(torch.arange(start, start + chunk))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(check, range(0, 1 << 32, chunk)):
            pass


@pytest.mark.parametrize("split", ["split32", "split24"])
def test_splits_keep_what_is_not_a_number(split: str) -> None:
    """NaN must not become -0.0 or infinity."""
    x = torch.cat((codecs.from_bits(NANS), torch.tensor([math.inf, -math.inf])))
    for random in (0, 0x1FF, 0xFFFF):
        if split == "split32":
            high, low = codecs.split32(x)
            back = codecs.join32(high, low)
        else:
            high, low = codecs.split24(x, torch.full((7,), random))
            back = codecs.join24(high, low)
        assert_same_bits(high, x.bfloat16())
        assert_same_bits(back, x)


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
        assert (error[~tie] < 0x100).all()
        assert (error < 0x200).all()
        exact = (bits & 0xFF == 0) & ~is_upper_tie(bits)
        assert exact.any()
        assert torch.equal(back[exact], x[exact])


def test_split24_is_unbiased() -> None:
    """Over all its random words the mean is the number itself, also where an upper tie
    is stepped over."""
    x = torch.cat((low_bytes(), seeded(512)))
    x = x[x.abs() < 2.0**127 * 1.99]
    total = torch.zeros(x.numel(), dtype=torch.float64)
    for word in range(512):
        high, low = codecs.split24(x, torch.full((x.numel(),), word))
        total += codecs.join24(high, low).double()
    assert torch.equal(total / 512, x.double())


# ----------------------------------------------------------------- bf16, stochastically


def test_bf16_stochastic_keeps_what_is_not_a_number() -> None:
    """Whatever the random bits: NaN must not become -0.0, nor the largest finite number
    infinity."""
    words = torch.cat((random_bits(1000), torch.tensor([0, 0x7FFF, 0x8000, 0xFFFF])))

    def rounded(x: float) -> Tensor:
        return codecs.bf16_stochastic(torch.full((words.numel(),), x), words)

    for nan in codecs.from_bits(NANS):
        assert codecs.bf16_stochastic(nan.repeat(words.numel()), words).isnan().all()
    for x in (math.inf, -math.inf):
        assert (rounded(x) == x).all()

    largest = torch.finfo(torch.bfloat16).max
    below = 3.3895e38
    for x in (largest, below, 3.4e38, torch.finfo(torch.float32).max):
        for sign in (1, -1):
            magnitudes = sign * rounded(sign * x)
            assert magnitudes.isfinite().all()
            assert (magnitudes == largest).all() == (x != below)


def test_bf16_stochastic_is_unbiased() -> None:
    """Over all 65,536 random words the mean is the number itself: at a border of
    binades, among denormals, negative."""
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
        rounded = codecs.bf16_stochastic(x.repeat(1 << 16), words)
        assert rounded.double().mean() == x.double()


def test_bf16_stochastic_leaves_bf16_alone() -> None:
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    for word in (0, 1, 0x8000, 0xFFFF):
        words = torch.full((1 << 16,), word)
        assert_same_bits(codecs.bf16_stochastic(x.float(), words), x)
