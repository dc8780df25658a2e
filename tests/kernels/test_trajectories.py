"""A thousand steps: each storage format beside torch.optim, and split masters beside
fp32 masters."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import tolerances
import torch
from kernel_shards import ROUNDED_AT_RANDOM, columns_of, shard_of, weights_of
from samples import is_upper_tie, seeded
from scalar_tables import ADAMW, schedule
from torch import Tensor

from zerokern import ops
from zerokern.kernels import codecs


def gradients(steps: int) -> Iterator[Tensor]:
    """Yield noisy gradients with a mean of their own for each element, over four orders
    of magnitude."""
    size = torch.logspace(-4, 0, 1024)
    mean = 0.3 * seeded(1024, 10_000)
    for step in range(steps):
        yield (mean + seeded(1024, step)) * size


def trajectory_start() -> Tensor:
    """Return weights that every format has."""
    return seeded(1024).bfloat16().float()


@functools.cache
def torch_trajectory(dtype: torch.dtype) -> Tensor:
    """Return the weights of torch's AdamW after the thousand steps in a dtype."""
    parameter = torch.nn.Parameter(trajectory_start().to(dtype))
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=1e-3,
        weight_decay=0.1,
        foreach=False,
    )
    for grad in gradients(1000):
        parameter.grad = grad.to(dtype)
        optimizer.step()
    return parameter.data.double()


@pytest.mark.parametrize(("weights", "moments"), tolerances.TRAJECTORY)
def test_a_thousand_steps_beside_torch(weights: str, moments: str) -> None:
    """The same hyper-parameters give the same results."""
    shard = shard_of(ADAMW, weights, moments, trajectory_start())
    columns = columns_of([0] * 16)
    for grad, scalars in zip(gradients(1000), schedule(ADAMW, 1000), strict=True):
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)

    exact = torch_trajectory(torch.float64)
    way = exact - trajectory_start().double()
    error = weights_of(shard).double() - exact
    allowed = tolerances.TRAJECTORY[weights, moments]
    assert error.norm() / way.norm() < allowed
    # As close as torch's own fp32.
    if moments == "fp32" and weights not in ROUNDED_AT_RANDOM:
        assert error.norm() < 1.01 * (torch_trajectory(torch.float32) - exact).norm()
    drift = (error * way.sign()).mean() / way.abs().mean()
    assert abs(drift) < allowed / 8


def test_split_masters_are_fp32_masters_but_for_ties() -> None:
    """Bf16 with 16 more bits is training with fp32 masters, bit for bit, until an upper
    tie.

    Such a number, one in 131,072, is stored one fp32 step nearer to zero (see
    test_weight_formats.py), and from then on the two may differ.
    """
    columns = columns_of([0] * 16)
    whole, split = (
        shard_of(ADAMW, weights, "fp32", trajectory_start())
        for weights in ("bf16+fp32", "split32")
    )
    tied = torch.zeros(1024, dtype=torch.bool)
    first_ties = 0
    for grad, scalars in zip(gradients(1000), schedule(ADAMW, 1000), strict=True):
        for shard in (whole, split):
            ops.update_(shard, grad, columns=columns, backend="native", **scalars)
        bits = codecs.bits_of(weights_of(whole))
        split_bits = codecs.bits_of(weights_of(split))
        ties = is_upper_tie(bits) & ~tied
        assert torch.equal(split_bits[ties], bits[ties] - 1)
        first_ties += int(ties.sum())
        tied |= ties
        assert torch.equal(split_bits[~tied], bits[~tied])
        params = [s.param[~tied].view(torch.int16) for s in (split, whole)]
        assert torch.equal(*params)
    assert 0 < first_ties < 40  # of 1,024,000 numbers: about 8
