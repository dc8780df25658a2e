"""The fused shard update.

Letters: S elements of a shard (a multiple of 64), R parameters (columns of the scalar table).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .formats import narrow, widen
from .launch import cdiv, launch
from .reference import BLOCK, RowMap

ROWS = 16
"""Blocks of 64 elements per program: with 128 threads, one 128-bit access of a 16-bit format per thread and tensor."""


@triton.jit
def entry(table_ptr, num_rows, row, INDEX: tl.constexpr):
    """Return one scalar of each block's parameter. INDEX counts in the order of reference.TABLE."""
    return tl.load(table_ptr + INDEX * num_rows.to(tl.int64) + row)


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def adamw_kernel(
    param_ptr,
    weight_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    grad_ptr,
    table_ptr,
    block_row_ptr,
    num_blocks,
    num_rows,
    HAS_MASTER: tl.constexpr,
    L2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update ROWS blocks of a shard; the blocks may belong to different parameters.

    Maths:      g = grad * coef  [+ l2 * w]
                m = beta1 * m + one_minus_beta1 * g
                v = beta2 * v + one_minus_beta2 * (g * g)
                w = w * decay - (m * step_size) / (sqrt(v) * inv_sqrt_c2 + eps)
                param = cast(w)
    Grid:       (cdiv(S, ROWS * BLOCK),); program i owns blocks [i * ROWS, (i + 1) * ROWS), seen as [ROWS, BLOCK].
    Reads:      grad [S], weight, exp_avg, exp_avg_sq [S] fp32           bytes per element: grad + 4 + 4 + 4
                Per block also its row, int32, and the scalars of that row, which stay in the cache.
    Writes:     weight, exp_avg, exp_avg_sq [S] fp32, param [S]          bytes per element: 4 + 4 + 4 + param
                param is written beside a master. Without one the weight is the parameter, and the term is 0.
    Computes:   fp32, every operation rounded on its own to nearest even; roots and quotients correctly rounded.
    Masks:      blocks from S / BLOCK on are neither read nor written. Inactive blocks are written with their old bits.
    Twin:       reference.adamw_
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = block < num_blocks
    offsets = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.load(block_row_ptr + block, mask=inside, other=0)

    g = widen(tl.load(grad_ptr + offsets, mask=inside)) * entry(table_ptr, num_rows, row, 0)
    w_old = tl.load(weight_ptr + offsets, mask=inside)
    m_old = tl.load(exp_avg_ptr + offsets, mask=inside)
    v_old = tl.load(exp_avg_sq_ptr + offsets, mask=inside)
    if L2:
        l2 = entry(table_ptr, num_rows, row, 9)
        g = tl.where(l2 != 0, g + l2 * w_old, g)
    m = entry(table_ptr, num_rows, row, 1) * m_old + entry(table_ptr, num_rows, row, 2) * g
    v = entry(table_ptr, num_rows, row, 3) * v_old + entry(table_ptr, num_rows, row, 4) * (g * g)
    step = m * entry(table_ptr, num_rows, row, 5)
    denominator = tl.sqrt_rn(v) * entry(table_ptr, num_rows, row, 6) + entry(table_ptr, num_rows, row, 7)
    w = w_old * entry(table_ptr, num_rows, row, 8) - tl.div_rn(step, denominator)

    # A select keeps NaN and infinite gradients out of inactive parameters; a product with 0 would not.
    active = entry(table_ptr, num_rows, row, 10) != 0
    w = tl.where(active, w, w_old)
    tl.store(weight_ptr + offsets, w, mask=inside)
    tl.store(exp_avg_ptr + offsets, tl.where(active, m, m_old), mask=inside)
    tl.store(exp_avg_sq_ptr + offsets, tl.where(active, v, v_old), mask=inside)
    if HAS_MASTER:
        tl.store(param_ptr + offsets, narrow(w, param_ptr.dtype.element_ty), mask=inside)


def adamw_(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    table: Tensor,
    rows: RowMap,
    l2: bool = False,
) -> None:
    """`reference.adamw_` in one launch on the current stream, whatever the number of parameters.

    All tensors are contiguous. Those on 16 bytes are read and written in 128-bit accesses; others are right but slower.
    """
    num_blocks = rows.block_row.numel()
    launch(
        adamw_kernel,
        cdiv(num_blocks, ROWS),
        param.device,
        param,
        param if master is None else master,
        exp_avg,
        exp_avg_sq,
        grad,
        table,
        rows.block_row,
        num_blocks,
        table.shape[1],
        HAS_MASTER=master is not None,
        L2=l2,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=4,
    )
