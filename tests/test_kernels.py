"""Every kernel against its twin in plain torch, bit for bit, and the twin against torch.optim in fp64.

Without a GPU the kernels run in Triton's interpreter; with one, on it. Row numbers are those of a survey of faults that
users of other optimizers reported; each comment says what the fault was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zerokern import ops
from zerokern.kernels import adamw, launch, native, pack, reduce, scalars
from zerokern.ops import BLOCK, PARTIAL, RowMap

DEVICE = "cuda" if torch.cuda.is_available() and not launch.INTERPRETED else "cpu"
BACKENDS = ("triton", pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="no C compiler")))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (64, 128, 4096 - 64, 4096, 4096 + 64, 3 * 4096 + 192)
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 1e-38, 65504.0, 65520.0, 3.3895e38, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan)
RECIPES = [
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32), (torch.float16, torch.float16),
]  # fmt: skip
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "sign": 1.0, "decoupled": 1.0}


def seeded(numel: int, seed: int = 0, special: bool = False) -> Tensor:
    """Return normal fp32 numbers; with `special`, every seventh is a limit of some format."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if special:
        positions = torch.arange(seed % 7, numel, 7)
        values[positions] = torch.tensor(SPECIAL)[positions % len(SPECIAL)]
    return values


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Bit equality; all NaNs are one."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.is_floating_point():
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(actual), nan)
        actual, expected = (t.contiguous().view(integer).masked_fill(nan, 0) for t in (actual, expected))
    assert torch.equal(actual, expected)


def placed(value: Any, device: str) -> Any:
    """Return clones of all tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return RowMap(value.block_row.to(device, copy=True), value.runs) if isinstance(value, RowMap) else value


def run_both(
    function: Callable[..., None], *args: Any, backend: str = "triton", **options: Any
) -> tuple[list[Any], list[Any]]:
    """Run a function on a backend and on plain torch, on clones; return the positional arguments of both."""
    sides = []
    for side, device in ((backend, DEVICE if backend == "triton" else "cpu"), ("torch", "cpu")):
        arguments = [placed(value, device) for value in args]
        function(*arguments, **{k: placed(v, device) for k, v in options.items()}, backend=side)
        sides.append([value.cpu() if isinstance(value, Tensor) else value for value in arguments])
    return sides[0], sides[1]


def rows_of(row_of_block: Sequence[int]) -> RowMap:
    runs: list[tuple[int, int, int]] = []
    for block, row in enumerate(row_of_block):
        first = runs.pop()[0] if runs and runs[-1][2] == row else block
        runs.append((first, block + 1, row))
    return RowMap(torch.tensor(row_of_block, dtype=torch.int32), tuple(runs))


def words(norms: Sequence[float], used: Sequence[int], num_rows: int) -> Tensor:
    """Return `gathered` of ranks with these shard norms, each of which used these rows."""
    bits = torch.zeros(len(norms), 1 + -(-num_rows // 32), dtype=torch.int64)
    bits[:, 0] = (torch.tensor(norms, dtype=torch.float64) ** 2).view(torch.int64)
    for row in used:
        bits[:, 1 + row // 32] |= 1 << (row % 32)
    return bits


def scalar_inputs(num_rows: int, step: int = 0, **hyper: float) -> dict[str, Tensor]:
    return {
        "table": torch.zeros(len(ops.TABLE), num_rows),
        "steps": torch.full((num_rows,), step),
        "report": torch.zeros(3, dtype=torch.float64),
        "hyper": torch.tensor([list({**HYPER, **hyper}.values())], dtype=torch.float64),
        "group_of_row": torch.zeros(num_rows, dtype=torch.int64),
        "gathered": words([1.0], range(num_rows), num_rows),
        "limits": torch.tensor([math.inf, 1.0], dtype=torch.float64),
    }


def table_of(num_rows: int = 1, step: int = 0, inactive: Sequence[int] = (), **hyper: float) -> Tensor:
    """Return the scalar table of one step after `step` steps, without clipping."""
    inputs = scalar_inputs(num_rows, step, **hyper)
    inputs["gathered"] = words([1.0], [row for row in range(num_rows) if row not in inactive], num_rows)
    ops.scalars_(**inputs, backend="torch")
    return inputs["table"]


def shard(numel: int, param: torch.dtype, grad: torch.dtype, special: bool = False) -> list[Any]:
    """Return (param, master, exp_avg, exp_avg_sq, grad)."""
    weight, exp_avg, exp_avg_sq, gradient = (seeded(numel, seed, special) for seed in range(4))
    master = None if param == torch.float32 else weight
    return [weight.to(param), master, exp_avg * 0.1, exp_avg_sq.abs() * 0.01, gradient.to(grad)]


def ulp(value: Tensor) -> Tensor:
    """Return the distance of fp32 numbers at the magnitude of an fp64 value."""
    return torch.exp2(torch.floor(torch.log2(value.abs().clamp_min(2.0**-126))) - 23)


# The update.


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("param", "grad"), RECIPES)
@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adamw_equals_its_twin(numel: int, param: torch.dtype, grad: torch.dtype, special: bool, backend: str) -> None:
    rows = rows_of([block * 5 // (numel // BLOCK) for block in range(numel // BLOCK)])
    for l2, decoupled in ((False, 1.0), (True, 0.0)):
        table = table_of(5, step=3, inactive=[1, 3], decoupled=decoupled)
        state = shard(numel, param, grad, special)
        done, expected = run_both(ops.adamw_, *state, table=table, rows=rows, l2=l2, backend=backend)
        for actual, twin in zip(done, expected, strict=True):
            if twin is not None:
                assert_same_bits(actual, twin)


@pytest.mark.parametrize(("param", "grad"), RECIPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_inactive_rows_keep_their_bits_whatever_the_gradient(
    param: torch.dtype, grad: torch.dtype, backend: str
) -> None:
    # Rows 50 and 55: a skipped step leaves parameters and moments alone, also under NaN and infinity.
    state = shard(4 * BLOCK, param, grad)
    state[4][:] = torch.tensor([math.nan, math.inf, -math.inf, 1.0]).repeat(BLOCK).to(grad)
    table, rows = table_of(2, inactive=[0, 1]), rows_of([0, 0, 1, 1])
    done, _ = run_both(ops.adamw_, *state, table=table, rows=rows, backend=backend)
    for actual, before in zip(done, state, strict=True):
        if before is not None:
            assert_same_bits(actual, before)


@pytest.mark.parametrize("offset", range(16))
def test_adamw_at_any_address(offset: int) -> None:
    # Rows 15 and 16. The guards around the shard stay as they were, and their NaN goes nowhere (row 63).
    state = shard(20 * BLOCK, torch.bfloat16, torch.bfloat16)
    guarded = [torch.full((20 * BLOCK + 32,), math.nan, dtype=t.dtype, device=DEVICE) for t in state]
    views = [buffer[offset : offset + 20 * BLOCK].copy_(t) for buffer, t in zip(guarded, state, strict=True)]
    rows, table = rows_of([0] * 20), table_of()
    ops.adamw_(*views, table=table.to(DEVICE), rows=placed(rows, DEVICE), backend="triton")
    ops.adamw_(*state, table=table, rows=rows, backend="torch")
    for buffer, view, expected in zip(guarded, views, state, strict=True):
        assert_same_bits(view, expected)
        assert buffer[:offset].isnan().all() and buffer[offset + 20 * BLOCK :].isnan().all()


@pytest.mark.parametrize("pieces", [2, 5])
def test_adamw_in_pieces_is_adamw_at_once(pieces: int) -> None:
    # Row 41: several calls in one step.
    state, table = shard(20 * BLOCK, torch.float32, torch.float32), table_of(4, step=1)
    rows = [block // 5 for block in range(20)]
    whole, _ = run_both(ops.adamw_, *state, table=table, rows=rows_of(rows))
    per_piece = 20 // pieces
    for piece in range(pieces):
        window = slice(piece * per_piece * BLOCK, (piece + 1) * per_piece * BLOCK)
        part = [None if t is None else t[window] for t in state]
        part_rows = rows_of(rows[piece * per_piece : (piece + 1) * per_piece])
        triton, _ = run_both(ops.adamw_, *part, table=table, rows=part_rows)
        assert_same_bits(triton[0], whole[0][window])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_small_numbers_survive_sixteen_bits(backend: Any) -> None:
    device = DEVICE if backend == "triton" else "cpu"
    rows, table = placed(rows_of([0]), device), table_of(weight_decay=0.0).to(device)
    state = [placed(t, device) for t in shard(BLOCK, torch.float16, torch.float16)]
    weight = state[0].clone()
    for t in (*state[2:4], state[4]):
        t.zero_()
    state[1].copy_(state[0])
    ops.adamw_(*state, table=table, rows=rows, backend=backend)
    assert_same_bits(state[0], weight.cpu())  # row 29: eps must not become 0 in fp16
    state[4].fill_(1e-4)
    ops.adamw_(*state, table=table, rows=rows, backend=backend)
    # Row 20: v must not pass through the parameter's 16 bits, where it would be 0.
    torch.testing.assert_close(state[3].double(), 0.001 * state[4].double() ** 2, rtol=1e-6, atol=0.0)


def test_bf16_parameters_have_a_master() -> None:
    # Row 23: updates below half a bf16 ulp add up.
    one, zero = torch.ones(BLOCK), torch.zeros(BLOCK)
    state = [one.bfloat16(), one, zero, zero, one.bfloat16()]
    for step in range(10):
        table = table_of(step=step, lr=1e-4, weight_decay=0.0)
        state, _ = run_both(ops.adamw_, *state, table=table, rows=rows_of([0]))
    torch.testing.assert_close(state[1], torch.full((BLOCK,), 1 - 1e-3), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("step", [0, 1, 10, 10_000])
@pytest.mark.parametrize(("lr", "beta1", "beta2", "weight_decay"), [
    (1e-3, 0.9, 0.999, 0.01), (3e-4, 0.9, 0.95, 0.1), (1e-2, 0.8, 0.99999, 0.0), (1.0, 0.0, 0.9, 0.0),
])  # fmt: skip
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_reference_is_torch_in_fp64(
    step: int, lr: float, beta1: float, beta2: float, weight_decay: float, decoupled: bool
) -> None:
    # Rows 28 (bias correction on step 1) and 32 (decay before the update).
    weight, _, exp_avg, exp_avg_sq, grad = shard(4096, torch.float32, torch.float32)
    if step == 0:
        exp_avg.zero_(), exp_avg_sq.zero_()
    parameter = torch.nn.Parameter(weight.double())
    parameter.grad = grad.double()
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class([parameter], lr=lr, betas=(beta1, beta2), weight_decay=weight_decay, foreach=False)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step)), "exp_avg": exp_avg.double(), "exp_avg_sq": exp_avg_sq.double(),
    }  # fmt: skip
    optimizer.step()
    hyper = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "decoupled": float(decoupled)}
    table, before = table_of(step=step, **hyper), (weight.clone(), exp_avg.clone(), exp_avg_sq.clone())
    ops.adamw_(weight, None, exp_avg, exp_avg_sq, grad, table=table, rows=rows_of([0] * 64), l2=not decoupled)
    state = optimizer.state[parameter]
    w0, m0, v0, g = (t.double() for t in (*before, grad))
    g_sum = g.abs() + (0.0 if decoupled else weight_decay * w0.abs())  # the terms of g may cancel
    largest = {
        "weight": torch.maximum(w0.abs(), parameter.data.abs()),
        "exp_avg": torch.maximum(beta1 * m0.abs(), (1 - beta1) * g_sum),
        "exp_avg_sq": beta2 * v0 + (1 - beta2) * g_sum**2,
    }
    allowed = {
        name: (tolerances.ADAMW_ULP + tolerances.L2_ULP * (not decoupled)) * ulp(t) for name, t in largest.items()
    }
    allowed["weight"] += tolerances.UPDATE_ULP * ulp(
        parameter.data - (w0 * (1 - lr * weight_decay) if decoupled else w0)
    )
    actual = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    exact = {"weight": parameter.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    for name in actual:
        assert ((actual[name].double() - exact[name]).abs() <= allowed[name]).all(), name


# The reduction.


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize(("world", "rank"), [(w, r) for w in (1, 2, 3, 4) for r in range(w)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_equals_its_twin(wire: torch.dtype, world: int, rank: int, accumulate: bool, backend: str) -> None:
    for numel in (*SIZES, 4096 + 5):
        chunks = seeded(world * numel, numel).to(wire).view(world, numel)
        received = torch.cat((chunks[:rank], chunks[rank + 1 :]))
        partials = torch.zeros(ops.partials_numel(numel), dtype=torch.float64)
        done, expected = run_both(
            ops.reduce_, seeded(numel, 1), chunks[rank], received, partials,
            rank=rank, scale=1 / world, accumulate=accumulate, backend=backend,
        )  # fmt: skip
        assert_same_bits(done[0], expected[0])
        rtol = tolerances.PARTIAL_RELATIVE if backend == "triton" else tolerances.NATIVE_PARTIAL_RELATIVE
        torch.testing.assert_close(done[3], expected[3], rtol=rtol, atol=0.0)


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reduce_of_special_numbers(wire: torch.dtype, backend: str) -> None:
    chunks = torch.stack([seeded(2 * PARTIAL + 64, seed, special=True) for seed in range(3)]).to(wire)
    chunks[:, :32] = -0.0
    partials = torch.zeros(3, dtype=torch.float64)
    for scale in (1.0, 1 / 3):
        done, expected = run_both(
            ops.reduce_, torch.zeros(2 * PARTIAL + 64), chunks[1], chunks[::2], partials,
            rank=1, scale=scale, accumulate=False, backend=backend,
        )  # fmt: skip
        assert_same_bits(done[0], expected[0])
        assert torch.equal(done[3].isfinite(), expected[3].isfinite())


def test_reduce_of_integers_is_exact_and_finite_squares_stay_finite() -> None:
    chunks = torch.randint(-8, 9, (4, 2 * PARTIAL), generator=torch.Generator().manual_seed(0)).float()
    triton, expected = run_both(
        ops.reduce_, torch.zeros(2 * PARTIAL), chunks[2], chunks[[0, 1, 3]], torch.zeros(2, dtype=torch.float64),
        rank=2, scale=1.0, accumulate=False,
    )  # fmt: skip
    for actual, twin in zip(triton, expected, strict=True):
        assert_same_bits(actual, twin)
    # Rows 58 and 59: fp32 squares of 1e20 and fp16 squares of 300 overflow; the norm must not.
    for value, wire in ((1e20, torch.float32), (300.0, torch.float16)):
        gradient = torch.zeros(PARTIAL, dtype=wire)
        gradient[:100] = value
        triton, _ = run_both(
            ops.reduce_, torch.zeros(PARTIAL), gradient, torch.empty(0, PARTIAL, dtype=wire),
            torch.zeros(1, dtype=torch.float64), rank=0, scale=1.0, accumulate=False,
        )  # fmt: skip
        assert triton[3].sqrt().item() == pytest.approx(10 * value, rel=1e-7)


@pytest.mark.parametrize("offset", range(0, 16, 3))
def test_reduce_in_place_at_any_address_between_guards(offset: int) -> None:
    # Rows 15, 16 and 63: rows of `received` lie apart, NaN lies between them, and the shard is this rank's own chunk.
    numel = PARTIAL + 64
    buffer = torch.full((3, numel + 64), math.nan, device=DEVICE)
    views = buffer[:, offset : offset + numel].copy_(seeded(3 * numel).view(3, numel))
    expected = [views[0].cpu().clone(), views[1:].cpu().clone(), torch.zeros(2, dtype=torch.float64)]
    partials = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    ops.reduce_(views[0], views[0], views[1:], partials, rank=0, scale=0.5, backend="triton")
    ops.reduce_(expected[0], expected[0], expected[1], expected[2], rank=0, scale=0.5, backend="torch")
    assert_same_bits(views, torch.cat((expected[0][None], expected[1])))
    torch.testing.assert_close(partials.cpu(), expected[2], rtol=tolerances.PARTIAL_RELATIVE, atol=0.0)
    assert buffer[:, :offset].isnan().all() and buffer[:, offset + numel :].isnan().all()


# The scalars.


@pytest.mark.parametrize("norms", [[0.5], [0.0, 0.0], [3.0, 4.0, 1e20], [math.inf, 1.0], [1.0, math.nan], [1e11] * 4])
@pytest.mark.parametrize("limit", [math.inf, 1.0, 0.0])
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_scalars_equal_their_twin(norms: list[float], limit: float, loss_scale: float) -> None:
    # 70 parameters in two groups: three words of used bits; one maximizes with L2. Steps: row 49 and far beyond.
    inputs = scalar_inputs(70)
    other = {**HYPER, "lr": 1.0, "beta1": 0.0, "beta2": 0.95, "sign": -1.0, "decoupled": 0.0}
    inputs["hyper"] = torch.cat((inputs["hyper"], torch.tensor([list(other.values())], dtype=torch.float64)))
    inputs["group_of_row"] = torch.arange(70) % 2
    inputs["steps"] = torch.tensor([0, 1, 15, 16, 17, 2**24, 2**35] * 10)
    inputs["gathered"] = words(norms, [row for row in range(70) if row % 3], 70)
    inputs["gathered"][0, 3] = 0  # what one rank did not use, another may have
    inputs["limits"] = torch.tensor([limit, loss_scale], dtype=torch.float64)
    names = ("table", "steps", "report")
    options = {k: v for k, v in inputs.items() if k not in names}
    triton, expected = run_both(ops.scalars_, *(inputs[name] for name in names), **options)
    for actual, twin in zip(triton, expected, strict=True):
        assert_same_bits(actual, twin)
    finite = all(map(math.isfinite, norms))
    used = torch.tensor([bool(row % 3) and (row < 64 or len(norms) > 1) for row in range(70)])
    assert torch.equal(triton[1] - inputs["steps"], (used & finite).long())
    assert torch.equal(triton[0][-1] != 0, used & finite)
    # Row 57: a norm that is not finite is reported as such. Row 56: the skipped step is counted.
    assert math.isfinite(triton[2][0]) == finite and triton[2][2] == (not finite)


def test_many_parameters_take_several_programs() -> None:
    inputs = scalar_inputs(2 * scalars.TILE + 3)
    names = ("table", "steps", "report")
    options = {k: v for k, v in inputs.items() if k not in names}
    triton, expected = run_both(ops.scalars_, *(inputs[name] for name in names), **options)
    for actual, twin in zip(triton, expected, strict=True):
        assert_same_bits(actual, twin)


# Packing and casts.


def slots(
    sources: Sequence[Tensor], dtype: torch.dtype, device: str, strides: Sequence[Any] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Return a bucket full of 7s and a view for each source, at multiples of 64 elements."""
    starts = [0]
    for source in sources:
        starts.append(starts[-1] + -(-source.numel() // BLOCK) * BLOCK)
    bucket = torch.full((starts[-1],), 7.0, dtype=dtype, device=device)
    strides = strides or [torch.empty(source.shape).stride() for source in sources]
    places = zip(sources, strides, starts[:-1], strict=True)
    return bucket, [bucket.as_strided(source.shape, stride, start) for source, stride, start in places]


def check_pack(sources: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0, strides: Sequence[Any] = ()) -> None:
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
def test_pack_equals_its_twin(source: torch.dtype, destination: torch.dtype, scale: float) -> None:
    sources = [seeded(n, n, special=True).to(source) for n in (5, 0, 8, 63, 64, 65, 2047, 2048, 2049, 4099, 1)]
    check_pack(sources, destination, scale)


@pytest.mark.parametrize("offset", range(16))
def test_pack_and_cast_at_any_address(offset: int) -> None:
    # Rows 15 and 16, with 128-bit and odd addresses in one call.
    for source in (torch.bfloat16, torch.float32):
        memory = seeded(3000).to(source)
        check_pack([memory[offset : offset + 2500], memory[:77]], torch.bfloat16)
        out = torch.full((3000,), 7.0, dtype=torch.bfloat16, device=DEVICE)
        ops.cast_(out[offset : offset + 2500], memory[offset : offset + 2500].to(DEVICE), backend="triton")
        assert_same_bits(out[offset : offset + 2500], memory[offset : offset + 2500].bfloat16())
        assert (out[:offset] == 7).all() and (out[offset + 2500 :] == 7).all()


def test_pack_reads_strides() -> None:
    image = seeded(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    sources = [
        seeded(6 * 7).view(6, 7).t(),  # row 14
        seeded(400).view(20, 20)[::2, 1::3],
        torch.ones(()).expand(3, 4),
        seeded(200).as_strided((2, 1, 100), (100, 1, 1)),  # row 12: the stride of a dimension of length 1 means nothing
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
    monkeypatch.setattr(pack, "_uploaded", lambda device, entries: addresses.extend(entries) or torch.zeros(100))
    monkeypatch.setattr(pack, "launch", lambda *args, **options: None)
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sources = [torch.zeros(200).as_strided((2, 1, 100), (100, 1, 1)), image]
    destinations = [torch.zeros(2, 1, 100), torch.zeros_like(image)]
    pack.pack_(destinations, sources)
    assert [source for source, _, _ in addresses] == [s.data_ptr() for s in sources]


def test_pack_where_the_table_does_not_reach() -> None:
    wide = seeded(100).double()
    holes = torch.zeros(10, 20, device=DEVICE)[:, ::2]
    pack.pack_([torch.zeros(100, device=DEVICE), holes], [wide.to(DEVICE), wide.view(10, 10).to(DEVICE)], 0.5)
    assert_same_bits(holes, wide.float().view(10, 10) * 0.5)


@pytest.mark.parametrize("position", range(12))
def test_pack_with_empty_tensors_anywhere(position: int) -> None:
    # Rows 7 and 8.
    check_pack([seeded(0 if index in (position, 11) else 1 + index) for index in range(12)], torch.float32)
    ops.pack_([torch.zeros(0, device=DEVICE)], [torch.zeros(0, device=DEVICE)], backend="triton")


def test_pack_launches_once_for_25_000_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows 9 and 11.
    launches = []
    monkeypatch.setattr(pack, "launch", lambda kernel, programs, *args, **options: launches.append(programs))
    sources = list(torch.zeros(25_000, 4, device=DEVICE)[:, :1])
    destinations = list(torch.zeros(25_000, 64, device=DEVICE)[:, :1])
    ops.pack_(destinations, sources, backend="triton")
    assert launches == [25_000]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any shape and permutation, some with gaps or odd addresses, in any format."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    gap, offset = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([0, 0, 1, 3, 8]))
    memory = seeded(math.prod(shape) * gap + offset, draw(st.integers(0, 99)))[offset::gap][: math.prod(shape)]
    order = draw(st.permutations(range(len(shape))))
    return memory.view(shape).permute(order).to(draw(st.sampled_from(FLOATS)), copy=draw(st.booleans()))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(tensors(), max_size=5), st.sampled_from(FLOATS), st.booleans(), st.sampled_from([1.0, 0.1]))
def test_pack_of_any_tensors(sources: list[Tensor], dtype: torch.dtype, permuted: bool, scale: float) -> None:
    dense = [torch.empty_like(s) if permuted else torch.empty(s.shape) for s in sources]
    check_pack(sources, dtype, scale, [t.stride() for t in dense])


@pytest.mark.parametrize("out", FLOATS)
def test_casts_of_all_patterns(out: torch.dtype) -> None:
    # Rows 36, 37 and S1: every bf16 and fp16 number; every upper half of fp32 with the lower halves around a tie.
    halves = torch.arange(-(2**15), 2**15)
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = {
        torch.bfloat16: halves.to(torch.int16).view(torch.bfloat16),
        torch.float16: halves.to(torch.int16).view(torch.float16),
        torch.float32: ((halves[:, None] << 16) + lower).flatten().to(torch.int32).view(torch.float32),
    }
    for values in patterns.values():
        triton, expected = run_both(ops.cast_, torch.zeros(values.numel(), dtype=out), values)
        assert_same_bits(triton[0], expected[0])


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE != "cuda", reason="the interpreter compiles nothing; test_cards.py reads the specialisations"
)
def test_values_do_not_recompile() -> None:
    # Rows 45 and 46.
    counts = []
    for blocks, num_rows, step in ((16, 2, 0), (1, 1, 1), (17, 16, 16), (15, 3, 17), (1024, 17, 2**24)):
        state = shard(blocks * BLOCK, torch.float32, torch.float32)
        run_both(ops.adamw_, *state, table=table_of(num_rows, step), rows=rows_of([0] * blocks))
        chunks, partials = state[4].view(1, -1), torch.zeros(ops.partials_numel(blocks * BLOCK), dtype=torch.float64)
        for world in (1, 2):
            run_both(ops.reduce_, state[0], state[0], chunks[: world - 1], partials, rank=0, scale=1 / world)
        device = torch.cuda.current_device()
        kernels = (adamw.adamw_kernel, reduce.reduce_kernel)
        counts.append([len(kernel.device_caches[device][0]) for kernel in kernels])
    assert all(count == counts[0] for count in counts)
