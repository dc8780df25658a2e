"""What the 8-bit blocks of moments keep of a number."""

from __future__ import annotations

import math

import pytest
import torch
from backends import assert_same_bits
from samples import FORMATS8, all_codes, eight_bit_inputs
from torch import Tensor

from zerokern.kernels import codecs
from zerokern.kernels.codecs import E3M4, UE3M5, Format8
from zerokern.ops import BLOCK

SOME_CODES = {
    E3M4: {
        0: 0.0,
        1: 2**-10,
        15: 15 / 1024,
        16: 2**-6,
        0x70: 1.0,
        0x7F: 1.9375,
        0x80: -0.0,
        0xFF: -1.9375,
    },
    UE3M5: {
        0: 0.0,
        1: 2**-11,
        31: 31 / 2048,
        32: 2**-6,
        0xE0: 1.0,
        0xE1: 1.03125,
        0xFF: 1.96875,
    },
}
"""What some codes mean under scale 127, by hand."""


def values8(form: Format8) -> list[float]:
    """Return what the codes mean under scale 127, from the definition: exponent field
    e, mantissa field f."""
    m, values = form.mantissa, []
    for code in range(256):
        e = (code & form.largest) >> m
        f = code & (1 << m) - 1
        magnitude = f / 2**m * 2.0**-6 if e == 0 else (1 + f / 2**m) * 2.0 ** (e - 7)
        values.append(math.copysign(magnitude, -1.0 if code > form.largest else 1.0))
    return values


def stored(x: Tensor, word: int, form: Format8) -> Tensor:
    """Return numbers as they come back from 8-bit blocks, all rounded with one random
    word."""
    codes, scale = codecs.encode8(x, torch.full((x.numel(),), word), form)
    return codecs.decode8(codes, scale, form)


def test_code_values() -> None:
    for form, some in SOME_CODES.items():
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
        least = every[0, 1]
        assert least >= 2.0**-126
        assert form.signed or least**2 >= 2.0**-126


@FORMATS8
def test_codes_come_back(form: Format8) -> None:
    """Whatever the random bits: what is representable does not move."""
    codes, scales = all_codes(form)
    generator = torch.Generator().manual_seed(0)
    shuffled = codes[torch.randperm(codes.numel(), generator=generator)]
    for order in (codes, shuffled):
        x = codecs.decode8(order, scales, form)
        for word in (0, 0x5555, 0xFFFF):
            assert_same_bits(stored(x, word, form), x)


@FORMATS8
def test_zero_stays_zero(form: Format8) -> None:
    """A dequantised moment that is not exactly zero would move weights that were never
    used."""
    x = eight_bit_inputs()
    x = (x if form.signed else x.abs()).view(-1, BLOCK)
    x[:, ::3] = 0.0
    for word in (0, 0xFFFF):
        again = stored(x.flatten(), word, form).view(-1, BLOCK)
        assert_same_bits(again[:, ::3], x[:, ::3])
        # A root that is not zero does not become zero, since it divides.
        if not form.signed:
            assert (again[x != 0] > 0).all()


@FORMATS8
@pytest.mark.parametrize(
    "magnitude",
    [1e-30, 1e-18, 1e-9, 1e-4, 1.0, 1e4, 1e9, 1e18, 1e30],
)
def test_encode8_is_monotone_close_and_unbiased(
    form: Format8,
    magnitude: float,
) -> None:
    """Scales that underflow would lose small moments."""
    # Six binades down from the largest.
    x = torch.logspace(-6, 0, 48, base=2)
    x = torch.cat((x, torch.linspace(0.0, 2.0**-6, 16))).sort().values * magnitude
    # The same random bits for a whole block.
    words = torch.arange(4, 1 << 16, 8)
    random = words.repeat_interleave(BLOCK)
    codes, scale = codecs.encode8(x.repeat(words.numel()), random, form)
    back = codecs.decode8(codes, scale, form).view(-1, BLOCK).double()
    assert (back.diff(dim=1) >= 0).all()

    nearest = stored(x, 0x8000, form).double()
    x = x.double()
    least_normal = 2.0 ** (form.floor - 133)
    least = max(least_normal, x[-1].item() / 32) * 2.0**-form.mantissa
    step = (torch.exp2(x.log2().floor()) * 2.0**-form.mantissa).clamp_min(least)
    assert ((back - x).abs() < step).all()
    # Below, steps are those of the least scale: for roots, 2^-63.
    normal = x >= least_normal
    assert normal[-16:].all() == (form.signed or magnitude >= 1e-9)

    large = form.signed | (x >= step)
    bias = (back.mean(dim=0) - x).abs() / step
    assert (bias[large] <= 2.0**-13).all()
    assert ((nearest - x).abs() <= step / 2)[large].all()
    # So a step is at most a sixteenth (a thirty-second) of what it rounds, within the
    # upper six binades.
    assert ((step / x)[normal & (x >= x[-1] / 32)] <= 2.0**-form.mantissa).all()


@FORMATS8
def test_the_largest_has_a_code(form: Format8) -> None:
    """No carry leaves the format when a block's largest is rounded up, and it is not
    rounded down for that either.

    A largest between the last code and a power of two takes the next scale.
    """
    m = form.mantissa
    bits = torch.linspace(0x30000000, 0x7F000000, 1 << 9, dtype=torch.float64).long()
    last_codes = torch.linspace(2 - 2.0**-m, 2.0, 9)
    numbers = torch.cat((codecs.from_bits(bits), last_codes))
    x = torch.zeros(numbers.numel(), BLOCK)
    x[:, 7] = numbers
    total = torch.zeros(numbers.numel(), dtype=torch.float64)
    words = range(128, 1 << 16, 256)
    for word in words:
        back = stored(x.flatten(), word, form).view(-1, BLOCK)[:, 7]
        assert ((back / numbers - 1).abs() < 2.0**-m).all()
        total += back.double()
    bias = total / len(words) / numbers.double() - 1
    assert (bias.abs() < 2.0 ** (-m - 8)).all()


@FORMATS8
def test_encode8_saturates(form: Format8) -> None:
    """One non-finite element must not reset its neighbours to something unbounded, or
    itself to zero."""
    most = torch.finfo(torch.float32).max
    x = torch.ones(5, BLOCK)
    x[:, 3] = torch.tensor([math.inf, math.nan, math.nan, most, -math.inf])
    # A NaN's sign means nothing.
    x[2, 3].neg_()
    x = x if form.signed else torch.where(x < 0, -x, x)
    largest = (2 - 2.0**-form.mantissa) * 2.0**127
    last = -largest if form.signed else largest
    for word in (0, 0xFFFF):
        codes, scale = codecs.encode8(x.flatten(), torch.full((x.numel(),), word), form)
        back = codecs.decode8(codes, scale, form).view(-1, BLOCK)
        assert (scale == 254).all()
        assert back.isfinite().all()
        assert back[:, 3].tolist() == [largest] * 4 + [last]
