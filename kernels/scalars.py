"""The kernel that turns norm, used bits and hyper-parameters into the scalar table.

Letters: R parameters (columns of the table), G param groups, W ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import STEP_BITS, Rule
from .formats import mix64
from .launch import cdiv, launch

TILE = 256
"""Parameters per program."""


@triton.jit
def integer_power(base, exponent, BITS: tl.constexpr):
    """Return base ** exponent in fp64 by squaring, from the low bit up: only products, so the same bits everywhere."""
    power = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(BITS):
        power = tl.where((exponent & 1) == 1, power * base, power)
        base = base * base
        exponent = exponent >> 1
    return power


@triton.jit
def put(table_ptr, row, inside, num_rows, value, INDEX: tl.constexpr):
    """Round one column of fp64 scalars once, into the table. INDEX counts in the order of arguments.TABLE."""
    tl.store(table_ptr + INDEX * num_rows.to(tl.int64) + row, value.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_words", "world"])
def scalars_kernel(
    table_ptr, keys_ptr, steps_ptr, report_ptr, hyper_ptr, group_ptr, seeds_ptr, gathered_ptr, limits_ptr,
    num_rows, num_words, world,
    RULE: tl.constexpr, HYPER: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Form the scalars of TILE parameters; the first program also writes the report.

    Maths:      norm = sqrt(sum of square sums) / loss_scale     clip = min(limit / (norm + 1e-6), 1)
                active = used by a rank, and the sum is finite   t = steps + active
                c1 = 1 - beta1 ** t                              c2 = 1 - beta2 ** t
                coef = sign * (clip / loss_scale)                key = hash(seed + t * 2^64 / golden ratio)
                adam: step_size = lr / c1, inv_sqrt_c2 = 1 / sqrt(c2);  lion, sgd: step_size = lr
                sgd: one_minus_beta1 = 1 - dampening, but 1 at the first step
    Grid:       (max(cdiv(R, TILE), 1),); program i owns parameters [i * TILE, (i + 1) * TILE). Every program sums the
                same W square sums in the same order, so that no program waits for another.
    Reads:      gathered [W, 1 + cdiv(R, 32)] int64, limits [2], hyper [G, 8] fp64, group, seeds, steps [R] int64
    Writes:     table [12, R] fp32, keys, steps [R] int64, report [3] fp64     bytes per parameter: 48 + 16
    Computes:   fp64, every operation rounded on its own; one rounding to fp32, at the store.
    Masks:      parameters from R on are neither read nor written.
    Twin:       reference.scalars_
    """
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = row < num_rows

    word = tl.load(gathered_ptr + 1 + row // 32, mask=inside, other=0)
    square_sum = tl.load(gathered_ptr).to(tl.float64, bitcast=True)
    rank = 1
    while rank < world:
        gathered_ptr += num_words
        square_sum += tl.load(gathered_ptr).to(tl.float64, bitcast=True)
        word |= tl.load(gathered_ptr + 1 + row // 32, mask=inside, other=0)
        rank += 1
    loss_scale = tl.load(limits_ptr + 1)
    norm = tl.sqrt(square_sum) / loss_scale
    finite = (tl.abs(square_sum) < float("inf")).to(tl.int64)  # a scalar bool would break in the interpreter
    ratio = tl.load(limits_ptr) / (norm + tl.full([], 1e-6, tl.float64))
    clip = tl.where(ratio > 1.0, 1.0, ratio)  # a comparison, since a minimum would lose NaN

    active = (word >> (row % 32)) & finite
    steps = tl.load(steps_ptr + row, mask=inside, other=0) + active
    tl.store(steps_ptr + row, steps, mask=inside)
    seeds = tl.load(seeds_ptr + row, mask=inside, other=0)
    tl.store(keys_ptr + row, mix64(seeds + steps * -7046029254386353131), mask=inside)
    group_ptr = hyper_ptr + tl.load(group_ptr + row, mask=inside, other=0) * HYPER
    lr = tl.load(group_ptr, mask=inside, other=0.0)
    beta1 = tl.load(group_ptr + 1, mask=inside, other=0.0)
    beta2 = tl.load(group_ptr + 2, mask=inside, other=0.0)
    weight_decay = tl.load(group_ptr + 4, mask=inside, other=0.0)
    sign = tl.load(group_ptr + 5, mask=inside, other=0.0)
    decoupled = tl.load(group_ptr + 6, mask=inside, other=0.0)
    nesterov = tl.load(group_ptr + 7, mask=inside, other=0.0)
    step_size = lr
    inv_sqrt_c2 = tl.full([TILE], 1.0, tl.float64)
    one_minus_beta1 = 1.0 - beta1
    if RULE == "adam":
        step_size = lr / (1.0 - integer_power(beta1, steps, BITS))
        inv_sqrt_c2 = 1.0 / tl.sqrt(1.0 - integer_power(beta2, steps, BITS))
    if RULE == "sgd":
        one_minus_beta1 = tl.where(steps > 1, 1.0 - beta2, 1.0)

    put(table_ptr, row, inside, num_rows, sign * (clip / loss_scale), 0)
    put(table_ptr, row, inside, num_rows, beta1, 1)
    put(table_ptr, row, inside, num_rows, one_minus_beta1, 2)
    put(table_ptr, row, inside, num_rows, beta2, 3)
    put(table_ptr, row, inside, num_rows, 1.0 - beta2, 4)
    put(table_ptr, row, inside, num_rows, step_size, 5)
    put(table_ptr, row, inside, num_rows, inv_sqrt_c2, 6)
    put(table_ptr, row, inside, num_rows, tl.load(group_ptr + 3, mask=inside, other=0.0), 7)
    put(table_ptr, row, inside, num_rows, 1.0 - decoupled * (lr * weight_decay), 8)
    put(table_ptr, row, inside, num_rows, (1.0 - decoupled) * weight_decay, 9)
    put(table_ptr, row, inside, num_rows, nesterov, 10)
    put(table_ptr, row, inside, num_rows, active, 11)
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
    group_of_row: Tensor,
    seeds: Tensor,
    gathered: Tensor,
    limits: Tensor,
) -> None:
    """`reference.scalars_` in one launch on the current stream. All tensors are contiguous."""
    num_rows = steps.numel()
    launch(
        scalars_kernel,
        max(cdiv(num_rows, TILE), 1),
        table.device,
        table,
        keys,
        steps,
        report,
        hyper,
        group_of_row,
        seeds,
        gathered,
        limits,
        num_rows,
        gathered.shape[1],
        gathered.shape[0],
        RULE=rule,
        HYPER=hyper.shape[1],
        BITS=STEP_BITS,
        TILE=TILE,
        num_warps=4,
    )
