"""The update of a shard, in every rule and every format: bits against its twin, and the
twin against torch.optim.

Row numbers are those of a survey of faults that users of other optimizers reported;
each comment says what the fault was.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import tolerances
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    ALL_BACKENDS,
    BACKENDS,
    FLOATS,
    MOMENTS,
    NEEDS_COMPILER,
    VARIANTS,
    WEIGHTS,
    Variant,
    assert_same_bits,
    columns_of,
    device_of,
    mapped,
    mixed,
    mixed_shard,
    moments_of,
    placed,
    run_both,
    scalar_inputs,
    scalars_of,
    schedule,
    seeded,
    shard_of,
    ulp,
    weights_of,
    window_of,
    words,
)
from torch import Tensor

from zerokern import ops
from zerokern.kernels import codecs
from zerokern.ops import BLOCK, Shard

ADAMW = VARIANTS["adamw"]
CASES = [
    (variant, weights, moments)
    for variant, weights, moments in itertools.product(VARIANTS, WEIGHTS, MOMENTS)
    if VARIANTS[variant].momentum or moments == "fp32"
]
MASTERS = ("bf16+fp32", "fp16+fp32", "split32", "split24")
"""Formats that keep more of a weight than its 16 bits."""


def update(
    shard: Shard, grad: Tensor, columns: Any, backend: Any = "native", **scalars: Any
) -> Shard:
    """Update in place on the back end's device."""
    device = device_of(backend)
    options = {name: placed(value, device) for name, value in scalars.items()}
    ops.update_(
        shard,
        grad.to(device),
        columns=placed(columns, device),
        backend=backend,
        **options,
    )
    return shard


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize(("variant", "weights", "moments"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_update_equals_its_twin(
    variant: str, weights: str, moments: str, backend: str
) -> None:
    # Row 38: gradients in any format beside weights in any other.
    blocks, chosen = 18, VARIANTS[variant]
    columns = columns_of(
        [0] * 3 + [1] * 3 + [2] * 5 + [3] + [4] * 6, first={0: 5, 4: 2**33}
    )
    scalars = scalars_of(chosen, 5, step=3, inactive=[1, 3])
    state = mixed_shard(chosen, weights, moments, blocks * BLOCK)
    index = (
        [*VARIANTS].index(variant)
        + [*WEIGHTS].index(weights)
        + [*MOMENTS].index(moments)
    )
    # A third of all, for the interpreter's time.
    grads = FLOATS if backend == "native" else FLOATS[index % 3 :][:1]
    for dtype in grads:
        grad = mixed(blocks * BLOCK, 9).to(dtype)
        done, expected = run_both(
            ops.update_, state, grad, columns=columns, backend=backend, **scalars
        )
        assert_same_bits(done[0], expected[0])
        assert_same_bits(done[1], grad)
        for first, end, column, _ in columns.runs:
            if column in (1, 3):
                assert_same_bits(
                    window_of(done[0], first, end), window_of(state, first, end)
                )


@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("weights", ["fp32", "bf16+fp32", "fp16+fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_update_with_any_gradient(
    weights: str, grad: torch.dtype, backend: str
) -> None:
    # Sizes around a program and a chunk of the CPU, one of them with several chunks to
    # a parameter.
    for blocks in (1, 15, 16, 17) if backend == "triton" else (1, 17, 256, 300, 513):
        state = mixed_shard(ADAMW, weights, "fp32", blocks * BLOCK)
        columns = columns_of([0] * (blocks // 3) + [1] * (blocks - blocks // 3))
        gradient = seeded(blocks * BLOCK, 9).to(grad)
        done, expected = run_both(
            ops.update_,
            state,
            gradient,
            columns=columns,
            backend=backend,
            **scalars_of(ADAMW, 2),
        )
        assert_same_bits(done[0], expected[0])


@pytest.mark.parametrize(
    "kinds",
    [k for k in itertools.product(MOMENTS, MOMENTS, ("fp32", "bf16")) if len({*k}) > 1],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_of_different_formats(
    kinds: tuple[str, str, str], backend: str
) -> None:
    chosen = VARIANTS["amsgrad"]
    state = mixed_shard(chosen, "split32", kinds, 4 * BLOCK)
    gradient = mixed(4 * BLOCK, 9)
    done, expected = run_both(
        ops.update_,
        state,
        gradient,
        columns=columns_of([0] * 4),
        backend=backend,
        **scalars_of(chosen, step=3),
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
    layouts(), st.sampled_from(CASES), st.sampled_from(FLOATS), st.integers(0, 2**25)
)
def test_update_of_any_layout(
    layout: Any, case: tuple[str, str, str], dtype: torch.dtype, step: int
) -> None:
    (column_of_block, first, inactive, num_columns), (variant, weights, moments) = (
        layout,
        case,
    )
    numel, chosen = len(column_of_block) * BLOCK, VARIANTS[variant]
    state, grad = (
        mixed_shard(chosen, weights, moments, numel),
        mixed(numel, step % 99).to(dtype),
    )
    options = scalars_of(chosen, num_columns, step, inactive) | {
        "columns": columns_of(column_of_block, first, num_columns)
    }
    for backend in ("triton", "native"):
        done, expected = run_both(ops.update_, state, grad, backend=backend, **options)
        assert_same_bits(done[0], expected[0])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_inactive_rows_keep_their_bits_whatever_the_gradient(
    weights: str, moments: str, backend: str
) -> None:
    # Rows 50, 55 and S8: a skipped step leaves parameters and moments alone, also under
    # NaN and infinity.
    chosen = VARIANTS["amsgrad"]
    before = mixed_shard(chosen, weights, moments, 4 * BLOCK)
    grad = torch.tensor([math.nan, math.inf, -math.inf, 1.0]).repeat(BLOCK)
    state = placed(before, device_of(backend))
    update(
        state,
        grad,
        columns_of([0, 0, 1, 1]),
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
    weights: str, moments: str, offset: int, backend: str
) -> None:
    # Rows 15 and 16: byte offsets of 1, 2 or 4 times the elements'. The guards around
    # the shard stay as they were, and their NaN goes nowhere (row 63).
    numel, columns, scalars = 3 * BLOCK, columns_of([0] * 3), scalars_of(ADAMW)
    state, grad = (
        mixed_shard(ADAMW, weights, moments, numel),
        seeded(numel, 9).bfloat16(),
    )
    buffers: list[tuple[Tensor, int]] = []

    def guarded(tensor: Tensor) -> Tensor:
        guard = math.nan if tensor.is_floating_point() else 0x55
        buffer = torch.full(
            (tensor.numel() + 32,), guard, dtype=tensor.dtype, device=device_of(backend)
        )
        buffers.append((buffer, tensor.numel()))
        return buffer[offset : offset + tensor.numel()].copy_(tensor)

    views, grad_view = mapped(state, guarded), guarded(grad)
    update(views, grad_view, columns, backend, **scalars)
    update(state, grad, columns, "torch", **scalars)
    assert_same_bits(views, state)
    for buffer, length in buffers:
        outside = torch.cat((buffer[:offset], buffer[offset + length :]))
        assert (
            outside.isnan() if outside.is_floating_point() else outside == 0x55
        ).all()


def shards(lengths: Sequence[int], cuts: Sequence[int]) -> list[tuple[int, int, Any]]:
    """Return (first block, end block, column map) of the shards of parameters of these
    lengths, cut at these blocks."""
    places = [
        (column, index)
        for column, length in enumerate(lengths)
        for index in range(length)
    ]
    made = []
    for first, end in itertools.pairwise([0, *cuts, len(places)]):
        starts: dict[int, int] = {}
        for column, index in places[first:end]:
            starts.setdefault(column, index)
        made.append(
            (
                first,
                end,
                columns_of(
                    [column for column, _ in places[first:end]], starts, len(lengths)
                ),
            )
        )
    return made


@pytest.mark.parametrize(
    ("weights", "moments"),
    [
        ("split32", "8bit"),
        ("split24", "bf16"),
        ("bf16", "8bit"),
        ("bf16", "fp32"),
        ("bf16+fp32", "8bit"),
    ],
)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_shard_in_pieces_is_the_shard(
    weights: str, moments: str, backend: str
) -> None:
    # Row 41: several calls in one step. Rows 34 and 35: world sizes of 1, 2, 4 and 8,
    # and uneven shards; formats that round at random must not depend on how parameters
    # are cut, nor formats with blocks on what is beside them.
    lengths, chosen = (5, 26, 1), VARIANTS["amsgrad"]
    blocks = sum(lengths)
    whole = mixed_shard(chosen, weights, moments, blocks * BLOCK)
    scalars = [scalars_of(chosen, len(lengths), step) for step in range(2)]
    grads = [seeded(blocks * BLOCK, step) for step in (8, 9)]
    start = placed(whole, "cpu")
    for options, grad in zip(scalars, grads, strict=True):
        update(whole, grad, shards(lengths, [])[0][2], "torch", **options)
    equal = [range(blocks // world, blocks, blocks // world) for world in (1, 2, 4, 8)]
    for cuts in (*equal, (3, 4, 27)) if backend != "triton" else (equal[2], (4, 27)):
        for first, end, columns in shards(lengths, cuts):
            piece = placed(window_of(start, first, end), device_of(backend))
            for options, grad in zip(scalars, grads, strict=True):
                update(
                    piece,
                    grad[first * BLOCK : end * BLOCK],
                    columns,
                    backend,
                    **options,
                )
            assert_same_bits(piece, window_of(whole, first, end))


def test_another_order_of_parameters_gives_the_same_bits() -> None:
    # Row 34: replicas that bucket their parameters differently must not diverge.
    scalars, chosen = scalars_of(ADAMW, 2), ADAMW
    weights, grad = seeded(8 * BLOCK), seeded(8 * BLOCK, 1)
    swapped = torch.cat((torch.arange(3 * BLOCK, 8 * BLOCK), torch.arange(3 * BLOCK)))
    one = update(
        shard_of(chosen, "bf16", "8bit", weights),
        grad,
        columns_of([0] * 3 + [1] * 5),
        **scalars,
    )
    other = update(
        shard_of(chosen, "bf16", "8bit", weights[swapped]),
        grad[swapped],
        columns_of([1] * 5 + [0] * 3),
        **scalars,
    )
    assert_same_bits(window_of(other, 5, 8), window_of(one, 0, 3))
    assert_same_bits(window_of(other, 0, 5), window_of(one, 3, 8))


def test_each_step_and_each_parameter_rounds_anew() -> None:
    # Row 48, on the host: what a step draws comes from its counter, on the device, and
    # from nothing that is frozen.
    drawn = []
    for step in range(3):
        scalars = scalars_of(ADAMW, 2, step, lr=0.0, weight_decay=0.0)
        state = shard_of(ADAMW, "fp32", "8bit", torch.zeros(2 * BLOCK))
        update(state, seeded(BLOCK).repeat(2), columns_of([0, 1]), **scalars)
        assert state.first is not None
        drawn += state.first.values.view(2, BLOCK).tolist()
    assert len({*map(tuple, drawn)}) == len(drawn)


# --------------------------------- against torch.optim and written-out formulas in fp64


class Exact(NamedTuple):
    """A result in fp64, and the magnitude of the largest term that it was summed from,
    to which its error is relative.

    Of a weight, also the magnitude of its update if no terms cancelled in it.
    """

    value: Tensor
    largest: Tensor
    update: Tensor | None = None


def check_against(exact: Sequence[Exact], state: Shard, extra: float = 0.0) -> None:
    """Compare fp32 weight and moments with fp64 ones; `extra` ulp more where decay is
    in the gradient."""
    results = [weights_of(state), *(m for m in moments_of(state) if m is not None)]
    for index, (actual, expected) in enumerate(zip(results, exact, strict=True)):
        allowed = (tolerances.RULE_ULP + extra) * ulp(expected.largest)
        if expected.update is not None:
            allowed += (tolerances.UPDATE_ULP + extra) * ulp(expected.update)
        assert ((actual.double() - expected.value).abs() <= allowed).all(), index


@pytest.mark.parametrize("step", [0, 1, 10, 10_000])
@pytest.mark.parametrize(
    ("lr", "beta1", "beta2", "weight_decay"),
    [
        (1e-3, 0.9, 0.999, 0.01),
        (3e-4, 0.9, 0.95, 0.1),
        (1e-2, 0.8, 0.99999, 0.0),
        (1.0, 0.0, 0.9, 0.0),
    ],
)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
def test_adam_is_torch_in_fp64(
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decoupled: bool,
    amsgrad: bool,
    maximize: bool,
) -> None:
    # Rows 28 (bias correction on step 1) and 32 (decay before the update).
    weight, grad = seeded(4096), seeded(4096, 3)
    exp_avg, exp_avg_sq = seeded(4096, 1) * 0.1, seeded(4096, 2).abs() * 0.01
    largest = exp_avg_sq + seeded(4096, 4) * 0.001
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq} | (
        {"max_exp_avg_sq": largest} if amsgrad else {}
    )
    if step == 0:
        states = {name: torch.zeros_like(t) for name, t in states.items()}
    sign = -1.0 if maximize else 1.0
    hyper = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "decoupled": float(decoupled),
    }
    variant = Variant("adam", {**hyper, "sign": sign}, amsgrad=amsgrad)
    state = shard_of(variant, "fp32", "fp32", weight, *states.values())
    update(state, grad, columns_of([0] * 64), "torch", **scalars_of(variant, step=step))

    parameter = torch.nn.Parameter(weight.double())
    parameter.grad = grad.double()
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [parameter],
        lr=lr,
        betas=(beta1, beta2),
        weight_decay=weight_decay,
        foreach=False,
        amsgrad=amsgrad,
        maximize=maximize,
    )
    before = {name: t.double() for name, t in states.items()}
    counter = torch.tensor(float(step))
    optimizer.state[parameter] = {"step": counter} | {
        name: t.clone() for name, t in before.items()
    }
    optimizer.step()
    after, new_weight, w, g = (
        optimizer.state[parameter],
        parameter.data,
        weight.double(),
        grad.double(),
    )
    # The terms of g may cancel.
    g_sum = g.abs() + (0.0 if decoupled else weight_decay * w.abs())
    m_sum = torch.maximum(beta1 * before["exp_avg"].abs(), (1 - beta1) * g_sum)
    v_sum = beta2 * before["exp_avg_sq"] + (1 - beta2) * g_sum**2
    step_taken = (new_weight - (w * (1 - lr * weight_decay) if decoupled else w)).abs()
    exact = [
        Exact(
            new_weight,
            torch.maximum(w.abs(), new_weight.abs()),
            step_taken * m_sum / after["exp_avg"].abs(),
        ),
        Exact(after["exp_avg"], m_sum),
        Exact(after["exp_avg_sq"], v_sum),
    ]
    if amsgrad:
        exact.append(
            Exact(
                after["max_exp_avg_sq"], torch.maximum(v_sum, before["max_exp_avg_sq"])
            )
        )
    check_against(exact, state, tolerances.L2_ULP * (not decoupled))


@pytest.mark.parametrize("step", [0, 1, 10])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [
        (0.0, 0.0, False),
        (0.9, 0.0, False),
        (0.9, 0.3, False),
        (0.9, 0.0, True),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
def test_sgd_is_torch_in_fp64(
    step: int,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
) -> None:
    weight, grad, buffer = seeded(4096), seeded(4096, 3), seeded(4096, 1)
    hyper = {
        "lr": 0.1,
        "beta1": momentum,
        "beta2": dampening,
        "nesterov": float(nesterov),
        "decoupled": 0.0,
    }
    hyper |= {"weight_decay": weight_decay, "sign": -1.0 if maximize else 1.0}
    variant = Variant("sgd", hyper, momentum=momentum != 0)
    state = shard_of(variant, "fp32", "fp32", weight, buffer * (step > 0))
    update(state, grad, columns_of([0] * 64), "torch", **scalars_of(variant, step=step))

    parameter = torch.nn.Parameter(weight.double())
    parameter.grad = grad.double()
    optimizer = torch.optim.SGD(
        [parameter],
        lr=0.1,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        maximize=maximize,
        foreach=False,
    )
    if momentum and step:
        optimizer.state[parameter]["momentum_buffer"] = buffer.double()
    optimizer.step()
    w, g = weight.double(), grad.double()
    g_sum = g.abs() + weight_decay * w.abs()
    m_sum = g_sum + (momentum * buffer.double().abs() if step else 0.0)
    steepest = 0.1 * (g_sum + momentum * m_sum if nesterov else m_sum)
    exact = [Exact(parameter.data, torch.maximum(w.abs(), steepest), steepest)]
    if momentum:
        exact.append(Exact(optimizer.state[parameter]["momentum_buffer"], m_sum))
    check_against(exact, state, tolerances.L2_ULP * (weight_decay > 0))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_lion_is_its_formula_in_fp64(sign: float) -> None:
    lr, beta1, beta2, weight_decay = 1e-2, 0.9, 0.99, 0.1
    weight, grad, moment = seeded(4096), seeded(4096, 3), seeded(4096, 1)
    hyper = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "sign": sign,
    }
    variant = Variant("lion", hyper)
    state = shard_of(variant, "fp32", "fp32", weight, moment)
    update(state, grad, columns_of([0] * 64), "torch", **scalars_of(variant, step=5))
    w, m, g = weight.double(), moment.double(), sign * grad.double()
    new_weight = w * (1 - lr * weight_decay) - lr * torch.sign(
        beta1 * m + (1 - beta1) * g
    )
    new_moment = beta2 * m + (1 - beta2) * g
    exact = [
        Exact(new_weight, w.abs() + lr),
        Exact(new_moment, beta2 * m.abs() + (1 - beta2) * g.abs()),
    ]
    check_against(exact, state)
    # Where there is nothing to follow there is no step, and NaN shows.
    still = shard_of(variant, "fp32", "fp32", torch.ones(BLOCK))
    nothing = torch.zeros(BLOCK)
    nothing[1] = math.nan
    update(
        still,
        nothing,
        columns_of([0]),
        "torch",
        **scalars_of(variant, weight_decay=0.0),
    )
    assert still.param[1].isnan() and (still.param[2:] == 1.0).all()


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999, 0.9999, 0.99999])
def test_the_first_step_is_unbiased(beta2: float) -> None:
    # Row 28: betas rounded on one side only, in the moments or in their corrections.
    grad = seeded(4096)
    scalars = scalars_of(ADAMW, beta2=beta2, lr=1.0, weight_decay=0.0)
    state = update(
        shard_of(ADAMW, "fp32", "fp32", torch.zeros(4096)),
        grad,
        columns_of([0] * 64),
        "torch",
        **scalars,
    )
    table = dict(zip(ops.TABLE, scalars["table"][:, 0].double(), strict=True))
    m, v, _ = moments_of(state)
    assert m is not None and v is not None
    g = grad.double()
    assert ((m.double() * table["step_size"] - g).abs() <= 2 * ulp(g)).all()
    assert (
        (v.double().sqrt() * table["inv_sqrt_c2"] - g.abs()).abs() <= 2 * ulp(g)
    ).all()
    assert (
        (v.double() * table["inv_sqrt_c2"] ** 2 - g * g).abs() <= 3 * ulp(g * g)
    ).all()


# ------------------------------------------------ what the formats keep over many steps


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_small_numbers_survive_sixteen_bits(
    weights: str, moments: str, backend: str
) -> None:
    columns = columns_of([0])
    start = shard_of(ADAMW, weights, moments, seeded(BLOCK), backend=backend)
    scalars = scalars_of(ADAMW, weight_decay=0.0)
    state = update(
        placed(start, device_of(backend)),
        torch.zeros(BLOCK),
        columns,
        backend,
        **scalars,
    )
    # Row 29: eps must not become 0 in fp16.
    assert_same_bits(weights_of(state), weights_of(start))
    for tiny in (6e-8, -6e-8):
        update(state, torch.full((BLOCK,), tiny).half(), columns, backend, **scalars)
    assert weights_of(state).isfinite().all()
    # Row 20: v must not pass through the parameter's 16 bits, where it would be 0.
    state = update(
        placed(start, device_of(backend)),
        torch.full((BLOCK,), 1e-4),
        columns,
        backend,
        **scalars,
    )
    v = moments_of(state)[1]
    # Of the format; of a root, twice.
    step = {"fp32": 1e-6, "bf16": 2**-7, "8bit": 2**-4}[moments]
    torch.testing.assert_close(v, torch.full((BLOCK,), 1e-11), rtol=step, atol=0.0)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_split_master_keeps_half_a_step_of_its_parameter(backend: str) -> None:
    # Row 36: the residual of 1.00390625, half a bf16 step above 1, must not be folded
    # to 0.
    for weights, residual in (("split32", 2**-8 - 2**-23), ("bf16+fp32", 2**-8)):
        state = shard_of(
            ADAMW, weights, "fp32", torch.full((BLOCK,), 1.00390625), backend=backend
        )
        update(
            state,
            torch.zeros(BLOCK),
            columns_of([0]),
            backend,
            **scalars_of(ADAMW, weight_decay=0.0),
        )
        assert (state.param == 1.0).all() and (
            weights_of(state) - 1.0 == residual
        ).all()


def mean_after(
    shard: Shard, grad: Tensor, variant: Variant, steps: int, **hyper: float
) -> Tensor:
    """Return the mean weight after many steps of one gradient."""
    columns = columns_of([0] * (grad.numel() // BLOCK))
    for scalars in schedule(variant, steps, **hyper):
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
    return weights_of(shard).double().mean()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_updates_below_half_a_step_add_up(weights: str) -> None:
    # Row 23: bf16 parameters silently had no master, and 1 - 1e-4 is 1 in bf16.
    shard = shard_of(ADAMW, weights, "fp32", torch.ones(4096))
    mean = mean_after(shard, torch.ones(4096), ADAMW, 100, lr=1e-4, weight_decay=0.0)
    exact = weights not in ("split24", "bf16")  # those round at random: on the average
    assert mean.item() == pytest.approx(0.99, rel=1e-3)
    if exact:  # but for a hundred roundings by half an fp32 step, 2^-25 below 1
        torch.testing.assert_close(
            weights_of(shard), torch.full((4096,), 0.99), rtol=100 * 2**-25, atol=0.0
        )


@pytest.mark.parametrize("weights", ["split32", "split24", "bf16"])
def test_weight_decay_survives_bf16(weights: str) -> None:
    # Rows 26 and S10: lr * weight_decay below half a bf16 step vanished.
    shard = shard_of(ADAMW, weights, "fp32", torch.ones(4096))
    mean = mean_after(shard, torch.zeros(4096), ADAMW, 1000, lr=1e-3, weight_decay=0.1)
    assert mean.item() == pytest.approx(math.exp(-0.1), rel=0.01)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_second_moments_decay(moments: str) -> None:
    # Row 27: rounded to nearest, a bf16 second moment never decays for beta2 = 0.999.
    zero = torch.zeros(4096)
    shard = shard_of(ADAMW, "fp32", moments, zero, zero, torch.full((4096,), 1e-4))
    start = moments_of(shard)[1]
    mean_after(shard, zero, ADAMW, 2000, beta2=0.999)
    v = moments_of(shard)[1]
    assert v is not None and start is not None
    assert (v.double().mean() / start.double().mean()).item() == pytest.approx(
        0.999**2000, rel=0.03
    )


def test_eight_bit_moments_follow_gradients_of_any_size() -> None:
    # Row S9: with fp16 scales, second moments of gradients below 1e-5 were lost, and
    # those above 65504 infinite.
    sigmas, steps, beta2 = (1e-2, 1e-5, 1e-6, 1e-8), 500, 0.999
    scale = torch.tensor(sigmas).repeat_interleave(1024)
    shard = shard_of(ADAMW, "split32", "8bit", torch.zeros(4096))
    exact, columns = torch.zeros(4096, dtype=torch.float64), columns_of([0] * 64)
    for step, scalars in enumerate(
        schedule(ADAMW, steps, beta2=beta2, eps=1e-16, weight_decay=0.0)
    ):
        grad = seeded(4096, step) * scale
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
        exact = beta2 * exact + (1 - beta2) * grad.double() ** 2
    v = moments_of(shard)[1]
    assert v is not None
    ratios = (v.double() / exact).sqrt().view(len(sigmas), -1).median(dim=1).values
    assert ((ratios > 0.95) & (ratios < 1.05)).all(), ratios
    for scalars in schedule(ADAMW, 3, beta2=beta2, eps=1e-16):
        ops.update_(
            shard,
            torch.full((4096,), 1e6),
            columns=columns,
            backend="native",
            **scalars,
        )
    assert all(
        t.isfinite().all()
        for t in (weights_of(shard), *moments_of(shard)[:2])
        if t is not None
    )
    assert moments_of(shard)[1].sqrt().median() == pytest.approx(
        1e6 * math.sqrt(3e-3), rel=0.05
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("variant", ["adamw", "amsgrad", "lion", "momentum"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_unused_elements_of_a_block_do_not_move(variant: str, weights: str) -> None:
    # Row 30: where a dequantised moment was not exactly zero, weights that were never
    # used took huge steps.
    chosen = VARIANTS[variant]
    shard = shard_of(chosen, weights, "8bit", seeded(BLOCK))
    unused = torch.arange(BLOCK) % 3 == 0
    before = placed(shard, "cpu")
    for step, scalars in enumerate(schedule(chosen, 500, weight_decay=0.0)):
        grad = seeded(BLOCK, step).masked_fill(unused, 0.0)
        ops.update_(shard, grad, columns=columns_of([0]), backend="native", **scalars)
    assert_same_bits(shard.param[unused], before.param[unused])
    assert_same_bits(weights_of(shard)[unused], weights_of(before)[unused])
    assert (
        weights_of(shard)[~unused] != weights_of(before)[~unused]
    ).float().mean() > 0.5


def test_moments_are_those_of_fp32_gradients() -> None:
    # Row 21: moments that were rounded to the parameter's dtype at each step.
    shard, columns = (
        shard_of(ADAMW, "split32", "fp32", seeded(4096)),
        columns_of([0] * 64),
    )
    m, v = (torch.zeros(4096, dtype=torch.float64) for _ in range(2))
    for step, scalars in enumerate(schedule(ADAMW, 50)):
        grad = seeded(4096, step)
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
        m, v = 0.9 * m + 0.1 * grad.double(), 0.999 * v + 0.001 * grad.double() ** 2
    first, second, _ = moments_of(shard)
    assert first is not None and second is not None
    assert (
        (first.double() - m).abs() <= 1e-6 * m.abs().clamp_min(0.3)
    ).all()  # the terms of a mean cancel
    assert ((second.double() - v).abs() <= 1e-6 * v).all()


@pytest.mark.parametrize("moments", MOMENTS)
def test_the_largest_second_moment_never_falls(moments: str) -> None:
    # Row 42: the running maximum was not written back.
    chosen = VARIANTS["amsgrad"]
    shard, columns = (
        shard_of(chosen, "fp32", moments, seeded(4096)),
        columns_of([0] * 64),
    )
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
    assert second is not None and (second < previous / 2).float().mean() > 0.9
    # V's own roundings before it reached its maximum.
    allowed = {"fp32": 1e-6, "bf16": 0.05, "8bit": 0.3}[moments]
    assert ((previous.double() / exact - 1).abs() <= allowed).all()


def gradients(steps: int) -> Iterator[Tensor]:
    """Yield noisy gradients with a mean of their own for each element, over four orders
    of magnitude."""
    size, mean = torch.logspace(-4, 0, 1024), 0.3 * seeded(1024, 10_000)
    for step in range(steps):
        yield (mean + seeded(1024, step)) * size


def trajectory_start() -> Tensor:
    """Return weights that every format has."""
    return seeded(1024).bfloat16().float()


@functools.cache
def torch_trajectory(dtype: torch.dtype) -> Tensor:
    parameter = torch.nn.Parameter(trajectory_start().to(dtype))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, foreach=False)
    for grad in gradients(1000):
        parameter.grad = grad.to(dtype)
        optimizer.step()
    return parameter.data.double()


@pytest.mark.parametrize(("weights", "moments"), tolerances.TRAJECTORY)
def test_a_thousand_steps_beside_torch(weights: str, moments: str) -> None:
    # Row 33: the same hyper-parameters gave other results than torch.
    shard, columns = (
        shard_of(ADAMW, weights, moments, trajectory_start()),
        columns_of([0] * 16),
    )
    for grad, scalars in zip(gradients(1000), schedule(ADAMW, 1000), strict=True):
        ops.update_(shard, grad, columns=columns, backend="native", **scalars)
    exact = torch_trajectory(torch.float64)
    way = exact - trajectory_start().double()
    error = weights_of(shard).double() - exact
    assert error.norm() / way.norm() < tolerances.TRAJECTORY[weights, moments]
    # As close as torch's own fp32.
    if moments == "fp32" and weights not in (
        "split24",
        "bf16",
    ):
        assert error.norm() < 1.01 * (torch_trajectory(torch.float32) - exact).norm()
    # No drift.
    assert (
        abs((error * way.sign()).mean() / way.abs().mean())
        < tolerances.TRAJECTORY[weights, moments] / 8
    )


def test_split_masters_are_fp32_masters_but_for_ties() -> None:
    """Row 33: bf16 with 16 more bits is training with fp32 masters, bit for bit, until
    an upper tie.

    Such a number, one in 131,072, is stored one fp32 step nearer to zero (see
    test_formats.py), and from then on the two may differ.
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
        bits, split_bits = (
            codecs.bits_of(weights_of(whole)),
            codecs.bits_of(weights_of(split)),
        )
        ties = (bits & 0x1FFFF == 0x8000) & ~tied
        assert torch.equal(split_bits[ties], bits[ties] - 1)
        first_ties += int(ties.sum())
        tied |= ties
        assert torch.equal(split_bits[~tied], bits[~tied])
        assert torch.equal(
            split.param[~tied].view(torch.int16), whole.param[~tied].view(torch.int16)
        )
    assert 0 < first_ties < 40  # of 1,024,000 numbers: about 8


# ---------------------------------------------------------- scaling, clipping, extremes


def scaled(limit: float, norm: float, loss_scale: float = 1.0) -> dict[str, Any]:
    """Return the scalars of a first step with this total norm of the unscaled
    gradients."""
    inputs = scalar_inputs(1, weight_decay=0.1)
    inputs["gathered"] = words([norm * loss_scale], [0], 1)
    inputs["limits"] = torch.tensor([limit, loss_scale], dtype=torch.float64)
    ops.scalars_(**inputs, backend="torch")
    return {"rule": "adam", "table": inputs["table"], "keys": inputs["keys"]}


@pytest.mark.parametrize("moments", MOMENTS)
def test_unscaling_is_exact(moments: str) -> None:
    # Row 51: scaled once, unscaled once. Row 61: without a scaler the scale is exactly
    # 1.
    grad = seeded(4 * BLOCK, 3)
    plain, unscaled = scaled(math.inf, 1.0), scaled(math.inf, 1.0, 65536.0)
    assert plain["table"][0].item() == 1.0 and unscaled["table"][0].item() == 2.0**-16
    results = [
        update(
            shard_of(ADAMW, "split32", moments, seeded(4 * BLOCK)),
            g,
            columns_of([0] * 4),
            **scalars,
        )
        for g, scalars in ((grad, plain), (grad * 65536, unscaled))
    ]
    assert_same_bits(*results)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_huge_norm_is_clipped_in_fp32(moments: str, backend: str) -> None:
    # Row 62: clipped to norm 1, gradients of norm 1e11 fell below what 16 bits, or eps,
    # can tell from 0.
    grad = torch.ones(BLOCK)
    grad[0] = 1e11
    state = shard_of(ADAMW, "split32", moments, torch.ones(BLOCK), backend=backend)
    update(state, grad.bfloat16(), columns_of([0]), backend, **scaled(1.0, 1e11))
    m, v, _ = moments_of(state)
    assert m is not None and v is not None
    for index, clipped in ((0, 1.0), (1, 1e-11)):
        assert m[index] == pytest.approx(0.1 * clipped, rel=0.02)
        assert v[index] == pytest.approx(1e-3 * clipped**2, rel=0.02)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_finite_gradients_make_finite_steps(weights: str, moments: str) -> None:
    # Row 58: gradients of 1e20, whose squares overflow fp32.
    grad = torch.full((BLOCK,), 1e20)
    clipped = shard_of(ADAMW, weights, moments, torch.ones(BLOCK))
    update(clipped, grad, columns_of([0]), **scaled(1.0, 8e20))
    assert all(
        t.isfinite().all()
        for t in (weights_of(clipped), *moments_of(clipped)[:2])
        if t is not None
    )
    assert (
        weights_of(clipped) < 1.0
    ).float().mean() > 0.05  # bf16 alone moves at random
    free = shard_of(ADAMW, weights, moments, torch.ones(BLOCK))
    assert (
        weights_of(update(free, grad, columns_of([0]), **scaled(math.inf, 8e20)))
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("weights", MASTERS)
def test_gradients_of_zero_still_decay(weights: str) -> None:
    # Row 65: a total norm of exactly 0 stopped the step.
    scalars = scaled(1.0, 0.0)
    assert scalars["table"].isfinite().all() and scalars["table"][0].item() == 1.0
    state = update(
        shard_of(ADAMW, weights, "fp32", torch.ones(BLOCK)),
        torch.zeros(BLOCK),
        columns_of([0]),
        **scalars,
    )
    torch.testing.assert_close(
        weights_of(state), torch.full((BLOCK,), 1 - 1e-4), rtol=2**-15, atol=0.0
    )


@pytest.mark.parametrize("backend", [pytest.param("native", marks=NEEDS_COMPILER)])
def test_a_large_uneven_parameter_on_four_ranks(backend: str) -> None:
    # Row 35: 1601 x 1280 over 4 ranks got another state format, or failed. Its slot is
    # a whole number of blocks.
    blocks = -(-1601 * 1280 // BLOCK)
    start = shard_of(ADAMW, "split24", "8bit", seeded(blocks * BLOCK))
    grad, scalars = seeded(blocks * BLOCK, 1).bfloat16(), scalars_of(ADAMW)
    whole = update(
        placed(start, "cpu"), grad, columns_of([0] * blocks), backend, **scalars
    )
    for first, end, columns in shards(
        [blocks], [blocks // 4, blocks // 2, blocks // 4 * 3]
    ):
        piece = update(
            window_of(start, first, end),
            grad[first * BLOCK : end * BLOCK],
            columns,
            backend,
            **scalars,
        )
        assert_same_bits(piece, window_of(whole, first, end))
