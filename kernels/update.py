"""The fused shard update: every rule, every storage format, one pass.

Letters: S elements of a shard (a multiple of 64), R parameters (columns of the scalar
         table).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import BLOCK, ColumnMap, Moment, Rule, Shard
from .codecs import E3M4, UE3M5
from .entries import (
    ACTIVE,
    BETA1,
    BETA2,
    COEF,
    DECAY,
    EPS,
    INV_SQRT_C2,
    L2,
    NESTEROV,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    STEP_SIZE,
)
from .formats import (
    bf16_stochastic,
    decode8,
    encode8,
    join,
    narrow,
    random_words,
    split24,
    split32,
    widen,
)
from .launch import cdiv, launch

BLOCKS = 16
"""Blocks of 64 elements per program: with 128 threads, one 128-bit access of a 16-bit
format per thread and tensor."""


@triton.jit
def entry(scalars, INDEX: tl.constexpr):
    """Return one scalar of each block's parameter. scalars: the addresses of the
    blocks' columns, and the number of columns. INDEX is one of `entries`."""
    column_ptr, num_columns = scalars
    return tl.load(column_ptr + INDEX * num_columns.to(tl.int64))


@triton.jit
def unless_written(master, param):
    """Return the fp32 master where it rounds to the 16-bit param, which else somebody
    has written to, and which is returned then, widened."""
    # Widened, since the interpreter would compare the patterns of bf16 numbers.
    written = widen(param)
    return tl.where(widen(narrow(master, param.dtype)) == written, master, written)


@triton.jit
def load_weight(param_ptr, master_ptr, offsets, inside):
    """Return the weight at full precision. The master is that of arguments.Shard; where
    there is none, the param."""
    if param_ptr.dtype.element_ty == tl.float32:
        return tl.load(master_ptr + offsets, mask=inside)
    elif master_ptr.dtype.element_ty == tl.float32:
        return unless_written(
            tl.load(master_ptr + offsets, mask=inside),
            tl.load(param_ptr + offsets, mask=inside),
        )
    elif master_ptr.dtype.element_ty == tl.bfloat16:
        return widen(tl.load(param_ptr + offsets, mask=inside))
    else:
        return join(
            tl.load(param_ptr + offsets, mask=inside),
            tl.load(master_ptr + offsets, mask=inside),
        )


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
            rounded = narrow(w, param_ptr.dtype.element_ty)
            tl.store(param_ptr + offsets, rounded, mask=active)


@triton.jit
def load_gradient(grad_ptr, place, w, scalars, HAS_L2: tl.constexpr):
    """Return the unscaled and clipped gradient, with the decay that is added to it.

    A place is (block, offsets, inside, active): the indices of a program's blocks and
    elements, which of them are in the shard, and which are to be written.
    """
    _, offsets, inside, _ = place
    g = widen(tl.load(grad_ptr + offsets, mask=inside)) * entry(scalars, COEF)
    if HAS_L2:
        l2 = entry(scalars, L2)
        g = tl.where(l2 != 0, g + l2 * w, g)
    return g


@triton.jit
def load_moment(ptr, scale_ptr, place, MANTISSA: tl.constexpr, SIGNED: tl.constexpr):
    """Return a moment as fp32, or for 8-bit blocks that are not SIGNED its root."""
    block, offsets, inside, _ = place
    x = tl.load(ptr + offsets, mask=inside)
    if ptr.dtype.element_ty == tl.uint8:
        scale = tl.load(scale_ptr + block, mask=inside, other=127)
        return decode8(x, scale, MANTISSA, SIGNED)
    else:
        return widen(x)


@triton.jit
def store_moment(
    ptr,
    scale_ptr,
    place,
    x,
    random,
    MANTISSA: tl.constexpr,
    SIGNED: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """Write a moment (for 8-bit blocks that are not SIGNED, its root) in its format."""
    block, offsets, _, active = place
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
    moment, place, g, scalars, random, MANTISSA: tl.constexpr, FLOOR: tl.constexpr
):
    """Update the second moment, (address, address of scales), in memory; return it and
    its root."""
    ptr, scale_ptr = moment
    beta2 = entry(scalars, BETA2)
    one_minus_beta2 = entry(scalars, ONE_MINUS_BETA2)
    v = load_moment(ptr, scale_ptr, place, MANTISSA, False)
    if ptr.dtype.element_ty == tl.uint8:
        v = v * v
    v = beta2 * v + one_minus_beta2 * (g * g)
    root = tl.sqrt_rn(v)
    if ptr.dtype.element_ty == tl.uint8:
        store_moment(ptr, scale_ptr, place, root, random, MANTISSA, False, FLOOR)
    else:
        store_moment(ptr, scale_ptr, place, v, random, MANTISSA, False, FLOOR)
    return v, root


@triton.jit
def largest_moment(ptr, place, v, random):
    """Update the largest second moment (amsgrad) in memory; return its root."""
    _, offsets, inside, _ = place
    largest = widen(tl.load(ptr + offsets, mask=inside))
    largest = tl.where(v > largest, v, largest)
    store_moment(ptr, ptr, place, largest, random, 0, False, 0)
    return tl.sqrt_rn(largest)


@triton.jit
def sign(x):
    """Return -1, 0 or 1; zero and NaN stay what they are."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def first_moment(
    moment,
    place,
    g,
    scalars,
    random,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """Update the first moment, (address, address of scales), in memory; return the
    direction of the step."""
    ptr, scale_ptr = moment
    beta1 = entry(scalars, BETA1)
    before = load_moment(ptr, scale_ptr, place, MANTISSA, True)
    m = before
    interpolated = beta1 * m + entry(scalars, ONE_MINUS_BETA1) * g
    if RULE == "lion":
        beta2 = entry(scalars, BETA2)
        m = beta2 * m + entry(scalars, ONE_MINUS_BETA2) * g
        direction = sign(interpolated)
    else:
        m = interpolated
        direction = m
    if RULE == "sgd":
        nesterov = entry(scalars, NESTEROV)
        ahead = tl.where(nesterov != 0, g + beta1 * m, m)
        direction = tl.where(beta1 != 0, ahead, g)
        m = tl.where(beta1 != 0, m, before)
    store_moment(ptr, scale_ptr, place, m, random, MANTISSA, True, FLOOR)
    return direction


@triton.jit(do_not_specialize=["num_blocks", "num_columns"])
def update_kernel(
    param_ptr,
    master_ptr,
    first_ptr,
    first_scale_ptr,
    second_ptr,
    second_scale_ptr,
    largest_ptr,
    grad_ptr,
    table_ptr,
    keys_ptr,
    block_column_ptr,
    origin_ptr,
    num_blocks,
    num_columns,
    RULE: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    AMSGRAD: tl.constexpr,
    HAS_L2: tl.constexpr,
    M_MANTISSA: tl.constexpr,
    M_FLOOR: tl.constexpr,
    V_MANTISSA: tl.constexpr,
    V_FLOOR: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCKS blocks of a shard; the blocks may belong to different parameters.

    Maths:      g = grad * coef  [+ l2 * w]
                adam:  m = beta1 * m + one_minus_beta1 * g
                       v = beta2 * v + one_minus_beta2 * (g * g)
                       w = w * decay
                           - (m * step_size) / (sqrt(v) * inv_sqrt_c2 + eps)
                       amsgrad: the largest v so far
                lion:  w = w * decay
                           - sign(beta1 * m + one_minus_beta1 * g) * step_size
                       m = beta2 * m + one_minus_beta2 * g
                sgd:   m = beta1 * m + one_minus_beta1 * g, if beta1 is not 0
                       w = w * decay - (nesterov ? g + beta1 * m : m) * step_size
                param, master, moments = rounded to their formats, stochastically where
                the format is too coarse
    Grid:       (cdiv(S, BLOCKS * BLOCK),); program i owns blocks [i * BLOCKS,
                (i + 1) * BLOCKS), seen as [BLOCKS, BLOCK].
    Reads:      grad, weights, moments [S]
                bytes per element: grad + weights + moments
                Weights are param and master; a 16-bit param beside an fp32 master is
                read to find what somebody else has written to it. Moments in 8-bit
                blocks have a scale per block, 1/64 byte per element each.
                Per block also its column, int32, and the scalars of that column, which
                stay in the cache.
    Writes:     param, master, moments [S]
                bytes per element: param + master + moments
                An fp32 param without a master is its own.
    Computes:   fp32, every operation rounded on its own to nearest even; roots and
                quotients correctly rounded.
    Masks:      blocks from S / BLOCK on are neither read nor written; inactive blocks
                are not written.
    Twin:       reference.update_
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = block < num_blocks
    offsets = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    column = tl.load(block_column_ptr + block, mask=inside, other=0)
    scalars = table_ptr + column, num_columns
    # A masked store keeps NaN and infinite gradients out of inactive parameters; a
    # product with 0 would not.
    active = inside & (entry(scalars, ACTIVE) != 0)
    place = block, offsets, inside, active
    in_param = block + tl.load(origin_ptr + column)
    for_moments, for_weights = random_words(tl.load(keys_ptr + column), in_param, BLOCK)

    w = load_weight(param_ptr, master_ptr, offsets, inside)
    g = load_gradient(grad_ptr, place, w, scalars, HAS_L2)
    direction = g
    if HAS_MOMENTUM:
        first = first_ptr, first_scale_ptr
        direction = first_moment(
            first, place, g, scalars, for_moments & 0xFFFF, RULE, M_MANTISSA, M_FLOOR
        )
    step = direction * entry(scalars, STEP_SIZE)
    if RULE == "adam":
        second = second_ptr, second_scale_ptr
        v, root = second_moment(
            second, place, g, scalars, for_moments >> 16, V_MANTISSA, V_FLOOR
        )
        if AMSGRAD:
            random = for_weights & 0xFFFF
            root = largest_moment(largest_ptr, place, v, random)
        inv_sqrt_c2 = entry(scalars, INV_SQRT_C2)
        eps = entry(scalars, EPS)
        step = tl.div_rn(step, root * inv_sqrt_c2 + eps)
    w = w * entry(scalars, DECAY) - step
    store_weight(param_ptr, master_ptr, offsets, w, for_weights >> 16, active)


def update_(
    shard: Shard,
    grad: Tensor,
    *,
    rule: Rule,
    table: Tensor,
    keys: Tensor,
    columns: ColumnMap,
    l2: bool = False,
) -> None:
    """`reference.update_` in one launch on the current stream, whatever the number of
    parameters.

    All tensors are contiguous. Those on 16 bytes are read and written in wide accesses;
    others are right but slower.
    """
    num_blocks = columns.block_column.numel()
    absent = Moment(shard.param)
    moments = [absent if moment is None else moment for moment in shard.moments]
    pointers = [
        t
        for m in moments
        for t in (m.values, shard.param if m.scale is None else m.scale)
    ]
    launch(
        update_kernel,
        cdiv(num_blocks, BLOCKS),
        shard.param.device,
        shard.param,
        shard.param if shard.master is None else shard.master,
        *pointers[:5],
        grad,
        table,
        keys,
        columns.block_column,
        columns.origin,
        num_blocks,
        table.shape[1],
        RULE=rule,
        HAS_MOMENTUM=shard.first is not None,
        AMSGRAD=shard.largest is not None,
        HAS_L2=l2,
        M_MANTISSA=E3M4.mantissa,
        M_FLOOR=E3M4.floor,
        V_MANTISSA=UE3M5.mantissa,
        V_FLOOR=UE3M5.floor,
        BLOCKS=BLOCKS,
        BLOCK=BLOCK,
        num_warps=4,
    )
