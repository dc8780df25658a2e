"""The fused shard update: every rule, every storage format, one pass.

Letters: S elements of a shard (a multiple of 64), R parameters (columns of the scalar table).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import BLOCK, Moment, RowMap, Rule, Shard
from .codecs import E3M4, UE3M5
from .formats import bf16_stochastic, decode8, encode8, join, narrow, random_words, split24, split32, widen
from .launch import cdiv, launch

ROWS = 16
"""Blocks of 64 elements per program: with 128 threads, one 128-bit access of a 16-bit format per thread and tensor."""


@triton.jit
def entry(scalars_ptr, num_rows, INDEX: tl.constexpr):
    """Return one scalar of each block's parameter. INDEX counts in the order of arguments.TABLE."""
    return tl.load(scalars_ptr + INDEX * num_rows.to(tl.int64))


@triton.jit
def load_weight(param_ptr, master_ptr, offsets, inside):
    """Return the weight at full precision. The master is that of arguments.Shard; where there is none, the param."""
    if master_ptr.dtype.element_ty == tl.float32:
        return tl.load(master_ptr + offsets, mask=inside)
    elif master_ptr.dtype.element_ty == tl.bfloat16:
        return widen(tl.load(param_ptr + offsets, mask=inside))
    else:
        return join(tl.load(param_ptr + offsets, mask=inside), tl.load(master_ptr + offsets, mask=inside))


@triton.jit
def store_weight(param_ptr, master_ptr, offsets, w, random, active):
    """Write the weight to master and parameter, in their formats."""
    if master_ptr.dtype.element_ty == tl.int16:
        high, low = split32(w)
        tl.store(param_ptr + offsets, high, mask=active)
        tl.store(master_ptr + offsets, low, mask=active)
    elif master_ptr.dtype.element_ty == tl.int8:
        high, low = split24(w, random)
        tl.store(param_ptr + offsets, high, mask=active)
        tl.store(master_ptr + offsets, low, mask=active)
    elif master_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(param_ptr + offsets, bf16_stochastic(w, random), mask=active)
    else:
        tl.store(master_ptr + offsets, w, mask=active)
        if param_ptr.dtype.element_ty != tl.float32:
            tl.store(param_ptr + offsets, narrow(w, param_ptr.dtype.element_ty), mask=active)


@triton.jit
def load_moment(ptr, scale_ptr, block, offsets, inside, MANTISSA: tl.constexpr, SIGNED: tl.constexpr):
    """Return a moment as fp32, or for 8-bit blocks that are not SIGNED its root."""
    x = tl.load(ptr + offsets, mask=inside)
    if ptr.dtype.element_ty == tl.uint8:
        return decode8(x, tl.load(scale_ptr + block, mask=inside, other=127), MANTISSA, SIGNED)
    else:
        return widen(x)


@triton.jit
def store_moment(
    ptr, scale_ptr, block, offsets, x, random, active, MANTISSA: tl.constexpr, SIGNED: tl.constexpr, FLOOR: tl.constexpr
):
    """Write a moment (for 8-bit blocks that are not SIGNED, its root) in its format."""
    if ptr.dtype.element_ty == tl.uint8:
        codes, scale = encode8(x, random, MANTISSA, SIGNED, FLOOR)
        tl.store(ptr + offsets, codes, mask=active)
        tl.store(scale_ptr + block, scale, mask=active)
    elif ptr.dtype.element_ty == tl.bfloat16:
        tl.store(ptr + offsets, bf16_stochastic(x, random), mask=active)
    else:
        tl.store(ptr + offsets, x, mask=active)


@triton.jit
def second_moment(
    ptr, scale_ptr, block, offsets, inside, active, g, beta2, one_minus_beta2, random,
    MANTISSA: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Update the second moment in memory; return it and its root."""
    v = load_moment(ptr, scale_ptr, block, offsets, inside, MANTISSA, False)
    if ptr.dtype.element_ty == tl.uint8:
        v = v * v
    v = beta2 * v + one_minus_beta2 * (g * g)
    root = tl.sqrt_rn(v)
    if ptr.dtype.element_ty == tl.uint8:
        store_moment(ptr, scale_ptr, block, offsets, root, random, active, MANTISSA, False, FLOOR)
    else:
        store_moment(ptr, scale_ptr, block, offsets, v, random, active, MANTISSA, False, FLOOR)
    return v, root


@triton.jit
def largest_moment(ptr, offsets, inside, active, v, random):
    """Update the largest second moment (amsgrad) in memory; return its root."""
    largest = widen(tl.load(ptr + offsets, mask=inside))
    largest = tl.where(v > largest, v, largest)
    store_moment(ptr, ptr, offsets, offsets, largest, random, active, 0, False, 0)
    return tl.sqrt_rn(largest)


@triton.jit
def sign(x):
    """Return -1, 0 or 1; zero and NaN stay what they are."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def update_kernel(
    param_ptr, master_ptr, exp_avg_ptr, exp_avg_scale_ptr, exp_avg_sq_ptr, exp_avg_sq_scale_ptr, max_exp_avg_sq_ptr,
    grad_ptr, table_ptr, keys_ptr, block_row_ptr, origin_ptr, num_blocks, num_rows,
    RULE: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AMSGRAD: tl.constexpr, L2: tl.constexpr,
    M_MANTISSA: tl.constexpr, M_FLOOR: tl.constexpr, V_MANTISSA: tl.constexpr, V_FLOOR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update ROWS blocks of a shard; the blocks may belong to different parameters.

    Maths:      g = grad * coef  [+ l2 * w]
                adam:  m = beta1 * m + one_minus_beta1 * g;  v = beta2 * v + one_minus_beta2 * (g * g)
                       w = w * decay - (m * step_size) / (sqrt(v) * inv_sqrt_c2 + eps);  amsgrad: the largest v so far
                lion:  w = w * decay - sign(beta1 * m + one_minus_beta1 * g) * step_size
                       m = beta2 * m + one_minus_beta2 * g
                sgd:   m = beta1 * m + one_minus_beta1 * g;  w = w * decay - (nesterov ? g + beta1 * m : m) * step_size
                param, master, moments = rounded to their formats, stochastically where the format is too coarse
    Grid:       (cdiv(S, ROWS * BLOCK),); program i owns blocks [i * ROWS, (i + 1) * ROWS), seen as [ROWS, BLOCK].
    Reads:      grad, weights, moments [S]      bytes per element: grad + weights + moments
                Weights are param and master; a 16-bit param beside an fp32 master is only written. Moments in 8-bit
                blocks have a scale per block, 1/64 byte per element each.
                Per block also its row, int32, and the scalars of that row, which stay in the cache.
    Writes:     param, master, moments [S]      bytes per element: param + master + moments
                An fp32 param without a master is its own.
    Computes:   fp32, every operation rounded on its own to nearest even; roots and quotients correctly rounded.
    Masks:      blocks from S / BLOCK on are neither read nor written; inactive blocks are not written.
    Twin:       reference.update_
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = block < num_blocks
    offsets = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.load(block_row_ptr + block, mask=inside, other=0)
    scalars_ptr = table_ptr + row
    # A masked store keeps NaN and infinite gradients out of inactive parameters; a product with 0 would not.
    active = inside & (entry(scalars_ptr, num_rows, 11) != 0)
    in_param = block + tl.load(origin_ptr + row)
    for_moments, for_weights = random_words(tl.load(keys_ptr + row), in_param, BLOCK)

    w = load_weight(param_ptr, master_ptr, offsets, inside)
    g = widen(tl.load(grad_ptr + offsets, mask=inside)) * entry(scalars_ptr, num_rows, 0)
    if L2:
        l2 = entry(scalars_ptr, num_rows, 9)
        g = tl.where(l2 != 0, g + l2 * w, g)
    beta1, one_minus_beta1 = entry(scalars_ptr, num_rows, 1), entry(scalars_ptr, num_rows, 2)
    beta2, one_minus_beta2 = entry(scalars_ptr, num_rows, 3), entry(scalars_ptr, num_rows, 4)
    direction = g
    if HAS_MOMENTUM:
        m = load_moment(exp_avg_ptr, exp_avg_scale_ptr, block, offsets, inside, M_MANTISSA, True)
        interpolated = beta1 * m + one_minus_beta1 * g
        if RULE == "lion":
            m = beta2 * m + one_minus_beta2 * g
            direction = sign(interpolated)
        else:
            m = interpolated
            direction = m
        if RULE == "sgd":
            direction = tl.where(entry(scalars_ptr, num_rows, 10) != 0, g + beta1 * m, m)
        random = for_moments & 0xFFFF
        store_moment(exp_avg_ptr, exp_avg_scale_ptr, block, offsets, m, random, active, M_MANTISSA, True, M_FLOOR)
    step = direction * entry(scalars_ptr, num_rows, 5)
    if RULE == "adam":
        v, root = second_moment(
            exp_avg_sq_ptr, exp_avg_sq_scale_ptr, block, offsets, inside, active, g, beta2, one_minus_beta2,
            for_moments >> 16, V_MANTISSA, V_FLOOR,
        )  # fmt: skip
        if AMSGRAD:
            root = largest_moment(max_exp_avg_sq_ptr, offsets, inside, active, v, for_weights & 0xFFFF)
        step = tl.div_rn(step, root * entry(scalars_ptr, num_rows, 6) + entry(scalars_ptr, num_rows, 7))
    w = w * entry(scalars_ptr, num_rows, 8) - step
    store_weight(param_ptr, master_ptr, offsets, w, for_weights >> 16, active)


def update_(
    shard: Shard,
    grad: Tensor,
    *,
    rule: Rule,
    table: Tensor,
    keys: Tensor,
    rows: RowMap,
    l2: bool = False,
) -> None:
    """`reference.update_` in one launch on the current stream, whatever the number of parameters.

    All tensors are contiguous. Those on 16 bytes are read and written in wide accesses; others are right but slower.
    """
    num_blocks = rows.block_row.numel()
    absent = Moment(shard.param)
    moments = [absent if moment is None else moment for moment in shard[2:]]
    pointers = [t for m in moments for t in (m.values, shard.param if m.scale is None else m.scale)]
    launch(
        update_kernel,
        cdiv(num_blocks, ROWS),
        shard.param.device,
        shard.param,
        shard.param if shard.master is None else shard.master,
        *pointers[:5],
        grad,
        table,
        keys,
        rows.block_row,
        rows.origin,
        num_blocks,
        table.shape[1],
        RULE=rule,
        HAS_MOMENTUM=shard.exp_avg is not None,
        AMSGRAD=shard.max_exp_avg_sq is not None,
        L2=l2,
        M_MANTISSA=E3M4.mantissa,
        M_FLOOR=E3M4.floor,
        V_MANTISSA=UE3M5.mantissa,
        V_FLOOR=UE3M5.floor,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=4,
    )
