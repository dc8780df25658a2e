"""The kernels as functions: validated, then Triton, native or plain torch. Nobody
else but `backends` imports `zerokern.kernels`.

Every function works in place on flat tensors, runs on the current stream and never
synchronises with the host. What each computes is written at its twin in
`kernels/reference.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import config, pretend
from .backends import check_backend, implementation
from .kernels import codecs, storage
from .kernels.arguments import (
    BLOCK,
    HYPER,
    MASTERS,
    MOMENTS,
    PARTIAL,
    TABLE,
    ColumnMap,
    Moment,
    Rule,
    Shard,
    check_states,
)

__all__ = [
    "BLOCK",
    "HYPER",
    "MASTERS",
    "MOMENTS",
    "PARTIAL",
    "TABLE",
    "ColumnMap",
    "Moment",
    "Rule",
    "Shard",
    "cast_",
    "check_backend",
    "empty_master",
    "empty_moment",
    "load_state_",
    "pack_",
    "partials_numel",
    "prepared_reduce",
    "prepared_scalars",
    "prepared_update",
    "reduce_",
    "refresh_master_",
    "scalars_",
    "seed_of",
    "store_state_",
    "update_",
]

empty_master = storage.empty_master
empty_moment = storage.empty_moment
load_state_ = storage.load_state_
store_state_ = storage.store_state_

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def partials_numel(shard_numel: int) -> int:
    """Return how many fp64 partial sums `reduce_` writes for a shard."""
    return -(-shard_numel // PARTIAL)


def pack_(
    destinations: Sequence[Tensor],
    sources: Sequence[Tensor],
    scale: float = 1.0,
    *,
    backend: config.Backend | None = None,
) -> None:
    """Copy many tensors into views of one bucket (or back) in one launch, cast and
    scaled. See `reference.pack_`.

    Raises:
        ValueError: the lists differ in length, or a pair in shape or device.
        TypeError: a dtype that is not fp32, bf16 or fp16.
    """
    if len(destinations) != len(sources):
        raise ValueError(
            f"pack_: {len(destinations)} destinations for {len(sources)} sources; give"
            " one each"
        )
    for destination, source in zip(destinations, sources, strict=True):
        if destination.shape != source.shape:
            raise ValueError(
                f"pack_: shapes {tuple(destination.shape)} and {tuple(source.shape)}"
                " differ"
            )
        _check_float("pack_", destination, source)
    if destinations:
        _check_device("pack_", *destinations, *sources)
        implementation(destinations[0], "pack", backend).pack_(
            destinations, sources, scale
        )


def reduce_(
    shard: Tensor,
    own: Tensor,
    received: Tensor,
    partials: Tensor,
    *,
    rank: int,
    scale: float,
    accumulate: bool = False,
    backend: config.Backend | None = None,
) -> None:
    """Sum the chunks of W ranks in rank order into a shard; leave its sums of squares.
    See `reference.reduce_`.

    Raises:
        ValueError: sizes that do not match, or tensors on several devices.
        TypeError: shard not fp32, bf16 or fp16, partials not fp64, or chunks of two
            dtypes.
    """
    _check_flat("reduce_", shard, own)
    if (
        received.shape[1:] != own.shape
        or received.stride(1) != 1
        or not 0 <= rank <= received.shape[0]
    ):
        raise ValueError(
            f"reduce_: received {tuple(received.shape)} is not [W - 1, {own.numel()}]"
            f" in contiguous rows (rank {rank})"
        )
    if partials.numel() != partials_numel(shard.numel()):
        raise ValueError(
            f"reduce_: {partials.numel()} partials for {shard.numel()} elements; need"
            f" {partials_numel(shard.numel())}"
        )
    if (
        shard.dtype not in FLOATS
        or partials.dtype != torch.float64
        or received.dtype != own.dtype
    ):
        raise TypeError(
            f"reduce_: shard {shard.dtype}, partials {partials.dtype}, chunks"
            f" {own.dtype} and {received.dtype}"
        )
    _check_device("reduce_", shard, own, received, partials)
    if shard.numel():
        kernels = implementation(shard, "reduce", backend)
        kernels.reduce_(
            shard,
            own,
            received,
            partials,
            rank=rank,
            scale=scale,
            accumulate=accumulate,
        )


def prepared_reduce(
    partials: Tensor, *, rank: int, scale: float
) -> Callable[..., None]:
    """Return `reduce_` for one bucket, without its checks: a function of shard, own,
    received and `accumulate`. The back end is chosen now."""
    kernel = implementation(partials, "reduce", None).reduce_
    return functools.partial(kernel, partials=partials, rank=rank, scale=scale)


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
    backend: config.Backend | None = None,
) -> None:
    """Form the scalar table and advance the steps, on the device. See
    `reference.scalars_`.

    Raises:
        ValueError: shapes that do not match, or tensors on several devices.
    """
    if table.shape != (len(TABLE), steps.numel()) or hyper.shape[1] != len(HYPER):
        raise ValueError(
            f"scalars_: table {tuple(table.shape)}, hyper {tuple(hyper.shape)} for"
            f" {steps.numel()} parameters"
        )
    for name, tensor in (
        ("table", table),
        ("steps", steps),
        ("hyper", hyper),
        ("gathered", gathered),
    ):
        if not tensor.is_contiguous():
            raise ValueError(
                f"scalars_: {name} has strides {tensor.stride()}; it must be contiguous"
            )
    _check_device(
        "scalars_",
        table,
        keys,
        steps,
        report,
        hyper,
        group_of_column,
        seeds,
        gathered,
        limits,
    )
    implementation(table, "scalars", backend).scalars_(
        table,
        keys,
        steps,
        report,
        rule=rule,
        hyper=hyper,
        group_of_column=group_of_column,
        seeds=seeds,
        gathered=gathered,
        limits=limits,
    )


def prepared_scalars(
    table: Tensor,
    keys: Tensor,
    steps: Tensor,
    report: Tensor,
    *,
    rule: Rule,
    group_of_column: Tensor,
    seeds: Tensor,
) -> Callable[..., None]:
    """Return `scalars_` for one optimizer, without its checks: a function of `hyper`,
    `gathered` and `limits`. The back end is chosen now."""
    return functools.partial(
        implementation(table, "scalars", None).scalars_,
        table,
        keys,
        steps,
        report,
        rule=rule,
        group_of_column=group_of_column,
        seeds=seeds,
    )


def update_(
    shard: Shard,
    grad: Tensor,
    *,
    rule: Rule,
    table: Tensor,
    keys: Tensor,
    columns: ColumnMap,
    l2: bool = False,
    backend: config.Backend | None = None,
) -> None:
    """Update one shard in one pass. See `reference.update_`.

    Raises:
        ValueError: sizes that do not match, tensors on several devices, or states that
            the rule does not have.
        TypeError: a storage format that the kernels do not know.
    """
    _check_update(shard, grad, rule, table, keys, columns)
    if shard.param.numel():
        kernels = implementation(shard.param, "update", backend)
        kernels.update_(
            shard, grad, rule=rule, table=table, keys=keys, columns=columns, l2=l2
        )


def prepared_update(
    shard: Shard, *, rule: Rule, table: Tensor, keys: Tensor, columns: ColumnMap
) -> Callable[..., None]:
    """Return `update_` for one bucket, checked now: a function of the gradient, which
    has the size of the shard, and `l2`. The back end is chosen now.

    Raises:
        ValueError, TypeError: as of `update_`.
    """
    _check_update(shard, shard.param, rule, table, keys, columns)
    return functools.partial(
        implementation(shard.param, "update", None).update_,
        shard,
        rule=rule,
        table=table,
        keys=keys,
        columns=columns,
    )


def _check_update(
    shard: Shard,
    grad: Tensor,
    rule: Rule,
    table: Tensor,
    keys: Tensor,
    columns: ColumnMap,
) -> None:
    masters = [] if shard.master is None else [shard.master]
    moments = [moment.values for moment in shard.moments if moment is not None]
    _check_flat("update_", shard.param, *masters, grad, *moments)
    check_states(rule, shard)
    _check_float("update_", shard.param, grad)
    blocks = columns.block_column.numel()
    if blocks * BLOCK != shard.param.numel():
        raise ValueError(
            f"update_: {blocks} blocks of {BLOCK} do not make"
            f" {shard.param.numel()} elements; pad the shard"
        )
    maps = columns.block_column, columns.origin
    _check_device("update_", *shard.tensors(), grad, table, keys, *maps)


def refresh_master_(shard: Shard) -> None:
    """Let master weights follow parameters that somebody else wrote, and keep the low
    bits of those nobody did."""
    if not pretend.is_fake(shard.param):
        storage.refresh_masters(shard)


def seed_of(seed: int, index: int) -> int:
    """Return the int64 seed of a parameter's random bits.

    Args:
        seed: the user's.
        index: position of the parameter in the optimizer's param groups, which no
            layout changes.
    """
    value = (seed + index * codecs.GOLDEN + 2**63) % 2**64 - 2**63
    word = torch.tensor(value, device="cpu")
    return int(codecs.mix64(word))


def cast_(
    out: Tensor, source: Tensor, *, backend: config.Backend | None = None
) -> None:
    """Copy a flat tensor into another precision, to nearest even. See
    `reference.cast_`.

    Raises:
        ValueError: sizes or devices differ.
        TypeError: a dtype that is not fp32, bf16 or fp16.
    """
    _check_flat("cast_", out, source)
    _check_float("cast_", out, source)
    _check_device("cast_", out, source)
    if out.numel():
        implementation(out, "cast", backend).cast_(out, source)


def _check_flat(name: str, *tensors: Tensor) -> None:
    first = tensors[0]
    for tensor in tensors:
        if (
            tensor.dim() != 1
            or not tensor.is_contiguous()
            or tensor.numel() != first.numel()
        ):
            raise ValueError(
                f"{name}: every tensor must be flat, contiguous and of {first.numel()}"
                f" elements; one has shape {tuple(tensor.shape)} and strides"
                f" {tensor.stride()}"
            )


def _check_float(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name}: dtype {tensor.dtype} is not one of float32, bfloat16,"
                " float16; cast it first"
            )


def _check_device(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{name}: tensors on {tensors[0].device} and {tensor.device}; move them"
                " to one device"
            )
