"""The kernels as functions: validated, then Triton, native or plain torch. The only importer of `zerokern.kernels`.

Every function works in place on flat tensors, runs on the current stream and never synchronises with the host. What
each computes is written at its twin in `kernels/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import config
from .kernels import native, reference
from .kernels.reference import BLOCK, HYPER, PARTIAL, TABLE, RowMap

__all__ = [
    "BLOCK", "HYPER", "PARTIAL", "TABLE", "RowMap",
    "adamw_", "cast_", "check_backend", "pack_", "partials_numel", "reduce_", "scalars_",
]  # fmt: skip

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_backend(tensor: Tensor) -> None:
    """Refuse a back end that cannot run on this tensor's device, before anything depends on it.

    Raises:
        ValueError: "triton" on a CPU outside of the interpreter, "native" on a GPU, or an unknown name.
    """
    _implementation(tensor, "ZEROKERN_BACKEND", None)


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
    """Copy many tensors into views of one bucket (or back) in one launch, cast and scaled. See `reference.pack_`.

    Raises:
        ValueError: the lists differ in length, or a pair in shape or device.
        TypeError: a dtype that is not fp32, bf16 or fp16.
    """
    if len(destinations) != len(sources):
        raise ValueError(f"pack_: {len(destinations)} destinations for {len(sources)} sources; give one each")
    for destination, source in zip(destinations, sources, strict=True):
        if destination.shape != source.shape:
            raise ValueError(f"pack_: shapes {tuple(destination.shape)} and {tuple(source.shape)} differ")
        _check_float("pack_", destination, source)
    if destinations:
        _check_device("pack_", *destinations, *sources)
        _implementation(destinations[0], "pack", backend).pack_(destinations, sources, scale)


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
    """Sum the chunks of W ranks in rank order into an fp32 shard; leave its sums of squares. See `reference.reduce_`.

    Raises:
        ValueError: sizes that do not match, or tensors on several devices.
        TypeError: shard not fp32, partials not fp64, or chunks of two dtypes.
    """
    _check_flat("reduce_", shard, own)
    if received.shape[1:] != own.shape or received.stride(1) != 1 or not 0 <= rank <= received.shape[0]:
        raise ValueError(
            f"reduce_: received {tuple(received.shape)} is not [W - 1, {own.numel()}] in contiguous rows (rank {rank})"
        )
    if partials.numel() != partials_numel(shard.numel()):
        raise ValueError(
            f"reduce_: {partials.numel()} partials for {shard.numel()} elements; need {partials_numel(shard.numel())}"
        )
    if shard.dtype != torch.float32 or partials.dtype != torch.float64 or received.dtype != own.dtype:
        raise TypeError(
            f"reduce_: shard {shard.dtype}, partials {partials.dtype}, chunks {own.dtype} and {received.dtype}"
        )
    _check_device("reduce_", shard, own, received, partials)
    if shard.numel():
        implementation = _implementation(shard, "reduce", backend)
        implementation.reduce_(shard, own, received, partials, rank=rank, scale=scale, accumulate=accumulate)


def scalars_(
    table: Tensor,
    steps: Tensor,
    report: Tensor,
    *,
    hyper: Tensor,
    group_of_row: Tensor,
    gathered: Tensor,
    limits: Tensor,
    backend: config.Backend | None = None,
) -> None:
    """Form the scalar table and advance the steps, on the device. See `reference.scalars_`.

    Raises:
        ValueError: shapes that do not match, or tensors on several devices.
    """
    if table.shape != (len(TABLE), steps.numel()) or hyper.shape[1] != len(HYPER):
        raise ValueError(
            f"scalars_: table {tuple(table.shape)}, hyper {tuple(hyper.shape)} for {steps.numel()} parameters"
        )
    for name, tensor in (("table", table), ("steps", steps), ("hyper", hyper), ("gathered", gathered)):
        if not tensor.is_contiguous():
            raise ValueError(f"scalars_: {name} has strides {tensor.stride()}; it must be contiguous")
    _check_device("scalars_", table, steps, report, hyper, group_of_row, gathered, limits)
    _implementation(table, "scalars", backend).scalars_(
        table, steps, report, hyper=hyper, group_of_row=group_of_row, gathered=gathered, limits=limits
    )


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
    backend: config.Backend | None = None,
) -> None:
    """Update one shard in one pass. See `reference.adamw_`.

    Raises:
        ValueError: sizes that do not match, tensors on several devices, a 16-bit parameter without a master.
        TypeError: a master or moment that is not fp32.
    """
    weights = param if master is None else master
    _check_flat("adamw_", param, weights, exp_avg, exp_avg_sq, grad)
    if not weights.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32:
        raise TypeError(
            f"adamw_: weights {weights.dtype} and moments {exp_avg.dtype}, {exp_avg_sq.dtype} must be "
            "fp32; give a master"
        )
    if rows.block_row.numel() * BLOCK != param.numel():
        raise ValueError(
            f"adamw_: {rows.block_row.numel()} blocks of {BLOCK} do not make {param.numel()} elements; pad the shard"
        )
    _check_float("adamw_", param, grad)
    _check_device("adamw_", param, weights, exp_avg, exp_avg_sq, grad, table, rows.block_row)
    if param.numel():
        implementation = _implementation(param, "adamw", backend)
        implementation.adamw_(param, master, exp_avg, exp_avg_sq, grad, table=table, rows=rows, l2=l2)


def cast_(out: Tensor, source: Tensor, *, backend: config.Backend | None = None) -> None:
    """Copy a flat tensor into another precision, to nearest even. See `reference.cast_`.

    Raises:
        ValueError: sizes or devices differ.
        TypeError: a dtype that is not fp32, bf16 or fp16.
    """
    _check_flat("cast_", out, source)
    _check_float("cast_", out, source)
    _check_device("cast_", out, source)
    if out.numel():
        _implementation(out, "cast", backend).cast_(out, source)


def _implementation(tensor: Tensor, name: str, backend: config.Backend | None) -> ModuleType:
    """Return the module whose functions will run: a Triton kernel's launcher or the reference."""
    choice = backend or config.backend()
    if choice == "auto":
        choice = "triton" if tensor.is_cuda else "native"
    if choice == "native":
        if tensor.is_cuda:
            raise ValueError(
                f"{name}: backend 'native' was given a tensor on {tensor.device}; it runs on the CPU: use 'triton'"
            )
        return native if name in ("adamw", "reduce") and native.available() else reference
    if choice == "torch":
        return reference
    # Importing Triton takes a second: only where it is used.
    from .kernels import adamw, cast, launch, pack, reduce, scalars

    if not tensor.is_cuda and not launch.INTERPRETED:
        raise ValueError(
            f"{name}: backend 'triton' was given a tensor on {tensor.device}; Triton runs on GPUs: "
            "use backend 'torch', or set TRITON_INTERPRET=1 before Python starts, for Triton's interpreter"
        )
    modules: dict[str, ModuleType] = {
        "adamw": adamw, "cast": cast, "pack": pack, "reduce": reduce, "scalars": scalars,
    }  # fmt: skip
    return modules.get(name, launch)


def _check_flat(name: str, *tensors: Tensor) -> None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != first.numel():
            raise ValueError(
                f"{name}: every tensor must be flat, contiguous and of {first.numel()} elements; "
                f"one has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            )


def _check_float(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name}: dtype {tensor.dtype} is not one of float32, bfloat16, float16; cast it first")


def _check_device(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ValueError(f"{name}: tensors on {tensors[0].device} and {tensor.device}; move them to one device")
