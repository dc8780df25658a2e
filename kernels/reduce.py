"""W chunks -> one gradient shard, with its sums of squares on the way. Letters: S
elements, W ranks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .arguments import BLOCK, PARTIAL
from .formats import narrow, widen
from .launch import cdiv, launch


@triton.jit(do_not_specialize=["numel", "received_stride", "rank", "num_received"])
def reduce_kernel(
    shard_ptr,
    own_ptr,
    received_ptr,
    partials_ptr,
    numel,
    received_stride,
    rank,
    num_received,
    scale,
    ACCUMULATE: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Sum PARTIAL elements of all ranks' chunks in rank order; one sum of squares of
    the result.

    Maths:      shard = [shard +] (((chunk_0 + chunk_1) + ...) + chunk_{W-1}) * scale
                partial = sum(shard ** 2)
    Grid:       (cdiv(S, PARTIAL),); program i owns elements [i * PARTIAL,
                (i + 1) * PARTIAL) and partial i.
    Reads:      own [S], received [W - 1, S] in the wire dtype, shard [S]
                bytes per element: W * wire + shard
                shard, fp32 or 16-bit, is read only to ACCUMULATE; else its term is 0.
    Writes:     shard [S]
                bytes per element: out
                partials [cdiv(S, PARTIAL)] fp64, 8 bytes per program.
    Computes:   sums in fp32, every operation rounded on its own, then to the shard's
                dtype; of what is stored, squares exact in fp64, their sum in fp64.
    Masks:      elements from S on are neither read nor written, and add nothing to the
                sum of squares.
    Twin:       reference.reduce_
    """
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * PARTIAL + tl.arange(0, PARTIAL)
    numel = numel.to(tl.int64)
    received_stride = received_stride.to(tl.int64)
    if WHOLE_BLOCKS:
        # The same values, written so that the compiler sees multiples of BLOCK and
        # keeps the 128-bit accesses.
        numel = (numel // BLOCK) * BLOCK
        received_stride = (received_stride // BLOCK) * BLOCK
    inside = offsets < numel

    # -0.0 is the neutral element of addition: 0.0 would turn a sum of negative zeros
    # positive. It is written as bits, because Triton 3.6 takes the number -0.0 for 0.0.
    total = tl.full([PARTIAL], 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
    # `while`, because NumPy 2.4 breaks `range` in the interpreter of Triton 3.6.
    index = 0
    while index < rank:
        total += widen(tl.load(received_ptr + offsets, mask=inside))
        received_ptr += received_stride
        index += 1
    total += widen(tl.load(own_ptr + offsets, mask=inside))
    while index < num_received:
        total += widen(tl.load(received_ptr + offsets, mask=inside))
        received_ptr += received_stride
        index += 1
    total *= scale
    if ACCUMULATE:
        total += widen(tl.load(shard_ptr + offsets, mask=inside))
    stored = narrow(total, shard_ptr.dtype.element_ty)
    tl.store(shard_ptr + offsets, stored, mask=inside)

    wide = tl.where(inside, widen(stored), 0.0).to(tl.float64)
    tl.store(partials_ptr + program, tl.sum(wide * wide))


def reduce_(
    shard: Tensor,
    own: Tensor,
    received: Tensor,
    partials: Tensor,
    *,
    rank: int,
    scale: float,
    accumulate: bool,
) -> None:
    """`reference.reduce_` in one launch on the current stream, whatever the number of
    ranks.

    All tensors are contiguous, but rows of `received` may lie apart. 128-bit accesses
    need tensors on 16 bytes, and sizes and row strides that are multiples of 64.
    """
    numel = shard.numel()
    if received.numel() and received.stride(1) != 1:
        received = received.contiguous()
    stride = received.stride(0) if received.shape[0] > 1 else 0
    launch(
        reduce_kernel,
        cdiv(numel, PARTIAL),
        shard.device,
        shard,
        own,
        received,
        partials,
        numel,
        stride,
        rank,
        received.shape[0],
        scale,
        ACCUMULATE=accumulate,
        WHOLE_BLOCKS=numel % BLOCK == 0 and stride % BLOCK == 0,
        BLOCK=BLOCK,
        PARTIAL=PARTIAL,
        num_warps=8,
    )
