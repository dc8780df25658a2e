"""A shard's weights and moments between their storage formats and fp32, in plain torch,
on any device.

Besides the reference, checkpoints use this: what leaves the optimizer is fp32, and
comes back as the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import codecs
from .arguments import BLOCK, MASTERS, MOMENTS, Moment, Shard
from .rules import sqrt_rn

ONE = 127
"""The biased exponent of 1, as a scale has it."""


def empty_master(like: Tensor, name: str) -> Tensor | None:
    """Return a master of zeros for a flat tensor, in a format of MASTERS."""
    form = MASTERS[name]
    return None if form is None else torch.zeros_like(like, dtype=form.dtype)


def empty_moment(like: Tensor, name: str) -> Moment:
    """Return a moment of zeros for a flat tensor, in a format of MOMENTS."""
    form = MOMENTS[name]
    values = torch.zeros_like(like, dtype=form.dtype)
    if not form.scaled:
        return Moment(values)
    blocks = like.numel() // BLOCK
    scale = torch.full((blocks,), ONE, dtype=torch.uint8, device=like.device)
    return Moment(values, scale)


def part_of(shard: Shard, blocks: slice) -> Shard:
    """Return views of some blocks of a shard."""
    inside = slice(blocks.start * BLOCK, blocks.stop * BLOCK)

    def moment(whole: Moment | None) -> Moment | None:
        if whole is None:
            return None
        return Moment(
            whole.values[inside], None if whole.scale is None else whole.scale[blocks]
        )

    master = None if shard.master is None else shard.master[inside]
    return Shard(shard.param[inside], master, *map(moment, shard.moments))


def load_weights(shard: Shard) -> Tensor:
    """Return the weights of a shard at their full precision, fp32 [S]. Exact.

    An fp32 master counts where it rounds to the parameter, to nearest even; zeros of
    either sign are the same. Elsewhere somebody has written to the parameter, which is
    the weight then, NaN included.
    """
    if shard.master is None:
        return shard.param.float()
    if shard.master.dtype == torch.int16:
        return codecs.join32(shard.param, shard.master)
    if shard.master.dtype == torch.int8:
        return codecs.join24(shard.param, shard.master)
    untouched = shard.master.to(shard.param.dtype) == shard.param
    return torch.where(untouched, shard.master, shard.param.float())


def store_weights(shard: Shard, weights: Tensor, random: Tensor) -> None:
    """Write weights, fp32 [S], to master and parameter.

    Args:
        shard: its `param` and `master` are written.
        weights: fp32 [S].
        random: int64 [S], 16 random bits each, for the formats that are rounded
            stochastically.
    """
    if shard.master is None and shard.param.dtype == torch.bfloat16:
        shard.param.copy_(codecs.bf16_stochastic(weights, random))
    elif shard.master is None or shard.master.dtype == torch.float32:
        store_master(shard, weights)
        shard.param.copy_(weights)
    else:
        split = (
            codecs.split32(weights)
            if shard.master.dtype == torch.int16
            else codecs.split24(weights, random)
        )
        for tensor, half in zip((shard.param, shard.master), split, strict=True):
            tensor.copy_(half)


def store_master(shard: Shard, weights: Tensor) -> None:
    """Write fp32 weights [S] to the master alone, to nearest. The parameter is left to
    whoever owns it.

    A split master only holds what bf16 parameters lack, so it fits when these are, or
    become, the weights' rounding.
    """
    if shard.master is None:
        return
    if shard.master.dtype == torch.float32:
        shard.master.copy_(weights)
        return
    high, low = codecs.split32(weights)
    if shard.master.dtype == torch.int8:
        odd = high.view(torch.int16) & 1 == 1
        low = (low.long() + 0x80 >> 8).clamp(max=0x7F)
        # An odd bf16 has no lower tie.
        low = torch.where(odd & (low == -0x80), -0x7F, low)
    shard.master.copy_(low)


def refresh_master(shard: Shard) -> None:
    """Let the master follow parameters that somebody else wrote, and keep the low bits
    of those nobody did."""
    if shard.master is None:
        return
    weights = load_weights(shard)
    if shard.master.dtype == torch.float32:
        shard.master.copy_(weights)
        return
    untouched = weights.to(shard.param.dtype) == shard.param
    shard.master.masked_fill_(~untouched, 0)


def load_moment(moment: Moment | None, form: codecs.Format8 | None) -> Tensor | None:
    """Return a moment, fp32 [S]; None if there is none. Exact.

    Args:
        moment: as stored.
        form: E3M4 for a first moment. UE3M5 for a second one, of which blocks hold the
            root.
    """
    if moment is None:
        return None
    if moment.scale is None:
        return moment.values.float()
    assert form is not None
    x = codecs.decode8(moment.values, moment.scale, form)
    return x if form.signed else x * x


def store_moment(
    moment: Moment | None,
    x: Tensor | None,
    random: Tensor | None,
    form: codecs.Format8 | None,
) -> None:
    """Write a moment, fp32 [S], where there is one.

    Args:
        moment: written.
        x: fp32 [S].
        random: int64 [S], 16 random bits each; None rounds to nearest (ties up).
        form: as for `load_moment`.
    """
    if moment is None or x is None:
        return
    if random is None:
        random = torch.full_like(x, 0x8000, dtype=torch.int64)
    if moment.scale is not None:
        assert form is not None
        codes, scale = codecs.encode8(x if form.signed else sqrt_rn(x), random, form)
        moment.values.copy_(codes)
        moment.scale.copy_(scale)
    elif moment.values.dtype == torch.bfloat16:
        moment.values.copy_(codecs.bf16_stochastic(x, random))
    else:
        moment.values.copy_(x)


STATE_CHUNK = 2**13
"""Blocks that checkpoints convert at a time: formats are taken apart in int64, some 30
MiB of it for these."""


def load_state_(out: Tensor, shard: Shard, name: str) -> None:
    """Write a state of a shard to `out` as fp32. Exact: `store_state_` makes the same
    state of it.

    Args:
        out: fp32 [S]. Written.
        shard: as in `update_`.
        name: "master", "first", "second" or "largest".
    """
    for blocks, part in _parts(shard):
        inside = out[blocks.start * BLOCK : blocks.stop * BLOCK]
        if name == "master":
            inside.copy_(load_weights(part))
        else:
            moment = load_moment(getattr(part, name), _FORM[name])
            assert moment is not None
            inside.copy_(moment)


def store_state_(shard: Shard, name: str, values: Tensor) -> None:
    """Round fp32 values [S] to the format of a state of a shard, to nearest. Arguments
    as for `load_state_`."""
    for blocks, part in _parts(shard):
        inside = values[blocks.start * BLOCK : blocks.stop * BLOCK]
        if name == "master":
            store_master(part, inside)
        else:
            store_moment(getattr(part, name), inside, None, _FORM[name])


def refresh_masters(shard: Shard) -> None:
    """`refresh_master`, some blocks at a time."""
    for _, part in _parts(shard):
        refresh_master(part)


_FORM = {"first": codecs.E3M4, "second": codecs.UE3M5, "largest": None}


def _parts(shard: Shard) -> Iterator[tuple[slice, Shard]]:
    for start in range(0, shard.param.numel() // BLOCK, STATE_CHUNK):
        blocks = slice(start, min(start + STATE_CHUNK, shard.param.numel() // BLOCK))
        yield blocks, part_of(shard, blocks)
