"""The update of a shard in every rule and every format, against its twin in plain
torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backends import (
    ALL_BACKENDS,
    BACKENDS,
    assert_same_bits,
    device_of,
    mapped,
    placed,
    run_both,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_shards import (
    MOMENTS,
    WEIGHTS,
    columns_of,
    mixed_shard,
    shard_of,
    update,
    window_of,
)
from samples import FLOATS, mixed, seeded
from scalar_tables import ADAMW, VARIANTS, scalars_of
from torch import Tensor

from zerokern import ops
from zerokern.ops import BLOCK

CASES = [
    (variant, weights, moments)
    for variant, weights, moments in itertools.product(VARIANTS, WEIGHTS, MOMENTS)
    if VARIANTS[variant].momentum or moments == "fp32"
]
MIXED_MOMENTS = [
    kinds
    for kinds in itertools.product(MOMENTS, MOMENTS, ("fp32", "bf16"))
    if len({*kinds}) > 1
]


def gradient_dtypes(
    variant: str,
    weights: str,
    moments: str,
    backend: str,
) -> Sequence[torch.dtype]:
    """Return the dtypes to test: one of them for Triton, for the interpreter's time."""
    if backend == "native":
        return FLOATS
    index = [*VARIANTS].index(variant) + [*WEIGHTS].index(weights)
    index += [*MOMENTS].index(moments)
    return (FLOATS[index % 3],)


@pytest.mark.parametrize(("variant", "weights", "moments"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_update_equals_its_twin(
    variant: str,
    weights: str,
    moments: str,
    backend: str,
) -> None:
    """Gradients in any format, beside weights in any other."""
    chosen = VARIANTS[variant]
    blocks = [0] * 3 + [1] * 3 + [2] * 5 + [3] + [4] * 6
    columns = columns_of(blocks, first={0: 5, 4: 2**33})
    scalars = scalars_of(
        chosen,
        5,
        step=3,
        inactive=[1, 3],
    )
    state = mixed_shard(chosen, weights, moments, len(blocks) * BLOCK)
    for dtype in gradient_dtypes(variant, weights, moments, backend):
        grad = mixed(len(blocks) * BLOCK, 9).to(dtype)
        done, expected = run_both(
            ops.update_,
            state,
            grad,
            columns=columns,
            backend=backend,
            **scalars,
        )
        assert_same_bits(done[0], expected[0])
        assert_same_bits(done[1], grad)
        for first, end, column, _ in columns.runs:
            if column in (1, 3):
                after = window_of(done[0], first, end)
                assert_same_bits(after, window_of(state, first, end))


@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("weights", ["fp32", "bf16+fp32", "fp16+fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_update_with_any_gradient(
    weights: str,
    grad: torch.dtype,
    backend: str,
) -> None:
    # Sizes around a program and a chunk of the CPU, one of them with several chunks to
    # a parameter.
    sizes = (1, 15, 16, 17) if backend == "triton" else (1, 17, 256, 300, 513)
    scalars = scalars_of(ADAMW, 2)
    for blocks in sizes:
        state = mixed_shard(ADAMW, weights, "fp32", blocks * BLOCK)
        columns = columns_of([0] * (blocks // 3) + [1] * (blocks - blocks // 3))
        gradient = seeded(blocks * BLOCK, 9).to(grad)
        done, expected = run_both(
            ops.update_,
            state,
            gradient,
            columns=columns,
            backend=backend,
            **scalars,
        )
        assert_same_bits(done[0], expected[0])


@pytest.mark.parametrize("kinds", MIXED_MOMENTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_of_different_formats(
    kinds: tuple[str, str, str],
    backend: str,
) -> None:
    chosen = VARIANTS["amsgrad"]
    state = mixed_shard(chosen, "split32", kinds, 4 * BLOCK)
    grad = mixed(4 * BLOCK, 9)
    columns = columns_of([0] * 4)
    scalars = scalars_of(chosen, step=3)
    done, expected = run_both(
        ops.update_,
        state,
        grad,
        columns=columns,
        backend=backend,
        **scalars,
    )
    assert_same_bits(done[0], expected[0])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], dict[int, int], list[int], int]:
    """Return the columns of some blocks, where in their parameters they lie, which
    columns are inactive, and all columns."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any))
    columns = [column for column, length in enumerate(lengths) for _ in range(length)]
    first = {
        column: draw(st.sampled_from([0, 0, 1, 17, 2**31 - 5, 2**40]))
        for column in range(len(lengths))
    }
    inactive = draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    return columns, first, inactive, len(lengths)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    layouts(),
    st.sampled_from(CASES),
    st.sampled_from(FLOATS),
    st.integers(0, 2**25),
)
def test_update_of_any_layout(
    layout: Any,
    case: tuple[str, str, str],
    dtype: torch.dtype,
    step: int,
) -> None:
    column_of_block, first, inactive, num_columns = layout
    variant, weights, moments = case
    chosen = VARIANTS[variant]
    numel = len(column_of_block) * BLOCK
    state = mixed_shard(chosen, weights, moments, numel)
    grad = mixed(numel, step % 99).to(dtype)
    options = scalars_of(chosen, num_columns, step, inactive)
    options["columns"] = columns_of(column_of_block, first, num_columns)
    for backend in ("triton", "native"):
        done, expected = run_both(
            ops.update_,
            state,
            grad,
            backend=backend,
            **options,
        )
        assert_same_bits(done[0], expected[0])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_inactive_rows_keep_their_bits_whatever_the_gradient(
    weights: str,
    moments: str,
    backend: str,
) -> None:
    """A skipped step leaves parameters and moments alone, also under NaN and
    infinity."""
    chosen = VARIANTS["amsgrad"]
    before = mixed_shard(chosen, weights, moments, 4 * BLOCK)
    grad = torch.tensor([math.nan, math.inf, -math.inf, 1.0]).repeat(BLOCK)
    columns = columns_of([0, 0, 1, 1])
    state = placed(before, device_of(backend))
    update(
        state,
        grad,
        columns,
        backend,
        **scalars_of(chosen, 2, inactive=[0, 1]),
    )
    assert_same_bits(state, before)


@pytest.mark.parametrize("offset", range(16))
@pytest.mark.parametrize(
    ("weights", "moments"),
    [("split32", "8bit"), ("split24", "bf16"), ("fp16+fp32", "fp32")],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_update_at_any_address(
    weights: str,
    moments: str,
    offset: int,
    backend: str,
) -> None:
    """Byte offsets of 1, 2 or 4 times the elements'.

    The guards around the shard stay as they were, and their NaN goes nowhere.
    """
    columns = columns_of([0] * 3)
    scalars = scalars_of(ADAMW)
    state = mixed_shard(ADAMW, weights, moments, 3 * BLOCK)
    grad = seeded(3 * BLOCK, 9).bfloat16()
    buffers: list[tuple[Tensor, int]] = []

    def guarded(tensor: Tensor) -> Tensor:
        guard = math.nan if tensor.is_floating_point() else 0x55
        buffer = torch.full(
            (tensor.numel() + 32,),
            guard,
            dtype=tensor.dtype,
            device=device_of(backend),
        )
        buffers.append((buffer, tensor.numel()))
        return buffer[offset : offset + tensor.numel()].copy_(tensor)

    views = mapped(state, guarded)
    update(views, guarded(grad), columns, backend, **scalars)
    update(state, grad, columns, "torch", **scalars)
    assert_same_bits(views, state)

    for buffer, length in buffers:
        outside = torch.cat((buffer[:offset], buffer[offset + length :]))
        if outside.is_floating_point():
            assert outside.isnan().all()
        else:
            assert (outside == 0x55).all()


def test_each_step_and_each_parameter_rounds_anew() -> None:
    """What a step draws comes from its counter, on the device, and from nothing that a
    graph would freeze."""
    drawn = []
    for step in range(3):
        scalars = scalars_of(ADAMW, 2, step, lr=0.0, weight_decay=0.0)
        state = shard_of(ADAMW, "fp32", "8bit", torch.zeros(2 * BLOCK))
        update(
            state,
            seeded(BLOCK).repeat(2),
            columns_of([0, 1]),
            **scalars,
        )
        assert state.first is not None
        drawn += state.first.values.view(2, BLOCK).tolist()
    assert len({*map(tuple, drawn)}) == len(drawn)
