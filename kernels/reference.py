"""The kernels in plain torch: the numeric specification, the CPU path and the oracle of every test.

Letters: S elements of a shard (a multiple of BLOCK), W ranks, R parameters (rows of the scalar table), G param groups.

Each function is the twin of the Triton kernel of the same name: the same arguments, and for element-wise results the
    same
bits. The rules that make this possible: every fp32 operation is rounded on its own (no contraction into FMA), square
roots and quotients are correctly rounded, scalars are formed in fp64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Elements per row of `block_row`: slots start at multiples of it, so a block never holds two parameters."""

PARTIAL = 4096
"""Elements whose squares share one fp64 partial sum."""

CHUNK = 4 * PARTIAL
"""Elements per pass on the CPU: 64 KiB of fp32 stay in the L2 cache and below malloc's mmap threshold."""

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "sign", "decoupled")
"""Columns of `hyper`, fp64 [G, 7]. sign is -1 to maximize; decoupled is 1 for AdamW, 0 for L2 regularisation."""

TABLE = (
    "coef", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "step_size", "inv_sqrt_c2",
    "eps", "decay", "l2", "active",
)  # fmt: skip
"""Rows of the scalar table, fp32 [11, R]: what one parameter's update needs beside its elements."""

STEP_BITS = 40
"""Bits of a step counter that the power by squaring looks at."""


class RowMap(NamedTuple):
    """Which parameter each block of a shard belongs to."""

    block_row: Tensor
    """int32 [S / BLOCK], on the shard's device: the row of each block."""

    runs: tuple[tuple[int, int, int], ...]
    """The same on the host, for the CPU: (first block, end block, row) of each stretch of one parameter."""


def sqrt_rn(x: Tensor) -> Tensor:
    """Return the correctly rounded fp32 square root.

    torch's vectorised fp32 square root on the CPU misses the last bit now and then. The fp64 root of an fp32
    number is never so close to the middle of two fp32 numbers that rounding it once more could go wrong.
    """
    return x.double().sqrt_().float()


def pack_(destinations: Sequence[Tensor], sources: Sequence[Tensor], scale: float = 1.0) -> None:
    """Copy many tensors into one bucket, cast and scaled: destination = cast(fp32(source) * fp32(scale)).

    Args:
        destinations: views of one bucket, each with the strides its parameter has. fp32, bf16 or fp16. Written.
        sources: tensors of the same shapes, any strides, any floating dtype.
        scale: with 1.0 the elements are only cast.
    """
    for destination, source in zip(destinations, sources, strict=True):
        if scale == 1.0:
            destination.copy_(source)
        else:
            destination.copy_(source.float() * scale)


def reduce_(
    shard: Tensor, own: Tensor, received: Tensor, partials: Tensor, *, rank: int, scale: float, accumulate: bool
) -> None:
    """Sum the chunks of all ranks in rank order, scale, accumulate, and leave the sums of squares behind.

    shard = [shard +] (((chunk_0 + chunk_1) + ...) + chunk_{W-1}) * scale, every operation rounded to fp32.

    Args:
        shard: fp32 [S]. Written; read first if `accumulate`. May be the same memory as `own`.
        own: [S], this rank's chunk, in the wire dtype.
        received: [W - 1, S], the chunks of the other ranks in rank order, in the wire dtype.
        partials: fp64 [ceil(S / PARTIAL)]. Written: the sum of squares of each PARTIAL elements of the new shard. It is
            finite exactly when all of these elements are: fp32 squares cannot overflow fp64.
        rank: position of `own` in the rank order.
        scale: 1 / W to average.
        accumulate: add to the shard instead of replacing it.
    """
    chunks = [*received[:rank].unbind(0), own, *received[rank:].unbind(0)]
    for start in range(0, shard.numel(), CHUNK):
        window = slice(start, start + CHUNK)
        first, *others = (chunk[window].float() for chunk in chunks)
        total = torch.add(first, others[0]) if others else first.clone()
        for chunk in others[1:]:
            total.add_(chunk)
        if scale != 1.0:
            total.mul_(scale)
        if accumulate:
            total.add_(shard[window])
        shard[window].copy_(total)
        square_sums(partials[start // PARTIAL : (start + CHUNK) // PARTIAL], total)


def square_sums(partials: Tensor, values: Tensor) -> None:
    """Write the fp64 sum of squares of every PARTIAL elements of `values` (fp32 [S]) to `partials`."""
    squares = values.double().square_()
    whole = squares.numel() // PARTIAL
    if whole:
        torch.sum(squares[: whole * PARTIAL].view(whole, PARTIAL), dim=1, out=partials[:whole])
    if squares.numel() > whole * PARTIAL:
        partials[whole].copy_(squares[whole * PARTIAL :].sum())


def scalars_(
    table: Tensor,
    steps: Tensor,
    report: Tensor,
    *,
    hyper: Tensor,
    group_of_row: Tensor,
    gathered: Tensor,
    limits: Tensor,
) -> None:
    """Turn norms, used bits and hyper-parameters into the scalar table; advance the step counters. Nothing leaves
    the device.

    A parameter that no rank used keeps its counter and becomes inactive. If any gradient is not finite, all are: the
    step is skipped on every rank, since every rank computes this from the same gathered words.

    Args:
        table: fp32 [11, R], rows as in TABLE. Written.
        steps: int64 [R]. Updates made so far, per parameter. Incremented where active.
        report: fp64 [3]: total norm of the gradients, clip coefficient, number of skipped steps (incremented).
        hyper: fp64 [G, 7], columns as in HYPER.
        group_of_row: int64 [R].
        gathered: int64 [W, 1 + ceil(R / 32)], a row per rank: the bits of the fp64 sum of squares of its shards,
            then its used bits, 32 to a word.
        limits: fp64 [2]: largest norm (infinity: no clipping), loss scale.
    """
    rows = torch.arange(steps.numel(), device=steps.device)
    square_sum = gathered[0, :1].view(torch.float64)
    for rank in range(1, gathered.shape[0]):
        square_sum = square_sum + gathered[rank, :1].view(torch.float64)
    norm = square_sum.sqrt() / limits[1]
    finite = torch.isfinite(square_sum)
    clip = torch.clamp(limits[0] / (norm + 1e-6), max=1.0)
    used = ((gathered[:, 1 + rows // 32] >> (rows % 32)) & 1).amax(dim=0).bool()
    active = used & finite
    steps.add_(active)
    lr, beta1, beta2, eps, weight_decay, sign, decoupled = hyper[group_of_row].unbind(1)
    c1, c2 = (1.0 - integer_power(torch.stack((beta1, beta2)), steps)).unbind(0)
    columns = (
        sign * (clip / limits[1]),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / c1,
        1.0 / c2.sqrt(),
        eps,
        1.0 - decoupled * (lr * weight_decay),
        (1.0 - decoupled) * weight_decay,
        active,
    )
    for row, column in zip(table.unbind(0), columns, strict=True):
        row.copy_(column)
    report[:1].copy_(norm)
    report[1:2].copy_(clip)
    report[2:].add_(~finite)


def integer_power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return base ** exponent in fp64 by squaring, from the low bit up: only products, so the same bits everywhere.

    Args:
        base: fp64, broadcastable with `exponent`.
        exponent: int64, 0 <= exponent < 2 ** STEP_BITS.
    """
    power = torch.ones_like(base * exponent)
    for bit in range(STEP_BITS):
        power = torch.where((exponent >> bit) & 1 == 1, power * base, power)
        base = base * base
    return power


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
    """Update one shard in one pass: unscale, clip, moments, decay, master weight, parameter.

    Args:
        param: [S], this rank's slot of the gather buffer. fp32, bf16 or fp16. Written.
        master: fp32 [S], or None if `param` is fp32 and its own master. Updated.
        exp_avg, exp_avg_sq: fp32 [S]. Updated.
        grad: [S], fp32, bf16 or fp16. Not modified.
        table: fp32 [11, R], rows as in TABLE.
        rows: the table column of each block of 64 elements.
        l2: some parameter adds weight_decay * p to its gradient (Adam) instead of decaying p.
    """
    weights = param if master is None else master
    for first, end, row in rows.runs:
        columns = table[:, row].unbind(0)
        for start in range(first * BLOCK, end * BLOCK, CHUNK):
            window = slice(start, min(start + CHUNK, end * BLOCK))
            w, m, v = weights[window], exp_avg[window], exp_avg_sq[window]
            updated = adamw_elements(w, m, v, grad[window], columns, l2, sqrt_rn)
            for tensor, value in zip((w, m, v), updated, strict=True):
                tensor.copy_(value)
            if master is not None:
                param[window].copy_(master[window])


def adamw_elements(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    columns: Sequence[Tensor],
    l2: bool,
    sqrt: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the updated (weight, exp_avg, exp_avg_sq), fp32. This is the whole specification of the update.

    Args:
        weight, exp_avg, exp_avg_sq: fp32, one shape.
        grad: the same shape, any floating dtype.
        columns: the rows of the scalar table in the order of TABLE, broadcastable with `weight`.
        l2: as in `adamw_`.
        sqrt: a correctly rounded fp32 square root.
    """
    coef, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_c2, eps, decay, l2_decay, active = columns
    g = grad.float() * coef
    if l2:
        g = torch.where(l2_decay != 0, g + l2_decay * weight, g)
    m = beta1 * exp_avg + one_minus_beta1 * g
    v = beta2 * exp_avg_sq + one_minus_beta2 * (g * g)
    w = weight * decay - (m * step_size) / (sqrt(v) * inv_sqrt_c2 + eps)
    on = active != 0
    return torch.where(on, w, weight), torch.where(on, m, exp_avg), torch.where(on, v, exp_avg_sq)


def cast_(out: Tensor, source: Tensor) -> None:
    """Copy a flat tensor into another precision, rounding to nearest even; NaN stays NaN.

    Args:
        out: [S]. Written.
        source: [S].
    """
    out.copy_(source)
