"""Gradients that are unscaled, clipped, huge or zero: from the table of scalars to the
updated shard."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from backends import ALL_BACKENDS, assert_same_bits
from kernel_shards import (
    MOMENTS,
    WEIGHTS,
    columns_of,
    moments_of,
    shard_of,
    update,
    weights_of,
)
from samples import seeded
from scalar_tables import ADAMW, scalar_inputs, words

from zerokern import ops
from zerokern.ops import BLOCK

MASTERS = ("bf16+fp32", "fp16+fp32", "split32", "split24")
"""Formats that keep more of a weight than its 16 bits."""


def scaled(
    limit: float,
    norm: float,
    loss_scale: float = 1.0,
) -> dict[str, Any]:
    """Return the scalars of a first step with this total norm of the unscaled
    gradients."""
    inputs = scalar_inputs(1, weight_decay=0.1)
    inputs["gathered"] = words([norm * loss_scale], [0], 1)
    inputs["limits"] = torch.tensor([limit, loss_scale], dtype=torch.float64)
    ops.scalars_(**inputs, backend="torch")
    return {"rule": "adam", "table": inputs["table"], "keys": inputs["keys"]}


@pytest.mark.parametrize("moments", MOMENTS)
def test_unscaling_is_exact(moments: str) -> None:
    """Scaled once and unscaled once; without a scaler the scale is exactly 1."""
    plain = scaled(math.inf, 1.0)
    unscaled = scaled(math.inf, 1.0, 65536.0)
    assert plain["table"][0].item() == 1.0
    assert unscaled["table"][0].item() == 2.0**-16

    grad = seeded(4 * BLOCK, 3)
    columns = columns_of([0] * 4)
    once = shard_of(ADAMW, "split32", moments, seeded(4 * BLOCK))
    update(once, grad, columns, **plain)
    twice = shard_of(ADAMW, "split32", moments, seeded(4 * BLOCK))
    update(twice, grad * 65536, columns, **unscaled)
    assert_same_bits(once, twice)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_huge_norm_is_clipped_in_fp32(moments: str, backend: str) -> None:
    """Clipped to norm 1, gradients of norm 1e11 must not fall below what 16 bits, or
    eps, can tell from 0."""
    grad = torch.ones(BLOCK)
    grad[0] = 1e11
    state = shard_of(
        ADAMW,
        "split32",
        moments,
        torch.ones(BLOCK),
        backend=backend,
    )
    update(
        state,
        grad.bfloat16(),
        columns_of([0]),
        backend,
        **scaled(1.0, 1e11),
    )
    m, v, _ = moments_of(state)
    assert m is not None and v is not None
    for index, clipped in ((0, 1.0), (1, 1e-11)):
        assert m[index] == pytest.approx(0.1 * clipped, rel=0.02)
        assert v[index] == pytest.approx(1e-3 * clipped**2, rel=0.02)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_finite_gradients_make_finite_steps(weights: str, moments: str) -> None:
    """Gradients of 1e20, whose squares overflow fp32."""
    grad = torch.full((BLOCK,), 1e20)
    clipped = shard_of(ADAMW, weights, moments, torch.ones(BLOCK))
    update(
        clipped,
        grad,
        columns_of([0]),
        **scaled(1.0, 8e20),
    )
    m, v, _ = moments_of(clipped)
    assert m is not None and v is not None
    assert all(tensor.isfinite().all() for tensor in (weights_of(clipped), m, v))
    # Bf16 alone moves at random.
    assert (weights_of(clipped) < 1.0).float().mean() > 0.05

    free = shard_of(ADAMW, weights, moments, torch.ones(BLOCK))
    update(
        free,
        grad,
        columns_of([0]),
        **scaled(math.inf, 8e20),
    )
    assert weights_of(free).isfinite().all()


@pytest.mark.parametrize("weights", MASTERS)
def test_gradients_of_zero_still_decay(weights: str) -> None:
    """A total norm of exactly 0 does not stop the step."""
    scalars = scaled(1.0, 0.0)
    assert scalars["table"].isfinite().all()
    assert scalars["table"][0].item() == 1.0
    state = shard_of(ADAMW, weights, "fp32", torch.ones(BLOCK))
    update(
        state,
        torch.zeros(BLOCK),
        columns_of([0]),
        **scalars,
    )
    expected = torch.full((BLOCK,), 1 - 1e-4)
    torch.testing.assert_close(
        weights_of(state),
        expected,
        rtol=2**-15,
        atol=0.0,
    )
