"""Weights and moments out of their storage formats and back, as checkpoints take
them."""

from __future__ import annotations

import pytest
import torch
from backends import assert_same_bits, mapped
from kernel_shards import (
    FORMS,
    WEIGHTS,
    columns_of,
    moments_of,
    shard_of,
    update,
    weights_of,
)
from samples import mixed, seeded
from scalar_tables import VARIANTS, scalars_of
from torch import Tensor

from zerokern.kernels import storage
from zerokern.ops import BLOCK


def binade_of(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above each magnitude."""
    return torch.exp2(x.abs().log2().floor())


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_state_leaves_and_comes_back(weights: str, moments: str) -> None:
    """What a checkpoint holds is fp32, and loading it gives the same numbers, bit for
    bit."""
    variant = VARIANTS["amsgrad"]
    shard = shard_of(variant, weights, moments, mixed(8 * BLOCK))
    columns = columns_of([0] * 8)
    # In formats that round at random, these are no roundings to nearest.
    for step in range(3):
        scalars = scalars_of(variant, step=step)
        update(
            shard,
            seeded(8 * BLOCK, step),
            columns,
            "torch",
            **scalars,
        )

    again = mapped(shard, torch.zeros_like)
    again.param.copy_(weights_of(shard))
    storage.store_master(again, weights_of(shard))
    moments_before = moments_of(shard)
    for moment, x, form in zip(again.moments, moments_before, FORMS, strict=True):
        storage.store_moment(moment, x, None, form)
    assert_same_bits(again.param, shard.param)
    assert_same_bits(weights_of(again), weights_of(shard))
    assert_same_bits(moments_of(again), moments_before)
    # 8-bit blocks may come back with another scale for the same numbers.
    if moments != "8bit":
        assert_same_bits(again, shard)


def test_what_is_loaded_is_rounded_to_nearest() -> None:
    """States from another recipe are taken as they are, or rounded once; no random bits
    are spent on them."""
    x = seeded(64 * BLOCK)
    shard = shard_of(
        VARIANTS["amsgrad"],
        "split24",
        "bf16",
        x,
        x,
        x.abs(),
    )
    m, v, _ = moments_of(shard)
    assert m is not None and v is not None
    step = binade_of(x)
    cases = ((weights_of(shard), x, 15), (m, x, 7), (v, x.abs(), 7))
    for loaded, exact, bits in cases:
        error = (loaded - exact).abs()
        # What comes to lie on an upper tie of split24, one number in 512, goes one step
        # more.
        assert (error <= step * 1.5 * 2.0**-bits).all()
        assert (error <= step * 2.0 ** (-bits - 1)).float().mean() > 0.99


def test_what_is_loaded_into_eight_bits_is_rounded_to_nearest() -> None:
    # Neighbours in size share a block, and codes are normal.
    x = seeded(64 * BLOCK).sort().values
    shard = shard_of(
        VARIANTS["amsgrad"],
        "fp32",
        "8bit",
        x,
        x,
        x**2,
    )
    m, v, _ = moments_of(shard)
    assert m is not None and v is not None
    largest = x.abs().view(-1, BLOCK).amax(dim=1).repeat_interleave(BLOCK)
    binade = binade_of(torch.maximum(x.abs(), largest / 32))
    for loaded, exact, bits in ((m, x, 4), (v.sqrt(), x.abs(), 5)):
        half = binade * 2.0 ** (-bits - 1)
        assert ((loaded - exact).abs() <= half * (1 + 2**-10)).all()
