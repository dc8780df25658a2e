"""The kernels in plain torch: the numeric specification, the CPU path and the oracle of
every test.

Letters: S elements of a shard (a multiple of BLOCK), W ranks, R parameters (columns of
         the scalar table), G groups.

Each function is the twin of the Triton kernel of the same name: the same arguments, and
for element-wise results the same bits. The rules that make this possible: every fp32
operation is rounded on its own (no contraction into FMA), square roots and quotients
are correctly rounded, scalars are formed in fp64 and rounded once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import codecs
from .arguments import BLOCK, CHUNK, PARTIAL, STEP_BITS, TABLE, ColumnMap, Rule, Shard
from .rules import RULES
from .storage import load_moment, load_weights, part_of, store_moment, store_weights


def pack_(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], scale: float = 1.0
) -> None:
    """Copy many tensors into one bucket, cast and scaled: destination =
    cast(fp32(source) * fp32(scale)).

    Args:
        destinations: views of one bucket, each with the strides its parameter has.
            fp32, bf16 or fp16. Written.
        sources: tensors of the same shapes, any strides, any floating dtype.
        scale: with 1.0 the elements are only cast.
    """
    for destination, source in zip(destinations, sources, strict=True):
        if scale == 1.0:
            destination.copy_(source)
        else:
            destination.copy_(source.float() * scale)


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
    """Sum the chunks of all ranks in rank order, scale, accumulate, and leave the sums
    of squares behind.

    shard = [shard +] (((chunk_0 + chunk_1) + ...) + chunk_{W-1}) * scale, every
    operation rounded to fp32.

    Args:
        shard: [S], fp32 (or 16-bit, rounded once, at the end). Written; read first if
            `accumulate`. May be the same memory as `own`.
        own: [S], this rank's chunk, in the wire dtype.
        received: [W - 1, S], the chunks of the other ranks in rank order, in the wire
            dtype.
        partials: fp64 [ceil(S / PARTIAL)]. Written: the sum of squares of each PARTIAL
            elements of the new shard. It is finite exactly when all of these elements
            are: fp32 squares cannot overflow fp64.
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
        total = shard[window].float()
        square_sums(partials[start // PARTIAL : (start + CHUNK) // PARTIAL], total)


def square_sums(partials: Tensor, values: Tensor) -> None:
    """Write the fp64 sum of squares of every PARTIAL elements of `values` (fp32 [S]) to
    `partials`."""
    squares = values.double().square_()
    whole = squares.numel() // PARTIAL
    if whole:
        torch.sum(
            squares[: whole * PARTIAL].view(whole, PARTIAL), dim=1, out=partials[:whole]
        )
    if squares.numel() > whole * PARTIAL:
        partials[whole].copy_(squares[whole * PARTIAL :].sum())


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
    """Turn norms, used bits and hyper-parameters into the scalar table; advance the
    step counters. Nothing leaves the device.

    A parameter that no rank used keeps its counter and becomes inactive. If any
    gradient is not finite, all are: the step is skipped on every rank, since every rank
    computes this from the same gathered words.

    Args:
        table: fp32 [12, R], entries as in TABLE. Written.
        keys: int64 [R], what the random bits of this parameter's elements derive from
            at this step. Written.
        steps: int64 [R]. Updates made so far, per parameter. Incremented where active.
        report: fp64 [3]: total norm of the gradients, clip coefficient, number of
            skipped steps (incremented).
        rule: whose scalars to form.
        hyper: fp64 [G, 8], columns as in HYPER.
        group_of_column: int64 [R].
        seeds: int64 [R], a hash of the user's seed and the parameter's index, the same
            in every layout.
        gathered: int64 [W, 1 + ceil(R / 32)], a row per rank: the bits of the fp64 sum
            of squares of its shards, then its used bits, 32 to a word; what is above
            them is not looked at.
        limits: fp64 [2]: largest norm (infinity: no clipping), loss scale.
    """
    columns = torch.arange(steps.numel(), device=steps.device)
    square_sum = gathered[0, :1].view(torch.float64)
    for rank in range(1, gathered.shape[0]):
        square_sum = square_sum + gathered[rank, :1].view(torch.float64)
    norm = sqrt64_rn(square_sum) / limits[1]
    finite = torch.isfinite(square_sum)
    clip = torch.clamp(limits[0] / (norm + 1e-6), max=1.0)
    used = ((gathered[:, 1 + columns // 32] >> (columns % 32)) & 1).amax(dim=0).bool()
    active = used & finite
    steps.add_(active)
    keys.copy_(codecs.mix64(seeds + steps * codecs.GOLDEN))
    lr, beta1, beta2, eps, weight_decay, sign, decoupled, nesterov = hyper[
        group_of_column
    ].unbind(1)
    one_minus_beta1, one_minus_beta2 = 1.0 - beta1, 1.0 - beta2
    step_size, inv_sqrt_c2 = lr, torch.ones_like(lr)
    if rule == "adam":
        c1, c2 = (1.0 - integer_power(torch.stack((beta1, beta2)), steps)).unbind(0)
        step_size, inv_sqrt_c2 = lr / c1, 1.0 / sqrt64_rn(c2)
    if rule == "sgd":  # the first momentum is the gradient itself
        one_minus_beta1 = torch.where(steps > 1, 1.0 - beta2, 1.0)
    entries = (
        sign * (clip / limits[1]),
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        step_size,
        inv_sqrt_c2,
        eps,
        1.0 - decoupled * (lr * weight_decay),
        (1.0 - decoupled) * weight_decay,
        nesterov,
        active,
    )
    for stored, entry in zip(table.unbind(0), entries, strict=True):
        stored.copy_(entry)
    report[:1].copy_(norm)
    report[1:2].copy_(clip)
    report[2:].add_(~finite)


def sqrt64_rn(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of fp64 numbers, which torch's own is
    not on every CPU: it misses by one step in a hundred cases.

    One step of Newton's method from there. Where the root lies half-way between two
    numbers as far as that step can tell, the exact remainder decides.
    """
    # By a power of four, so that no product below overflows or underflows.
    small, large = torch.full_like(x, 2.0**300), torch.full_like(x, 2.0**-300)
    scale = torch.where(x < 1.0, small, large)
    scaled = x * scale * scale
    y = scaled.sqrt()
    y = y + _square_remainder(scaled, y) / (2.0 * y)
    rest = _square_remainder(scaled, y)
    above = torch.nextafter(y, torch.full_like(y, math.inf))
    below = torch.nextafter(y, torch.zeros_like(y))
    rounded = torch.where(rest > y * (above - y), above, y)
    rounded = torch.where(rest <= y * (below - y), below, rounded)
    return torch.where((x > 0.0) & torch.isfinite(x), rounded / scale, x.sqrt())


def _square_remainder(x: Tensor, y: Tensor) -> Tensor:
    """Return x - y * y, whose product is exact in two parts (T. J. Dekker, "A
    floating-point technique for extending the available precision", 1971)."""
    upper = y * (2.0**27 + 1.0)
    upper = upper - (upper - y)
    lower = y - upper
    square = y * y
    rest = ((upper * upper - square) + 2.0 * upper * lower) + lower * lower
    return (x - square) - rest


def integer_power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return base ** exponent in fp64 by squaring, from the low bit up: only products,
    so the same bits everywhere.

    Args:
        base: fp64, broadcastable with `exponent`.
        exponent: int64, 0 <= exponent < 2 ** STEP_BITS.
    """
    squares = base.new_empty(
        STEP_BITS, *torch.broadcast_shapes(base.shape, exponent.shape)
    )
    powers = squares.unbind(0)
    powers[0].copy_(base)
    for square, following in itertools.pairwise(powers):
        torch.mul(square, square, out=following)
    bits = torch.arange(STEP_BITS, device=base.device).view(
        -1, *[1] * (squares.dim() - 1)
    )
    first, *factors = torch.where((exponent >> bits) & 1 == 1, squares, 1.0).unbind(0)
    for factor in factors:
        first.mul_(factor)
    return first


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
    """Update one shard in one pass: unscale, clip, moments, decay, master weight,
    parameter.

    Args:
        shard: parameters and optimizer state, in any of their formats. Written;
            inactive parameters keep their bits. A 16-bit parameter that its fp32 master
            does not round to was written to by somebody else: it is the weight then.
        grad: [S], fp32, bf16 or fp16. Not modified.
        rule: "adam", "lion" or "sgd".
        table: fp32 [12, R], entries as in TABLE.
        keys: int64 [R], from `scalars_`.
        columns: the parameter of each block of 64 elements.
        l2: some parameter adds weight_decay * p to its gradient (Adam, SGD) instead of
            decaying p.
    """
    for first, end, column, origin in columns.runs:
        scalars = dict(zip(TABLE, table[:, column].unbind(0), strict=True))
        for start in range(first, end, CHUNK // BLOCK):
            blocks = slice(start, min(start + CHUNK // BLOCK, end))
            inside = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
            part = part_of(shard, blocks)
            before = [tensor.clone() for tensor in part.tensors()]
            indices = torch.arange(
                blocks.start + origin, blocks.stop + origin, device=grad.device
            )
            for_moments, for_weights = codecs.random_words(keys[column], indices)
            w, m, v, largest = (
                load_weights(part),
                *map(load_moment, part.moments, (codecs.E3M4, codecs.UE3M5, None)),
            )
            g = grad[inside].float() * scalars["coef"]
            if l2:
                g = torch.where(scalars["l2"] != 0, g + scalars["l2"] * w, g)
            w, m, v, largest = RULES[rule](w, m, v, largest, g, scalars)
            store_moment(part.first, m, for_moments & 0xFFFF, codecs.E3M4)
            store_moment(part.second, v, for_moments >> 16, codecs.UE3M5)
            store_moment(part.largest, largest, for_weights & 0xFFFF, None)
            store_weights(part, w, for_weights >> 16)
            for tensor, old in zip(part.tensors(), before, strict=True):
                tensor.copy_(torch.where(scalars["active"] != 0, tensor, old))


def cast_(out: Tensor, source: Tensor) -> None:
    """Copy a flat tensor into another precision, rounding to nearest even; NaN stays
    NaN.

    Args:
        out: [S]. Written.
        source: [S].
    """
    out.copy_(source)
