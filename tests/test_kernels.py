"""Packing, reduction, scalars and casts against their twins in plain torch, bit for
bit. The update is in test_update.py, the number formats are in test_formats.py.

Row numbers are those of a survey of faults that users of other optimizers reported;
each comment says what the fault was. Without a GPU the kernels run in Triton's
interpreter; with one, on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import tolerances
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ALL_BACKENDS,
    BACKENDS,
    DEVICE,
    FLOATS,
    HYPER,
    OUTPUTS,
    SIZES,
    VARIANTS,
    assert_same_bits,
    columns_of,
    device_of,
    mixed_shard,
    placed,
    run_both,
    scalar_inputs,
    scalars_of,
    seeded,
    shard_of,
    words,
)
from torch import Tensor

from zerokern import ops
from zerokern.kernels import cast, codecs, pack, reduce, scalars, update
from zerokern.ops import BLOCK, PARTIAL

# The reduction.


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize(
    ("world", "rank"), [(w, r) for w in (1, 2, 3, 4) for r in range(w)]
)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_equals_its_twin(
    wire: torch.dtype, world: int, rank: int, accumulate: bool, backend: str
) -> None:
    for numel in (*SIZES, 4096 + 5):
        chunks = seeded(world * numel, numel).to(wire).view(world, numel)
        received = torch.cat((chunks[:rank], chunks[rank + 1 :]))
        partials = torch.zeros(ops.partials_numel(numel), dtype=torch.float64)
        done, expected = run_both(
            ops.reduce_,
            seeded(numel, 1),
            chunks[rank],
            received,
            partials,
            rank=rank,
            scale=1 / world,
            accumulate=accumulate,
            backend=backend,
        )
        assert_same_bits(done[0], expected[0])
        rtol = (
            tolerances.PARTIAL_RELATIVE
            if backend == "triton"
            else tolerances.NATIVE_PARTIAL_RELATIVE
        )
        torch.testing.assert_close(done[3], expected[3], rtol=rtol, atol=0.0)


@pytest.mark.parametrize("stored", FLOATS[1:])
@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_into_a_sixteen_bit_shard(
    stored: torch.dtype, wire: torch.dtype, accumulate: bool, backend: str
) -> None:
    # Sums are of fp32 and rounded once; the squares are those of what is stored.
    for numel in (64, PARTIAL + 64, PARTIAL + 5):
        chunks = torch.stack(
            [seeded(numel, seed, special=True) for seed in range(3)]
        ).to(wire)
        shard, partials = (
            seeded(numel, 4).to(stored),
            torch.zeros(ops.partials_numel(numel), dtype=torch.float64),
        )
        done, expected = run_both(
            ops.reduce_,
            shard,
            chunks[1],
            chunks[::2],
            partials,
            rank=1,
            scale=1 / 3,
            accumulate=accumulate,
            backend=backend,
        )
        assert_same_bits(done[0], expected[0])
        total = (
            chunks[0].float() + chunks[1].float() + chunks[2].float()
        ) * torch.tensor(1 / 3)
        assert_same_bits(
            done[0], (total + shard.float() if accumulate else total).to(stored)
        )
        assert torch.equal(done[3].isfinite(), expected[3].isfinite())
        finite = expected[3].isfinite()
        torch.testing.assert_close(
            done[3][finite], expected[3][finite], rtol=1e-13, atol=0.0
        )
        quiet = [torch.full((numel,), 0.1, dtype=wire) for _ in range(2)]
        done, _ = run_both(
            ops.reduce_,
            shard,
            quiet[0],
            quiet[1][None],
            partials,
            rank=0,
            scale=0.5,
            accumulate=False,
            backend=backend,
        )
        assert done[3].sum() == pytest.approx(
            (done[0].double() ** 2).sum().item(), rel=1e-12
        )


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_of_special_numbers(wire: torch.dtype, backend: str) -> None:
    chunks = torch.stack(
        [seeded(2 * PARTIAL + 64, seed, special=True) for seed in range(3)]
    ).to(wire)
    chunks[:, :32] = -0.0
    partials = torch.zeros(3, dtype=torch.float64)
    for scale in (1.0, 1 / 3):
        done, expected = run_both(
            ops.reduce_,
            torch.zeros(2 * PARTIAL + 64),
            chunks[1],
            chunks[::2],
            partials,
            rank=1,
            scale=scale,
            accumulate=False,
            backend=backend,
        )
        assert_same_bits(done[0], expected[0])
        assert torch.equal(done[3].isfinite(), expected[3].isfinite())


def test_reduce_of_integers_is_exact_and_finite_squares_stay_finite() -> None:
    chunks = torch.randint(
        -8, 9, (4, 2 * PARTIAL), generator=torch.Generator().manual_seed(0)
    ).float()
    triton, expected = run_both(
        ops.reduce_,
        torch.zeros(2 * PARTIAL),
        chunks[2],
        chunks[[0, 1, 3]],
        torch.zeros(2, dtype=torch.float64),
        rank=2,
        scale=1.0,
        accumulate=False,
    )
    for actual, twin in zip(triton, expected, strict=True):
        assert_same_bits(actual, twin)
    # Rows 58 and 59: fp32 squares of 1e20 and fp16 squares of 300 overflow; the norm
    # must not.
    for value, wire in ((1e20, torch.float32), (300.0, torch.float16)):
        gradient = torch.zeros(PARTIAL, dtype=wire)
        gradient[:100] = value
        triton, _ = run_both(
            ops.reduce_,
            torch.zeros(PARTIAL),
            gradient,
            torch.empty(0, PARTIAL, dtype=wire),
            torch.zeros(1, dtype=torch.float64),
            rank=0,
            scale=1.0,
            accumulate=False,
        )
        assert triton[3].sqrt().item() == pytest.approx(10 * value, rel=1e-7)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_accumulation_loses_nothing_of_bf16_gradients(backend: Any) -> None:
    # Row 39: sums of many micro-batches in bf16.
    device = device_of(backend)
    shard, partials = (
        torch.zeros(BLOCK, device=device),
        torch.zeros(1, dtype=torch.float64, device=device),
    )
    exact, nothing = 0.0, torch.empty(0, BLOCK, dtype=torch.bfloat16, device=device)
    for k in range(64):
        grad = torch.full((BLOCK,), 1 + k * 2**-9, device=device).bfloat16()
        exact += grad[0].double().item()
        ops.reduce_(
            shard,
            grad,
            nothing,
            partials,
            rank=0,
            scale=1.0,
            accumulate=k > 0,
            backend=backend,
        )
    torch.testing.assert_close(
        shard.cpu().double(), torch.full((BLOCK,), exact).double(), rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize("offset", range(0, 16, 3))
def test_reduce_in_place_at_any_address_between_guards(offset: int) -> None:
    # Rows 15, 16 and 63: rows of `received` lie apart, NaN lies between them, and the
    # shard is this rank's own chunk.
    numel = PARTIAL + 64
    buffer = torch.full((3, numel + 64), math.nan, device=DEVICE)
    views = buffer[:, offset : offset + numel].copy_(seeded(3 * numel).view(3, numel))
    expected = [
        views[0].cpu().clone(),
        views[1:].cpu().clone(),
        torch.zeros(2, dtype=torch.float64),
    ]
    partials = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    ops.reduce_(
        views[0], views[0], views[1:], partials, rank=0, scale=0.5, backend="triton"
    )
    ops.reduce_(
        expected[0],
        expected[0],
        expected[1],
        expected[2],
        rank=0,
        scale=0.5,
        backend="torch",
    )
    assert_same_bits(views, torch.cat((expected[0][None], expected[1])))
    torch.testing.assert_close(
        partials.cpu(), expected[2], rtol=tolerances.PARTIAL_RELATIVE, atol=0.0
    )
    assert (
        buffer[:, :offset].isnan().all() and buffer[:, offset + numel :].isnan().all()
    )


# The scalars.


def run_scalars(
    inputs: dict[str, Any], backend: str = "triton"
) -> tuple[list[Any], list[Any]]:
    """Run on both back ends; return table, keys, steps and report of each."""
    options = {name: value for name, value in inputs.items() if name not in OUTPUTS}
    return run_both(
        ops.scalars_, *(inputs[name] for name in OUTPUTS), backend=backend, **options
    )


@pytest.mark.parametrize(
    "norms",
    [[0.5], [0.0, 0.0], [3.0, 4.0, 1e20], [math.inf, 1.0], [1.0, math.nan], [1e11] * 4],
)
@pytest.mark.parametrize("limit", [math.inf, 1.0, 0.0])
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
@pytest.mark.parametrize("rule", ["adam", "lion", "sgd"])
def test_scalars_equal_their_twin(
    norms: list[float], limit: float, loss_scale: float, rule: Any
) -> None:
    # 70 parameters in two groups: three words of used bits; one maximizes with L2.
    # Steps: row 49 and far beyond.
    inputs = scalar_inputs(70, rule=rule)
    other = {
        **HYPER,
        "lr": 1.0,
        "beta1": 0.0,
        "beta2": 0.95,
        "sign": -1.0,
        "decoupled": 0.0,
        "nesterov": 1.0,
    }
    inputs["hyper"] = torch.cat(
        (inputs["hyper"], torch.tensor([list(other.values())], dtype=torch.float64))
    )
    inputs["group_of_column"] = torch.arange(70) % 2
    inputs["steps"] = torch.tensor([0, 1, 15, 16, 17, 2**24, 2**35] * 10)
    inputs["gathered"] = words(
        norms, [column for column in range(70) if column % 3], 70
    )
    inputs["gathered"][0, 3] = 0  # what one rank did not use, another may have
    inputs["limits"] = torch.tensor([limit, loss_scale], dtype=torch.float64)
    native, expected = run_scalars(inputs, "native")
    triton, _ = run_scalars(inputs)
    for ours, compiled, twin in zip(triton, native, expected, strict=True):
        assert_same_bits(ours, twin)
        assert_same_bits(compiled, twin)
    table, keys, steps, report = triton
    finite = all(map(math.isfinite, norms))
    used = torch.tensor(
        [bool(column % 3) and (column < 64 or len(norms) > 1) for column in range(70)]
    )
    # Row 49: an fp32 counter stops at 2^24.
    assert torch.equal(steps - inputs["steps"], (used & finite).long())
    assert torch.equal(table[-1] != 0, used & finite)
    assert torch.equal(keys, codecs.mix64(inputs["seeds"] + steps * codecs.GOLDEN))
    # Row 57: a norm that is not finite is reported as such. Row 56: the skipped step is
    # counted.
    assert math.isfinite(report[0]) == finite and report[2] == (not finite)


def test_many_parameters_take_several_programs() -> None:
    triton, expected = run_scalars(scalar_inputs(2 * scalars.TILE + 3))
    for actual, twin in zip(triton, expected, strict=True):
        assert_same_bits(actual, twin)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_counters_and_keys_go_on_past_what_fp32_counts(backend: str) -> None:
    # Rows 47 to 49: counters are int64 and live where the table does; each step has
    # keys of its own.
    inputs = placed_inputs = scalar_inputs(3, step=2**24)
    placed_inputs = {
        k: placed(v, device_of(backend)) if isinstance(v, Tensor) else v
        for k, v in inputs.items()
    }
    seen = set()
    for done in range(1, 4):
        ops.scalars_(**placed_inputs, backend=backend)  # type: ignore[arg-type]
        assert placed_inputs["steps"].tolist() == [2**24 + done] * 3
        seen |= {*placed_inputs["keys"].tolist()}
    assert len(seen) == 9
    # A key depends on seed and step, on nothing else: not on the other parameters, nor
    # on whether it was used before.
    alone = scalar_inputs(1, step=2**24 + 2)
    alone["seeds"] = inputs["seeds"][1:2]
    ops.scalars_(**alone, backend="torch")
    assert alone["keys"][0] == placed_inputs["keys"][1].cpu()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_norm_is_that_of_all_ranks(backend: str) -> None:
    # Row 60: clipping by the norm of one's own shard.
    inputs = scalar_inputs(2)
    inputs["gathered"] = words([3.0, 4.0, 0.0, 12.0], [0, 1], 2)
    inputs["limits"] = torch.tensor([1.0, 1.0], dtype=torch.float64)
    table, _, _, report = run_scalars(inputs, backend)[0]
    assert report[0] == 13.0
    assert report[1].item() == pytest.approx(1 / 13, rel=1e-6)
    assert table[0].tolist() == [report[1].float().item()] * 2


# Packing and casts.


def slots(
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    device: str,
    strides: Sequence[Any] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Return a bucket full of 7s and a view for each source, at multiples of 64
    elements."""
    starts = [0]
    for source in sources:
        starts.append(starts[-1] + -(-source.numel() // BLOCK) * BLOCK)
    bucket = torch.full((starts[-1],), 7.0, dtype=dtype, device=device)
    strides = strides or [torch.empty(source.shape).stride() for source in sources]
    places = zip(sources, strides, starts[:-1], strict=True)
    return bucket, [
        bucket.as_strided(source.shape, stride, start)
        for source, stride, start in places
    ]


def check_pack(
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    scale: float = 1.0,
    strides: Sequence[Any] = (),
) -> None:
    """Pack on both backends into buckets, compare all of both, and unpack again."""
    bucket, views = slots(sources, dtype, DEVICE, strides)
    expected, expected_views = slots(sources, dtype, "cpu", strides)
    ops.pack_(views, [s.to(DEVICE) for s in sources], scale, backend="triton")
    ops.pack_(expected_views, sources, scale, backend="torch")
    assert_same_bits(bucket, expected)
    back = [torch.zeros_like(s, device=DEVICE) for s in sources]
    ops.pack_(back, views, backend="triton")
    for actual, view in zip(back, expected_views, strict=True):
        assert_same_bits(actual, view.to(actual.dtype))


@pytest.mark.parametrize("destination", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_pack_equals_its_twin(
    source: torch.dtype, destination: torch.dtype, scale: float
) -> None:
    sources = [
        seeded(n, n, special=True).to(source)
        for n in (5, 0, 8, 63, 64, 65, 2047, 2048, 2049, 4099, 1)
    ]
    check_pack(sources, destination, scale)


@pytest.mark.parametrize("offset", range(16))
def test_pack_and_cast_at_any_address(offset: int) -> None:
    # Rows 15 and 16, with 128-bit and odd addresses in one call.
    for source in (torch.bfloat16, torch.float32):
        memory = seeded(3000).to(source)
        check_pack([memory[offset : offset + 2500], memory[:77]], torch.bfloat16)
        out = torch.full((3000,), 7.0, dtype=torch.bfloat16, device=DEVICE)
        ops.cast_(
            out[offset : offset + 2500],
            memory[offset : offset + 2500].to(DEVICE),
            backend="triton",
        )
        assert_same_bits(
            out[offset : offset + 2500], memory[offset : offset + 2500].bfloat16()
        )
        assert (out[:offset] == 7).all() and (out[offset + 2500 :] == 7).all()


def test_pack_reads_strides() -> None:
    image = seeded(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    sources = [
        seeded(6 * 7).view(6, 7).t(),  # row 14
        seeded(400).view(20, 20)[::2, 1::3],
        torch.ones(()).expand(3, 4),
        # Row 12: the stride of a dimension of length 1 means nothing.
        seeded(200).as_strided((2, 1, 100), (100, 1, 1)),
        seeded(0).view(0, 3),
        image.to(memory_format=torch.channels_last),  # row 13, both ways
        image,
    ]
    check_pack(sources, torch.float32)
    strides = [torch.empty(s.shape).stride() for s in sources[:5]]
    last = torch.empty(image.shape, memory_format=torch.channels_last).stride()
    check_pack(sources, torch.bfloat16, strides=[*strides, last, last])


@pytest.mark.skipif(DEVICE == "cuda", reason="launches nothing")
def test_equal_layouts_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []
    monkeypatch.setattr(
        pack,
        "_uploaded",
        lambda device, entries: addresses.extend(entries) or torch.zeros(100),
    )
    monkeypatch.setattr(pack, "launch", lambda *args, **options: None)
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sources = [torch.zeros(200).as_strided((2, 1, 100), (100, 1, 1)), image]
    destinations = [torch.zeros(2, 1, 100), torch.zeros_like(image)]
    pack.pack_(destinations, sources)
    assert [source for source, _, _ in addresses] == [s.data_ptr() for s in sources]


def test_pack_where_the_table_does_not_reach() -> None:
    wide = seeded(100).double()
    holes = torch.zeros(10, 20, device=DEVICE)[:, ::2]
    pack.pack_(
        [torch.zeros(100, device=DEVICE), holes],
        [wide.to(DEVICE), wide.view(10, 10).to(DEVICE)],
        0.5,
    )
    assert_same_bits(holes, wide.float().view(10, 10) * 0.5)


@pytest.mark.parametrize("position", range(12))
def test_pack_with_empty_tensors_anywhere(position: int) -> None:
    # Rows 7 and 8.
    check_pack(
        [seeded(0 if index in (position, 11) else 1 + index) for index in range(12)],
        torch.float32,
    )
    ops.pack_(
        [torch.zeros(0, device=DEVICE)],
        [torch.zeros(0, device=DEVICE)],
        backend="triton",
    )


def test_pack_launches_once_for_25_000_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rows 9 and 11.
    launches = []
    monkeypatch.setattr(
        pack,
        "launch",
        lambda kernel, programs, *args, **options: launches.append(programs),
    )
    sources = list(torch.zeros(25_000, 4, device=DEVICE)[:, :1])
    destinations = list(torch.zeros(25_000, 64, device=DEVICE)[:, :1])
    ops.pack_(destinations, sources, backend="triton")
    assert launches == [25_000]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any shape and permutation, some with gaps or odd addresses, in any
    format."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    gap, offset = (
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from([0, 0, 1, 3, 8])),
    )
    memory = seeded(math.prod(shape) * gap + offset, draw(st.integers(0, 99)))[
        offset::gap
    ][: math.prod(shape)]
    order = draw(st.permutations(range(len(shape))))
    return (
        memory.view(shape)
        .permute(order)
        .to(draw(st.sampled_from(FLOATS)), copy=draw(st.booleans()))
    )


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    st.lists(tensors(), max_size=5),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.sampled_from([1.0, 0.1]),
)
def test_pack_of_any_tensors(
    sources: list[Tensor], dtype: torch.dtype, permuted: bool, scale: float
) -> None:
    dense = [torch.empty_like(s) if permuted else torch.empty(s.shape) for s in sources]
    check_pack(sources, dtype, scale, [t.stride() for t in dense])


@pytest.mark.parametrize("out", FLOATS)
def test_casts_of_all_patterns(out: torch.dtype) -> None:
    # Rows 36, 37 and S1: every bf16 and fp16 number; every upper half of fp32 with the
    # lower halves around a tie.
    halves = torch.arange(-(2**15), 2**15)
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = {
        torch.bfloat16: halves.to(torch.int16).view(torch.bfloat16),
        torch.float16: halves.to(torch.int16).view(torch.float16),
        torch.float32: (
            ((halves[:, None] << 16) + lower)
            .flatten()
            .to(torch.int32)
            .view(torch.float32)
        ),
    }
    for values in patterns.values():
        triton, expected = run_both(
            ops.cast_, torch.zeros(values.numel(), dtype=out), values
        )
        assert_same_bits(triton[0], expected[0])


# All of them.


@pytest.mark.parametrize(
    "kernel",
    [
        update.update_kernel,
        reduce.reduce_kernel,
        scalars.scalars_kernel,
        pack.pack_kernel,
        cast.cast_kernel,
    ],
)
def test_no_value_is_compiled_into_a_kernel(kernel: Any) -> None:
    # Rows 45 and 46: Triton compiles anew for integers that are 1, or multiples of 16,
    # unless told not to.
    told = (
        kernel.kwargs["do_not_specialize"]
        if hasattr(kernel, "kwargs")
        else kernel.do_not_specialize
    )
    values = {
        name
        for name in kernel.arg_names
        if name.islower() and not name.endswith("_ptr")
    }
    assert values - {"scale"} == set(told)  # a float is never specialised


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE != "cuda",
    reason="the interpreter compiles nothing; test_cards.py reads the specialisations",
)
def test_values_do_not_recompile() -> None:
    # Rows 45 and 46, by what lies in the kernels' caches.
    counts = []
    for blocks, num_columns, step in (
        (16, 2, 0),
        (1, 1, 1),
        (17, 16, 16),
        (15, 3, 17),
        (1024, 17, 2**24),
    ):
        state, grad = (
            mixed_shard(VARIANTS["adamw"], "fp32", "fp32", blocks * BLOCK),
            seeded(blocks * BLOCK),
        )
        options = scalars_of(
            VARIANTS["adamw"], num_columns, step, lr=1.0 if step == 1 else 1e-3
        )
        run_both(ops.update_, state, grad, columns=columns_of([0] * blocks), **options)
        partials = torch.zeros(ops.partials_numel(blocks * BLOCK), dtype=torch.float64)
        for world in (1, 2):
            received = grad.view(1, -1)[: world - 1]
            run_both(
                ops.reduce_, grad, grad, received, partials, rank=0, scale=1 / world
            )
        run_scalars(scalar_inputs(num_columns, step))
        device = torch.cuda.current_device()
        kernels = (update.update_kernel, reduce.reduce_kernel, scalars.scalars_kernel)
        counts.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert all(count == counts[0] for count in counts)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_no_operation_draws_from_torch(backend: Any) -> None:
    # Rounding at random must not change what a training run draws, nor be changed by
    # it.
    device = device_of(backend)
    chosen = VARIANTS["amsgrad"]
    before = torch.get_rng_state()
    state = shard_of(chosen, "split24", "8bit", seeded(BLOCK), backend=backend)
    options = {
        k: placed(v, device) if isinstance(v, Tensor) else v
        for k, v in scalars_of(chosen).items()
    }
    grad, partials = (
        seeded(BLOCK).to(device),
        torch.zeros(1, dtype=torch.float64, device=device),
    )
    ops.update_(
        state, grad, columns=placed(columns_of([0]), device), backend=backend, **options
    )
    ops.reduce_(
        grad, grad, grad[None, :][:0], partials, rank=0, scale=1.0, backend=backend
    )
    ops.cast_(state.param, grad, backend=backend)
    ops.pack_([state.param], [grad], 0.5, backend=backend)
    inputs = {
        k: placed(v, device) if isinstance(v, Tensor) else v
        for k, v in scalar_inputs(1).items()
    }
    ops.scalars_(**inputs, backend=backend)
    assert torch.equal(torch.get_rng_state(), before)
    # The same seed, the same bits, whatever was drawn meanwhile.
    again = shard_of(chosen, "split24", "8bit", seeded(BLOCK), backend=backend)
    torch.rand(7)
    ops.update_(
        again,
        seeded(BLOCK).to(device),
        columns=placed(columns_of([0]), device),
        backend=backend,
        **options,
    )
    assert again.first is not None and state.first is not None
    assert_same_bits(again.first.values, state.first.values.cpu())
