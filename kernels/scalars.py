"""The kernel that turns norm, used bits and hyper-parameters into the scalar table.

Letters: R parameters (columns of the table), G param groups, W ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import STEP_BITS, Rule
from .entries import (
    ACTIVE,
    BETA1,
    BETA2,
    COEF,
    DECAY,
    EPS,
    HYPER_BETA1,
    HYPER_BETA2,
    HYPER_DECOUPLED,
    HYPER_EPS,
    HYPER_LR,
    HYPER_NESTEROV,
    HYPER_SIGN,
    HYPER_WEIGHT_DECAY,
    INV_SQRT_C2,
    L2,
    NESTEROV,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    STEP_SIZE,
)
from .formats import mix64
from .launch import cdiv, launch

TILE = 256
"""Parameters per program."""


@triton.jit
def integer_power(base, exponent, BITS: tl.constexpr):
    """Return base ** exponent in fp64 by squaring, from the low bit up: only products,
    so the same bits everywhere."""
    power = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(BITS):
        power = tl.where((exponent & 1) == 1, power * base, power)
        base = base * base
        exponent = exponent >> 1
    return power


@triton.jit
def all_ranks(gathered_ptr, column, inside, num_words, world):
    """Return the sum of all ranks' square sums, in rank order, and the word of each
    column that any rank has set used bits in."""
    word = tl.load(gathered_ptr + 1 + column // 32, mask=inside, other=0)
    square_sum = tl.load(gathered_ptr).to(tl.float64, bitcast=True)
    rank = 1
    while rank < world:
        gathered_ptr += num_words
        square_sum += tl.load(gathered_ptr).to(tl.float64, bitcast=True)
        word |= tl.load(gathered_ptr + 1 + column // 32, mask=inside, other=0)
        rank += 1
    return square_sum, word


@triton.jit
def load_hyper(hyper_ptr, inside, INDEX: tl.constexpr):
    """Return one number of each column's param group. INDEX is one of `entries`."""
    return tl.load(hyper_ptr + INDEX, mask=inside, other=0.0)


@triton.jit
def put(column_ptr, num_columns, inside, value, INDEX: tl.constexpr):
    """Round one entry of each column once, from fp64, into the table. INDEX is one of
    `entries`."""
    address = column_ptr + INDEX * num_columns.to(tl.int64)
    tl.store(address, value.to(tl.float32), mask=inside)


@triton.jit
def fill_columns(
    column_ptr,
    num_columns,
    inside,
    hyper_ptr,
    steps,
    scale,
    active,
    RULE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write every entry of some columns. scale: clip / loss_scale."""
    lr = load_hyper(hyper_ptr, inside, HYPER_LR)
    beta1 = load_hyper(hyper_ptr, inside, HYPER_BETA1)
    beta2 = load_hyper(hyper_ptr, inside, HYPER_BETA2)
    weight_decay = load_hyper(hyper_ptr, inside, HYPER_WEIGHT_DECAY)
    decoupled = load_hyper(hyper_ptr, inside, HYPER_DECOUPLED)
    step_size = lr
    inv_sqrt_c2 = lr * 0.0 + 1.0
    one_minus_beta1 = 1.0 - beta1
    if RULE == "adam":
        step_size = lr / (1.0 - integer_power(beta1, steps, BITS))
        inv_sqrt_c2 = 1.0 / tl.sqrt(1.0 - integer_power(beta2, steps, BITS))
    if RULE == "sgd":
        one_minus_beta1 = tl.where(steps > 1, 1.0 - beta2, 1.0)
    coef = load_hyper(hyper_ptr, inside, HYPER_SIGN) * scale
    decay = 1.0 - decoupled * (lr * weight_decay)
    l2 = (1.0 - decoupled) * weight_decay
    eps = load_hyper(hyper_ptr, inside, HYPER_EPS)
    nesterov = load_hyper(hyper_ptr, inside, HYPER_NESTEROV)

    put(column_ptr, num_columns, inside, coef, COEF)
    put(column_ptr, num_columns, inside, beta1, BETA1)
    put(column_ptr, num_columns, inside, one_minus_beta1, ONE_MINUS_BETA1)
    put(column_ptr, num_columns, inside, beta2, BETA2)
    put(column_ptr, num_columns, inside, 1.0 - beta2, ONE_MINUS_BETA2)
    put(column_ptr, num_columns, inside, step_size, STEP_SIZE)
    put(column_ptr, num_columns, inside, inv_sqrt_c2, INV_SQRT_C2)
    put(column_ptr, num_columns, inside, eps, EPS)
    put(column_ptr, num_columns, inside, decay, DECAY)
    put(column_ptr, num_columns, inside, l2, L2)
    put(column_ptr, num_columns, inside, nesterov, NESTEROV)
    put(column_ptr, num_columns, inside, active, ACTIVE)


@triton.jit(do_not_specialize=["num_columns", "num_words", "world"])
def scalars_kernel(
    table_ptr,
    keys_ptr,
    steps_ptr,
    report_ptr,
    hyper_ptr,
    group_ptr,
    seeds_ptr,
    gathered_ptr,
    limits_ptr,
    num_columns,
    num_words,
    world,
    RULE: tl.constexpr,
    NUM_HYPER: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Form the scalars of TILE parameters; the first program also writes the report.

    Maths:      norm = sqrt(sum of square sums) / loss_scale
                clip = min(limit / (norm + 1e-6), 1)
                active = used by a rank, and the sum is finite
                t = steps + active;  c1 = 1 - beta1 ** t;  c2 = 1 - beta2 ** t
                coef = sign * (clip / loss_scale)
                key = hash(seed + t * 2^64 / golden ratio)
                adam: step_size = lr / c1, inv_sqrt_c2 = 1 / sqrt(c2)
                lion, sgd: step_size = lr
                sgd: one_minus_beta1 = 1 - dampening, but 1 at the first step
    Grid:       (max(cdiv(R, TILE), 1),); program i owns parameters [i * TILE,
                (i + 1) * TILE). Every program sums the same W square sums in the same
                order, so that no program waits for another.
    Reads:      gathered [W, 1 + cdiv(R, 32)] int64, limits [2], hyper [G, 8] fp64,
                group, seeds, steps [R] int64
    Writes:     table [12, R] fp32, keys, steps [R] int64, report [3] fp64
                bytes per parameter: 48 + 16
    Computes:   fp64, every operation rounded on its own; one rounding to fp32, at the
                store.
    Masks:      parameters from R on are neither read nor written.
    Twin:       reference.scalars_
    """
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = column < num_columns

    square_sum, word = all_ranks(gathered_ptr, column, inside, num_words, world)
    loss_scale = tl.load(limits_ptr + 1)
    norm = tl.sqrt(square_sum) / loss_scale
    # A scalar bool would break in the interpreter.
    finite = (tl.abs(square_sum) < float("inf")).to(tl.int64)
    ratio = tl.load(limits_ptr) / (norm + tl.full([], 1e-6, tl.float64))
    # A comparison, since a minimum would lose NaN.
    clip = tl.where(ratio > 1.0, 1.0, ratio)

    active = (word >> (column % 32)) & finite
    steps = tl.load(steps_ptr + column, mask=inside, other=0) + active
    tl.store(steps_ptr + column, steps, mask=inside)
    key = mix64(
        tl.load(seeds_ptr + column, mask=inside, other=0) + steps * -7046029254386353131
    )
    tl.store(keys_ptr + column, key, mask=inside)
    group = tl.load(group_ptr + column, mask=inside, other=0)
    fill_columns(
        table_ptr + column,
        num_columns,
        inside,
        hyper_ptr + group * NUM_HYPER,
        steps,
        clip / loss_scale,
        active,
        RULE,
        BITS,
    )
    if tl.program_id(0) == 0:
        tl.store(report_ptr, norm)
        tl.store(report_ptr + 1, clip)
        tl.store(report_ptr + 2, tl.load(report_ptr + 2) + (1 - finite))


def scalars_(
    table: Tensor,
    keys: Tensor,
    steps: Tensor,
    report: Tensor,
    *,
    rule: Rule,
    hyper: Tensor,
    group_of_column: Tensor,
    seeds: Tensor,
    gathered: Tensor,
    limits: Tensor,
) -> None:
    """`reference.scalars_` in one launch on the current stream. All tensors are
    contiguous."""
    num_columns = steps.numel()
    launch(
        scalars_kernel,
        max(cdiv(num_columns, TILE), 1),
        table.device,
        table,
        keys,
        steps,
        report,
        hyper,
        group_of_column,
        seeds,
        gathered,
        limits,
        num_columns,
        gathered.shape[1],
        gathered.shape[0],
        RULE=rule,
        NUM_HYPER=hyper.shape[1],
        BITS=STEP_BITS,
        TILE=TILE,
        num_warps=4,
    )
