"""What the storage formats keep of weights and moments, in one step and over many."""

from __future__ import annotations

import math

import pytest
import torch
from backends import ALL_BACKENDS, assert_same_bits, device_of, placed
from kernel_shards import (
    MOMENTS,
    ROUNDED_AT_RANDOM,
    WEIGHTS,
    columns_of,
    moments_of,
    shard_of,
    update,
    weights_of,
)
from samples import seeded
from scalar_tables import ADAMW, VARIANTS, Variant, scalars_of, schedule
from torch import Tensor

from zerokern import ops
from zerokern.ops import BLOCK, Shard


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_small_numbers_survive_sixteen_bits(
    weights: str,
    moments: str,
    backend: str,
) -> None:
    """Neither eps nor a second moment may become 0."""
    columns = columns_of([0])
    device = device_of(backend)
    start = shard_of(ADAMW, weights, moments, seeded(BLOCK), backend=backend)
    scalars = scalars_of(ADAMW, weight_decay=0.0)
    state = placed(start, device)
    update(state, torch.zeros(BLOCK), columns, backend, **scalars)
    # In fp16, eps would be 0.
    assert_same_bits(weights_of(state), weights_of(start))
    for tiny in (6e-8, -6e-8):
        update(
            state,
            torch.full((BLOCK,), tiny).half(),
            columns,
            backend,
            **scalars,
        )
    assert weights_of(state).isfinite().all()

    # In the parameter's 16 bits, the second moment would be 0.
    state = placed(start, device)
    update(
        state,
        torch.full((BLOCK,), 1e-4),
        columns,
        backend,
        **scalars,
    )
    v = moments_of(state)[1]
    # A step of the format; of a root, twice.
    step = {"fp32": 1e-6, "bf16": 2**-7, "8bit": 2**-4}[moments]
    torch.testing.assert_close(
        v,
        torch.full((BLOCK,), 1e-11),
        rtol=step,
        atol=0.0,
    )


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_split_master_keeps_half_a_step_of_its_parameter(backend: str) -> None:
    """The residual of 1.00390625, half a bf16 step above 1, must not be folded to 0."""
    between = torch.full((BLOCK,), 1.00390625)
    scalars = scalars_of(ADAMW, weight_decay=0.0)
    for weights, residual in (("split32", 2**-8 - 2**-23), ("bf16+fp32", 2**-8)):
        state = shard_of(ADAMW, weights, "fp32", between, backend=backend)
        update(
            state,
            torch.zeros(BLOCK),
            columns_of([0]),
            backend,
            **scalars,
        )
        assert (state.param == 1.0).all()
        assert (weights_of(state) - 1.0 == residual).all()


def mean_after(
    shard: Shard,
    grad: Tensor,
    variant: Variant,
    steps: int,
    **hyper: float,
) -> Tensor:
    """Return the mean weight after many steps of one gradient."""
    columns = columns_of([0] * (grad.numel() // BLOCK))
    for scalars in schedule(variant, steps, **hyper):
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
    return weights_of(shard).double().mean()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_updates_below_half_a_step_add_up(weights: str) -> None:
    """In bf16 without a master that rounds to nearest, 1 - 1e-4 would be 1."""
    shard = shard_of(ADAMW, weights, "fp32", torch.ones(4096))
    mean = mean_after(
        shard,
        torch.ones(4096),
        ADAMW,
        100,
        lr=1e-4,
        weight_decay=0.0,
    )
    assert mean.item() == pytest.approx(0.99, rel=1e-3)
    if weights not in ROUNDED_AT_RANDOM:
        # A hundred roundings by half an fp32 step, which is 2^-25 below 1.
        exact = torch.full((4096,), 0.99)
        torch.testing.assert_close(
            weights_of(shard),
            exact,
            rtol=100 * 2**-25,
            atol=0.0,
        )


@pytest.mark.parametrize("weights", ["split32", "split24", "bf16"])
def test_weight_decay_survives_bf16(weights: str) -> None:
    """A product of lr and weight_decay below half a bf16 step must not vanish."""
    shard = shard_of(ADAMW, weights, "fp32", torch.ones(4096))
    mean = mean_after(
        shard,
        torch.zeros(4096),
        ADAMW,
        1000,
        lr=1e-3,
        weight_decay=0.1,
    )
    assert mean.item() == pytest.approx(math.exp(-0.1), rel=0.01)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_second_moments_decay(moments: str) -> None:
    """Rounded to nearest, a bf16 second moment never decays for beta2 = 0.999."""
    zero = torch.zeros(4096)
    shard = shard_of(
        ADAMW,
        "fp32",
        moments,
        zero,
        zero,
        torch.full((4096,), 1e-4),
    )
    start = moments_of(shard)[1]
    mean_after(shard, zero, ADAMW, 2000, beta2=0.999)
    v = moments_of(shard)[1]
    assert v is not None and start is not None
    ratio = v.double().mean() / start.double().mean()
    assert ratio.item() == pytest.approx(0.999**2000, rel=0.03)


def test_eight_bit_moments_follow_gradients_of_any_size() -> None:
    """With fp16 scales, second moments of gradients below 1e-5 would be lost, and those
    above 65504 infinite."""
    sigmas = (1e-2, 1e-5, 1e-6, 1e-8)
    beta2 = 0.999
    scale = torch.tensor(sigmas).repeat_interleave(1024)
    shard = shard_of(ADAMW, "split32", "8bit", torch.zeros(4096))
    columns = columns_of([0] * 64)
    exact = torch.zeros(4096, dtype=torch.float64)
    small = schedule(
        ADAMW,
        500,
        beta2=beta2,
        eps=1e-16,
        weight_decay=0.0,
    )
    for step, scalars in enumerate(small):
        grad = seeded(4096, step) * scale
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
        exact = beta2 * exact + (1 - beta2) * grad.double() ** 2
    v = moments_of(shard)[1]
    assert v is not None
    ratios = (v.double() / exact).sqrt().view(len(sigmas), -1).median(dim=1).values
    assert ((ratios > 0.95) & (ratios < 1.05)).all(), ratios

    large = torch.full((4096,), 1e6)
    for scalars in schedule(ADAMW, 3, beta2=beta2, eps=1e-16):
        ops.update_(shard, large, columns=columns, backend="native", **scalars)
    m, v, _ = moments_of(shard)
    assert m is not None and v is not None
    assert all(tensor.isfinite().all() for tensor in (weights_of(shard), m, v))
    assert v.sqrt().median() == pytest.approx(1e6 * math.sqrt(3e-3), rel=0.05)


@pytest.mark.parametrize("variant", ["adamw", "amsgrad", "lion", "momentum"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_unused_elements_of_a_block_do_not_move(variant: str, weights: str) -> None:
    """Where a dequantised moment is not exactly zero, weights that were never used
    would take huge steps."""
    chosen = VARIANTS[variant]
    shard = shard_of(chosen, weights, "8bit", seeded(BLOCK))
    unused = torch.arange(BLOCK) % 3 == 0
    before = placed(shard, "cpu")
    for step, scalars in enumerate(schedule(chosen, 500, weight_decay=0.0)):
        grad = seeded(BLOCK, step).masked_fill(unused, 0.0)
        ops.update_(
            shard,
            grad,
            columns=columns_of([0]),
            backend="native",
            **scalars,
        )
    assert_same_bits(shard.param[unused], before.param[unused])
    assert_same_bits(weights_of(shard)[unused], weights_of(before)[unused])
    moved = weights_of(shard)[~unused] != weights_of(before)[~unused]
    assert moved.float().mean() > 0.5


def test_moments_are_those_of_fp32_gradients() -> None:
    """No step rounds them to the parameter's dtype."""
    shard = shard_of(ADAMW, "split32", "fp32", seeded(4096))
    columns = columns_of([0] * 64)
    m, v = (torch.zeros(4096, dtype=torch.float64) for _ in range(2))
    for step, scalars in enumerate(schedule(ADAMW, 50)):
        grad = seeded(4096, step)
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
        m = 0.9 * m + 0.1 * grad.double()
        v = 0.999 * v + 0.001 * grad.double() ** 2

    first, second, _ = moments_of(shard)
    assert first is not None and second is not None
    # The terms of a mean cancel.
    allowed = 1e-6 * m.abs().clamp_min(0.3)
    assert ((first.double() - m).abs() <= allowed).all()
    assert ((second.double() - v).abs() <= 1e-6 * v).all()


@pytest.mark.parametrize("moments", MOMENTS)
def test_the_largest_second_moment_never_falls(moments: str) -> None:
    """The running maximum is written back."""
    chosen = VARIANTS["amsgrad"]
    shard = shard_of(chosen, "fp32", moments, seeded(4096))
    columns = columns_of([0] * 64)
    v = exact = torch.zeros(4096, dtype=torch.float64)
    previous = torch.zeros(4096)
    for step, scalars in enumerate(schedule(chosen, 20, beta2=0.9)):
        grad = seeded(4096, step) * 0.7**step  # the maximum is in the first steps
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
        v = 0.9 * v + 0.1 * grad.double() ** 2
        exact = torch.maximum(exact, v)
        largest = moments_of(shard)[2]
        assert largest is not None and (largest >= previous).all()
        previous = largest

    second = moments_of(shard)[1]
    assert second is not None
    assert (second < previous / 2).float().mean() > 0.9
    # The second moment's own roundings before it reached its maximum.
    allowed = {"fp32": 1e-6, "bf16": 0.05, "8bit": 0.3}[moments]
    assert ((previous.double() / exact - 1).abs() <= allowed).all()
