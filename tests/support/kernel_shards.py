"""Shards in every storage format, and the update of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from backends import device_of, placed
from samples import mixed
from scalar_tables import Variant
from torch import Tensor

from zerokern import ops
from zerokern.kernels import codecs, storage
from zerokern.kernels.codecs import Format8
from zerokern.ops import BLOCK, ColumnMap, Moment, Shard

WEIGHTS = {
    "fp32": (torch.float32, None),
    "bf16+fp32": (torch.bfloat16, torch.float32),
    "fp16+fp32": (torch.float16, torch.float32),
    "split32": (torch.bfloat16, torch.int16),
    "split24": (torch.bfloat16, torch.int8),
    "bf16": (torch.bfloat16, None),
}
"""Formats of the weights: dtypes of param and master."""

ROUNDED_AT_RANDOM = ("split24", "bf16")
"""Weights that are exact on the average only."""

MOMENTS = {name: form.dtype for name, form in ops.MOMENTS.items()}
FORMS = (codecs.E3M4, codecs.UE3M5, None)
"""8-bit formats of the three moments, in the order in which a shard has them."""


def columns_of(
    column_of_block: Sequence[int],
    first: Mapping[int, int] | None = None,
    num_columns: int = 0,
) -> ColumnMap:
    """Return the map of a shard.

    Args:
        column_of_block: each block's column.
        first: of a column, which block of its parameter the first one here is; 0 if not
            given.
        num_columns: columns in all, if some have no block here.
    """
    origin = [0] * max(num_columns, *(column + 1 for column in column_of_block))
    runs: list[tuple[int, int, int, int]] = []
    for block, column in enumerate(column_of_block):
        if runs and runs[-1][2] == column:
            runs[-1] = (runs[-1][0], block + 1, column, origin[column])
        else:
            origin[column] = (first or {}).get(column, 0) - block
            runs.append((block, block + 1, column, origin[column]))
    return ColumnMap(
        torch.tensor(column_of_block, dtype=torch.int32),
        torch.tensor(origin),
        tuple(runs),
    )


def shard_of(
    variant: Variant,
    weights: str,
    moments: str | Sequence[str],
    w: Tensor,
    *states: Tensor,
    backend: str = "torch",
) -> Shard:
    """Return a shard in some formats, each value rounded to nearest.

    Args:
        variant: which moments there are.
        weights: a key of WEIGHTS.
        moments: a key of MOMENTS, or one for each moment. 8 bits are none for
            amsgrad's: bf16 instead.
        w: fp32 weights.
        states: fp32 values of the moments; zeros where not given.
        backend: on whose device.
    """
    param, master = WEIGHTS[weights]
    rest = None if master is None else torch.empty_like(w, dtype=master)
    shard = Shard(torch.empty_like(w, dtype=param), rest, None)
    shard.param.copy_(w)
    storage.store_master(shard, w)

    has = (variant.momentum, variant.rule == "adam", variant.amsgrad)
    chosen = [moments] * 3 if isinstance(moments, str) else moments
    values = [*states, *(torch.zeros_like(w) for _ in range(3 - len(states)))]
    made = [
        _moment_of(name, form, x) if wanted else None
        for wanted, name, form, x in zip(has, chosen, FORMS, values, strict=True)
    ]
    whole = Shard(shard.param, shard.master, *made)
    there: Shard = placed(whole, device_of(backend))
    return there


def _moment_of(
    name: str,
    form: Format8 | None,
    values: Tensor,
) -> Moment:
    dtype = torch.bfloat16 if form is None and name == "8bit" else MOMENTS[name]
    scale = None
    if dtype == torch.uint8:
        scale = torch.full((values.numel() // BLOCK,), 127, dtype=torch.uint8)
    moment = Moment(torch.zeros_like(values, dtype=dtype), scale)
    storage.store_moment(moment, values, None, form)
    return moment


def mixed_shard(
    variant: Variant,
    weights: str,
    moments: str | Sequence[str],
    numel: int,
) -> Shard:
    """Return a shard of ordinary numbers and limits of formats."""
    w, m, v, largest = (mixed(numel, seed) for seed in range(4))
    states = (m * 0.1, v.abs() * 0.01, largest.abs() * 0.01)
    return shard_of(variant, weights, moments, w, *states)


def weights_of(shard: Shard) -> Tensor:
    """Return the weights at full precision, fp32."""
    return storage.load_weights(placed(shard, "cpu")).clone()


def moments_of(shard: Shard) -> list[Tensor | None]:
    """Return the moments, fp32."""
    moments = placed(shard, "cpu").moments
    loaded = [
        storage.load_moment(moment, form)
        for moment, form in zip(moments, FORMS, strict=True)
    ]
    return [None if moment is None else moment.clone() for moment in loaded]


def window_of(shard: Shard, first: int, end: int) -> Shard:
    """Return clones of some blocks of a shard."""
    part = storage.part_of(shard, slice(first, end))
    window: Shard = placed(part, shard.param.device.type)
    return window


def update(
    shard: Shard,
    grad: Tensor,
    columns: Any,
    backend: Any = "native",
    **scalars: Any,
) -> Shard:
    """Update in place on the back end's device."""
    device = device_of(backend)
    options = {name: placed(value, device) for name, value in scalars.items()}
    columns = placed(columns, device)
    ops.update_(
        shard,
        grad.to(device),
        columns=columns,
        backend=backend,
        **options,
    )
    return shard
