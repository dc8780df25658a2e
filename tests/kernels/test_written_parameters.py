"""A 16-bit parameter that somebody else has written to, beside its fp32 master: where
the master does not round to it any more, an update starts from the parameter."""

from __future__ import annotations

import math

import pytest
import torch
from backends import ALL_BACKENDS, assert_same_bits, device_of, placed
from kernel_shards import WEIGHTS, columns_of, mixed_shard, shard_of, update, weights_of
from samples import SPECIAL, mixed, seeded
from scalar_tables import ADAMW, VARIANTS, scalars_of
from torch import Tensor

from zerokern.kernels import storage
from zerokern.ops import BLOCK, Shard

with_masters = pytest.mark.parametrize("weights", ["bf16+fp32", "fp16+fp32"])
on_all_backends = pytest.mark.parametrize("backend", ALL_BACKENDS)


def written_to(shard: Shard, where: Tensor, values: Tensor) -> Shard:
    """Return a copy whose parameter was overwritten somewhere, unseen by the master."""
    other: Shard = placed(shard, shard.param.device.type)
    other.param[where] = values.to(other.param.dtype)
    return other


def followed(shard: Shard, where: Tensor) -> Shard:
    """Return a copy whose master was set to the parameter somewhere."""
    other: Shard = placed(shard, shard.param.device.type)
    assert other.master is not None
    other.master[where] = other.param[where].float()
    return other


def overwritten(weights: str, variant: str = "adamw") -> tuple[Shard, Shard, Tensor]:
    """Return a shard, a copy of it that was written to at every third element, and
    where these elements are."""
    shard = mixed_shard(VARIANTS[variant], weights, "fp32", 18 * BLOCK)
    where = torch.arange(shard.param.numel()) % 3 == 1
    values = 3.0 * seeded(shard.param.numel(), 7)
    numel = len(SPECIAL)
    for start in range(0, values.numel() - 3 * numel, 3 * numel):
        values[start + 1 : start + 1 + 3 * numel : 3] = torch.tensor(SPECIAL)
    other = written_to(shard, where, values[where])
    # Zero has two signs, and what is equal is no write.
    return shard, other, where & (other.param != shard.param)


@pytest.mark.parametrize("variant", VARIANTS)
@with_masters
@on_all_backends
def test_an_update_starts_from_what_was_written(
    variant: str, weights: str, backend: str
) -> None:
    """NaN, infinity, zeros and subnormals among it. Elsewhere the low bits of masters
    count."""
    chosen = VARIANTS[variant]
    shard, written, where = overwritten(weights, variant)
    expected = followed(written, where)
    assert where.any() and not where.all()
    assert_same_bits(expected.master[~where], shard.master[~where])  # type: ignore[index]
    assert expected.master[where].isnan().any()  # type: ignore[index]
    columns = columns_of([0] * 10 + [1] * 8)
    scalars = scalars_of(chosen, 2, step=3)
    grad = mixed(written.param.numel(), 9).bfloat16()
    update(expected, grad, columns, "torch", **scalars)
    done = placed(written, device_of(backend))
    update(done, grad, columns, backend, **scalars)
    assert_same_bits(done, expected)


def between(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp32 numbers at and around each 16-bit number and the middle between it
    and the next, and 16-bit numbers that lie near them, one for each."""
    patterns = torch.arange(-(2**15), 2**15)
    low, high = (
        patterns.add(step).to(torch.int16).view(dtype).float() for step in (0, 1)
    )
    middle = ((low.double() + high.double()) / 2).float()
    infinity = torch.full_like(low, math.inf)
    exact = [low, middle]
    exact += [x.nextafter(sign * infinity) for x in (low, middle) for sign in (1, -1)]
    masters = torch.cat([x for x in exact for _ in range(2)])
    params = torch.cat([low, high] * len(exact)).to(dtype)
    return masters, params


@with_masters
@on_all_backends
def test_a_master_counts_where_it_rounds_to_the_parameter(
    weights: str, backend: str
) -> None:
    """To nearest even, as updates store it; so the low bits of a number half-way
    between two 16-bit ones are lost to a write of the odd one, and kept under the even
    one."""
    dtype, _ = WEIGHTS[weights]
    masters, params = between(dtype)
    if backend == "triton":  # for the interpreter's time
        masters, params = masters[::3], params[::3]
    numel = masters.numel() // BLOCK * BLOCK
    masters, params = masters[:numel], params[:numel]
    same = masters.to(dtype) == params
    assert 0.2 < same.float().mean() < 0.8
    expected = torch.where(same, masters, params.float())
    shard = shard_of(VARIANTS["sgd"], weights, "fp32", masters)
    shard = placed(shard._replace(param=params), device_of(backend))
    scalars = scalars_of(VARIANTS["sgd"], lr=0.0, weight_decay=0.0)
    columns = columns_of([0] * (numel // BLOCK))
    update(shard, torch.zeros(numel), columns, backend, **scalars)
    assert_same_bits(shard.master, expected)
    assert_same_bits(shard.param, expected.to(dtype))


@pytest.mark.parametrize("nan", [0x7FFFFFFF, 0x7FC00000, -1, -0x400000])
@on_all_backends
def test_a_master_that_is_no_number_gives_way_to_one(nan: int, backend: str) -> None:
    """The patterns of NaN on NVIDIA and on x86: rounding their bits would carry into
    zero."""
    shard = shard_of(ADAMW, "bf16+fp32", "fp32", torch.zeros(BLOCK))
    assert shard.master is not None
    shard.master.view(torch.int32).fill_(nan)
    shard.param[1::2] = -0.0
    shard = placed(shard, device_of(backend))
    scalars = scalars_of(ADAMW, weight_decay=0.0)
    update(shard, torch.zeros(BLOCK), columns_of([0]), backend, **scalars)
    assert not weights_of(shard).any()


@with_masters
@on_all_backends
def test_the_sign_of_zero_is_no_write(weights: str, backend: str) -> None:
    """A weight too small for 16 bits stays what it is."""
    tiny = torch.tensor([1e-45, -1e-45, 0.0, -0.0]).repeat(BLOCK // 4)
    shard = shard_of(ADAMW, weights, "fp32", tiny, backend=backend)
    shard.param.neg_()
    scalars = scalars_of(ADAMW, lr=0.0, weight_decay=0.0)
    update(shard, torch.zeros(BLOCK), columns_of([0]), backend, **scalars)
    assert_same_bits(weights_of(shard), tiny)


@with_masters
@on_all_backends
def test_an_inactive_parameter_and_its_master_stay_apart(
    weights: str, backend: str
) -> None:
    _, written, _ = overwritten(weights)
    done = placed(written, device_of(backend))
    scalars = scalars_of(ADAMW, 2, inactive=[0, 1])
    grad = mixed(written.param.numel(), 9)
    update(done, grad, columns_of([0] * 10 + [1] * 8), backend, **scalars)
    assert_same_bits(done, written)


@with_masters
def test_what_is_saved_and_what_masters_follow_is_what_updates_start_from(
    weights: str,
) -> None:
    _, written, where = overwritten(weights)
    expected = followed(written, where)
    saved = torch.empty(written.param.numel())
    storage.load_state_(saved, written, "master")
    assert_same_bits(saved, expected.master)
    storage.refresh_masters(written)
    assert_same_bits(written, expected)
