"""The random bits that roundings take: which they are, how they are distributed, and
what they depend on."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from zerokern.kernels import codecs
from zerokern.ops import BLOCK


def test_random_words_are_those_of_every_release() -> None:
    """So checkpoints stay reproducible."""
    # SplitMix64 is the mixing of consecutive multiples of the golden ratio; its first
    # numbers for the seed 1234567 are published.
    mixed_words = codecs.mix64(1234567 + torch.arange(1, 4) * codecs.GOLDEN)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [word % 2**64 for word in mixed_words.tolist()] == published
    # The 32-bit mixing, written out in Python's integers.
    for x in (0, 1, 0x12345678, 0xFFFFFFFF):
        y = (x ^ x >> 16) * 0x7FEB352D % 2**32
        y = (y ^ y >> 15) * 0x846CA68B % 2**32
        assert codecs.mix32(torch.tensor(x)) == y ^ y >> 16

    key = torch.tensor(0x0123456789ABCDEF)
    blocks = torch.tensor([0, 2**40])
    first, second = codecs.random_words(key, blocks)
    released = [616247225, 425284141, 2620632769, 398447162]
    assert first[[0, 1, 63, 64]].tolist() == released
    released = [1908608398, 1511534561, 2113392994, 2106764827]
    assert second[[0, 1, 63, 64]].tolist() == released


def assert_uniform(numbers: Tensor) -> None:
    """Check that the chi-square of 1024 bins lies within five deviations of its
    mean."""
    expected = numbers.numel() / 1024
    counts = torch.bincount(numbers, minlength=1024).double()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 1023) < 5 * math.sqrt(2 * 1023)


def test_random_words_are_uniform_and_independent() -> None:
    blocks = torch.arange(4096)
    # Of two consecutive steps.
    keys = codecs.mix64(7 + torch.arange(1, 3) * codecs.GOLDEN)
    streams = [word for key in keys for word in codecs.random_words(key, blocks)]
    n = streams[0].numel()
    deviations = 5.5
    # [4, n, 32]
    bits = (torch.stack(streams)[:, :, None] >> torch.arange(32) & 1).float()
    assert ((bits.mean(dim=1) - 0.5).abs() < deviations * 0.5 / math.sqrt(n)).all()

    # No two of the 4 * 32 bits agree more or less often than chance, nor two
    # neighbours' bits.
    signs = (2 * bits - 1).permute(1, 0, 2).reshape(n, -1)
    for other in (signs, signs.roll(1, 0), signs.roll(BLOCK, 0)):
        correlation = signs.T @ other / n
        if other is signs:
            correlation.fill_diagonal_(0)
        assert (correlation.abs() < deviations / math.sqrt(n)).all()

    # The sixteen bits that a rounding takes.
    halves = [half for stream in streams for half in (stream & 0xFFFF, stream >> 16)]
    for half in halves:
        assert_uniform(half >> 6)
    # The four roundings of an element, and those of the next step, by their upper five
    # bits in pairs: 32 * 32 bins.
    for one, other in itertools.combinations(halves, 2):
        assert_uniform((one >> 11) * 32 + (other >> 11))


def test_random_words_do_not_depend_on_the_cut() -> None:
    """An element's words are those of its place in the parameter, whatever shard it is
    in."""
    key = torch.tensor(-5)
    blocks = torch.arange(40) + 2**33
    whole = codecs.random_words(key, blocks)
    for cut in (1, 13, 39):
        left = codecs.random_words(key, blocks[:cut])
        right = codecs.random_words(key, blocks[cut:])
        for words, *pieces in zip(whole, left, right, strict=True):
            assert torch.equal(words, torch.cat(pieces))
