"""Flat casts between precisions. Letters: S elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .formats import narrow, widen
from .launch import cdiv, launch

TILE = 2048
"""Elements per program: with 128 threads, two 128-bit accesses of a 16-bit format
each."""


@triton.jit
def convert(x, scale, dtype: tl.constexpr, SCALED: tl.constexpr):
    """Return cast(fp32(x) * scale), or the very bits of x where there is nothing to
    change."""
    if SCALED:
        return narrow(widen(x) * scale, dtype)
    elif x.dtype == dtype:
        return x
    else:
        return narrow(widen(x), dtype)


@triton.jit
def copy_tile(
    source_ptr,
    destination_ptr,
    start,
    numel,
    scale,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Convert elements [start, start + TILE) of numel: whole multiples of 8 in 128-bit
    accesses, then up to 7 singly.

    Nothing is known about numel at compile time. A mask that ends at a multiple of 8
    keeps the wide accesses.
    """
    dtype: tl.constexpr = destination_ptr.dtype.element_ty
    whole = (numel // 8) * 8
    offsets = start + tl.arange(0, TILE)
    mask = offsets < whole
    x = tl.load(source_ptr + offsets, mask=mask)
    tl.store(destination_ptr + offsets, convert(x, scale, dtype, SCALED), mask=mask)
    if (whole < numel) & (whole < start + TILE):
        rest = whole + tl.arange(0, 8)
        y = tl.load(source_ptr + rest, mask=rest < numel)
        tl.store(
            destination_ptr + rest, convert(y, scale, dtype, SCALED), mask=rest < numel
        )


@triton.jit(do_not_specialize=["numel"])
def cast_kernel(out_ptr, source_ptr, numel, TILE: tl.constexpr):
    """Convert one tile of a flat tensor.

    Maths:      out = cast(source)
    Grid:       (cdiv(S, TILE),); program i owns elements [i * TILE, (i + 1) * TILE).
    Reads:      source [S]
                bytes per element: source
    Writes:     out [S]
                bytes per element: out
                These are the item sizes of the two dtypes.
    Computes:   through fp32, which holds all formats; one rounding to nearest even, at
                the store.
    Masks:      elements from S on are neither read nor written.
    Twin:       reference.cast_
    """
    start = tl.program_id(0).to(tl.int64) * TILE
    copy_tile(source_ptr, out_ptr, start, numel.to(tl.int64), 1.0, False, TILE)


def cast_(out: Tensor, source: Tensor) -> None:
    """`reference.cast_` in one launch on the current stream.

    Args:
        out: fp32, bf16 or fp16 [S], contiguous. Written.
        source: fp32, bf16 or fp16 [S], contiguous. Any addresses will do; 128-bit
            accesses need both on 16 bytes.
    """
    numel = out.numel()
    launch(
        cast_kernel,
        cdiv(numel, TILE),
        out.device,
        out,
        source,
        numel,
        TILE=TILE,
        num_warps=4,
    )
