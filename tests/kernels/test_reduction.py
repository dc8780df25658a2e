"""The reduction of received chunks into a gradient shard, and its sums of squares,
against their twin in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tolerances
import torch
from backends import (
    ALL_BACKENDS,
    BACKENDS,
    DEVICE,
    assert_same_bits,
    device_of,
    run_both,
)
from samples import FLOATS, SIZES, seeded
from torch import Tensor

from zerokern import ops
from zerokern.ops import BLOCK, PARTIAL

PARTIAL_TOLERANCE = {
    "triton": tolerances.PARTIAL_RELATIVE,
    "native": tolerances.NATIVE_PARTIAL_RELATIVE,
}


def reduced(
    shard: Tensor,
    own: Tensor,
    received: Tensor,
    backend: str,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Reduce on a back end and on plain torch; return shard, own chunk, received ones
    and partial sums of squares of both."""
    partials = torch.zeros(ops.partials_numel(shard.numel()), dtype=torch.float64)
    return run_both(
        ops.reduce_,
        shard,
        own,
        received,
        partials,
        backend=backend,
        **options,
    )


def special_chunks(numel: int, wire: torch.dtype) -> Tensor:
    """Return chunks of three ranks, with limits of formats."""
    chunks = [seeded(numel, seed, special=True) for seed in range(3)]
    return torch.stack(chunks).to(wire)


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize(
    ("world", "rank"),
    [(w, r) for w in (1, 2, 3, 4) for r in range(w)],
)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_equals_its_twin(
    wire: torch.dtype,
    world: int,
    rank: int,
    accumulate: bool,
    backend: str,
) -> None:
    for numel in (*SIZES, 4096 + 5):
        chunks = seeded(world * numel, numel).to(wire).view(world, numel)
        received = torch.cat((chunks[:rank], chunks[rank + 1 :]))
        done, expected = reduced(
            seeded(numel, 1),
            chunks[rank],
            received,
            backend,
            rank=rank,
            scale=1 / world,
            accumulate=accumulate,
        )
        assert_same_bits(done[0], expected[0])
        rtol = PARTIAL_TOLERANCE[backend]
        torch.testing.assert_close(
            done[3],
            expected[3],
            rtol=rtol,
            atol=0.0,
        )


@pytest.mark.parametrize("stored", FLOATS[1:])
@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_into_a_sixteen_bit_shard(
    stored: torch.dtype,
    wire: torch.dtype,
    accumulate: bool,
    backend: str,
) -> None:
    """Sums are of fp32 and rounded once; the squares are those of what is stored."""
    for numel in (64, PARTIAL + 64, PARTIAL + 5):
        chunks = special_chunks(numel, wire)
        shard = seeded(numel, 4).to(stored)
        done, expected = reduced(
            shard,
            chunks[1],
            chunks[::2],
            backend,
            rank=1,
            scale=1 / 3,
            accumulate=accumulate,
        )
        assert_same_bits(done[0], expected[0])
        total = chunks[0].float() + chunks[1].float() + chunks[2].float()
        total *= torch.tensor(1 / 3)
        if accumulate:
            total += shard.float()
        assert_same_bits(done[0], total.to(stored))

        finite = expected[3].isfinite()
        assert torch.equal(done[3].isfinite(), finite)
        torch.testing.assert_close(
            done[3][finite],
            expected[3][finite],
            rtol=1e-13,
            atol=0.0,
        )
        quiet = torch.full((numel,), 0.1, dtype=wire)
        done, _ = reduced(
            shard,
            quiet,
            quiet[None],
            backend,
            rank=0,
            scale=0.5,
            accumulate=False,
        )
        squares = (done[0].double() ** 2).sum().item()
        assert done[3].sum() == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_of_special_numbers(wire: torch.dtype, backend: str) -> None:
    numel = 2 * PARTIAL + 64
    chunks = special_chunks(numel, wire)
    chunks[:, :32] = -0.0
    for scale in (1.0, 1 / 3):
        done, expected = reduced(
            torch.zeros(numel),
            chunks[1],
            chunks[::2],
            backend,
            rank=1,
            scale=scale,
            accumulate=False,
        )
        assert_same_bits(done[0], expected[0])
        assert torch.equal(done[3].isfinite(), expected[3].isfinite())


def test_reduce_of_integers_is_exact_and_finite_squares_stay_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    chunks = torch.randint(-8, 9, (4, 2 * PARTIAL), generator=generator).float()
    options = {"scale": 1.0, "accumulate": False}
    triton, expected = reduced(
        torch.zeros(2 * PARTIAL),
        chunks[2],
        chunks[[0, 1, 3]],
        "triton",
        rank=2,
        **options,
    )
    assert_same_bits(triton, expected)

    # Fp32 squares of 1e20 and fp16 squares of 300 overflow; the norm must not.
    for value, wire in ((1e20, torch.float32), (300.0, torch.float16)):
        gradient = torch.zeros(PARTIAL, dtype=wire)
        gradient[:100] = value
        nothing = torch.empty(0, PARTIAL, dtype=wire)
        triton, _ = reduced(
            torch.zeros(PARTIAL),
            gradient,
            nothing,
            "triton",
            rank=0,
            **options,
        )
        assert triton[3].sqrt().item() == pytest.approx(10 * value, rel=1e-7)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_accumulation_loses_nothing_of_bf16_gradients(backend: Any) -> None:
    """Many micro-batches, whose sums bf16 would round."""
    device = device_of(backend)
    shard = torch.zeros(BLOCK, device=device)
    partials = torch.zeros(1, dtype=torch.float64, device=device)
    nothing = torch.empty(
        0,
        BLOCK,
        dtype=torch.bfloat16,
        device=device,
    )
    options = {"rank": 0, "scale": 1.0, "backend": backend}
    exact = 0.0
    for k in range(64):
        grad = torch.full((BLOCK,), 1 + k * 2**-9, device=device).bfloat16()
        exact += grad[0].double().item()
        ops.reduce_(
            shard,
            grad,
            nothing,
            partials,
            accumulate=k > 0,
            **options,
        )
    expected = torch.full((BLOCK,), exact).double()
    torch.testing.assert_close(
        shard.cpu().double(),
        expected,
        rtol=1e-6,
        atol=0.0,
    )


@pytest.mark.parametrize("offset", range(0, 16, 3))
def test_reduce_in_place_at_any_address_between_guards(offset: int) -> None:
    """The received chunks lie apart, NaN lies between them, and the shard is this
    rank's own chunk."""
    numel = PARTIAL + 64
    buffer = torch.full((3, numel + 64), math.nan, device=DEVICE)
    views = buffer[:, offset : offset + numel].copy_(seeded(3 * numel).view(3, numel))
    expected = views.cpu().clone()
    sums = []
    for chunks, backend in ((views, "triton"), (expected, "torch")):
        own = chunks[0]
        received = chunks[1:]
        partials = torch.zeros(2, dtype=torch.float64, device=chunks.device)
        ops.reduce_(
            own,
            own,
            received,
            partials,
            rank=0,
            scale=0.5,
            backend=backend,
        )
        sums.append(partials.cpu())

    assert_same_bits(views, expected)
    rtol = tolerances.PARTIAL_RELATIVE
    torch.testing.assert_close(*sums, rtol=rtol, atol=0.0)
    assert buffer[:, :offset].isnan().all()
    assert buffer[:, offset + numel :].isnan().all()
