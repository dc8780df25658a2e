"""Many tensors -> one bucket in one launch, and the way back. Letters: T tensors.

The kernel finds its tensors through a table of addresses in device memory, so their
number costs no launches, and either side may be the bucket.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .cast import TILE, copy_tile
from .formats import TRITON_DTYPE
from .launch import INTERPRETED, aligned, cdiv, launch

Entry = tuple[int, int, int]
"""One tensor of a launch: source address, destination address, elements."""

# Tables that a CUDA graph reads again at every replay. A graph cannot say when it dies.
_CAPTURED: list[Tensor] = []


@triton.jit(do_not_specialize=["num_tensors"])
def pack_kernel(
    table_ptr,
    num_tensors,
    scale,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy one tile of one tensor.

    Maths:      destination = cast(fp32(source) * scale)
    Grid:       (sum of cdiv(elements, TILE) over the tensors,); a program owns one tile
                of one tensor.
    Reads:      source, any number of tensors
                bytes per element: source
                table int64 [4 * T + tiles]: of each tensor the source address,
                destination address, elements and first tile; then the tensor of each
                tile. 40 bytes per program.
    Writes:     destination, one slot per tensor
                bytes per element: destination
    Computes:   fp32; one rounding to nearest even, at the store. Same dtype and no
                scale: the bits as they are.
    Masks:      nothing beyond a tensor's last element is read or written; padding
                between slots stays as it was.
    Twin:       reference.pack_
    """
    tile = tl.program_id(0).to(tl.int64)
    record_ptr = (
        table_ptr + tl.load(table_ptr + num_tensors.to(tl.int64) * 4 + tile) * 4
    )
    source_ptr = tl.load(record_ptr).to(tl.pointer_type(SOURCE))
    destination_ptr = tl.load(record_ptr + 1).to(tl.pointer_type(DESTINATION))
    if ALIGNED:
        source_ptr = tl.multiple_of(source_ptr, 16)
        destination_ptr = tl.multiple_of(destination_ptr, 16)
    start = (tile - tl.load(record_ptr + 3)) * TILE
    copy_tile(
        source_ptr, destination_ptr, start, tl.load(record_ptr + 2), scale, SCALED, TILE
    )


def pack_(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], scale: float = 1.0
) -> None:
    """`reference.pack_` in one launch on the current stream per source and destination
    dtype. No host synchronisation.

    Pairs with an address that is not on 16 bytes go into a launch of their own, without
    128-bit accesses. A source whose strides differ from its destination's is first
    copied into a tensor that has them. torch copies what the table cannot express:
    destinations that are not dense, and dtypes other than fp32, bf16 and fp16.

    Under CUDA graph capture the upload of the table is captured too, and its memory is
    kept as long as the process.
    """
    launches: defaultdict[tuple[torch.dtype, torch.dtype, bool], list[Entry]] = (
        defaultdict(list)
    )
    relaid = []  # holds these tensors' memory until the launch is queued
    for destination, source in zip(destinations, sources, strict=True):
        if not destination.numel():
            continue
        if not _tabulable(destination, source):
            reference.pack_([destination], [source], scale)
            continue
        if not _same_layout(destination, source):
            source = torch.empty_strided(
                destination.shape,
                destination.stride(),
                dtype=source.dtype,
                device=source.device,
            ).copy_(source)
            relaid.append(source)
        key = (
            source.dtype,
            destination.dtype,
            aligned(source) and aligned(destination),
        )
        launches[key].append(
            (source.data_ptr(), destination.data_ptr(), destination.numel())
        )
    for (source_dtype, destination_dtype, on_16_bytes), entries in launches.items():
        device = destinations[0].device
        table = _uploaded(device, tuple(entries))
        launch(
            pack_kernel,
            table.numel() - 4 * len(entries),
            device,
            table,
            len(entries),
            scale,
            SOURCE=TRITON_DTYPE[source_dtype],
            DESTINATION=TRITON_DTYPE[destination_dtype],
            SCALED=scale != 1.0,
            ALIGNED=on_16_bytes,
            TILE=TILE,
            num_warps=4,
        )


def _tabulable(destination: Tensor, source: Tensor) -> bool:
    if (
        destination.dtype not in TRITON_DTYPE
        or source.dtype not in TRITON_DTYPE
        or (INTERPRETED and source.is_cuda)
    ):
        return False
    return destination.is_contiguous() or _is_dense(destination)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, in some order of the
    dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _same_layout(destination: Tensor, source: Tensor) -> bool:
    """Return whether element i of memory is the same element of both. A dimension of
    length 1 has no say."""
    if destination.stride() == source.stride():
        return True
    strides = zip(destination.stride(), source.stride(), destination.shape, strict=True)
    return all(a == b for a, b, length in strides if length > 1)


def _uploaded(device: torch.device, entries: tuple[Entry, ...]) -> Tensor:
    """Return the table on the device. Gradients tend to come back at the same
    addresses: then an old upload serves."""
    if device.type != "cuda":
        return _table(entries)
    stream = torch.cuda.current_stream(device)
    if torch.cuda.is_current_stream_capturing():
        pinned = _table(entries).pin_memory()
        table = pinned.to(device, non_blocking=True)
        _CAPTURED.extend((pinned, table))
        return table
    return _upload(device, stream.cuda_stream, entries)


@functools.lru_cache(maxsize=256)
def _upload(device: torch.device, stream: int, entries: tuple[Entry, ...]) -> Tensor:
    """Copy a table to the device. `stream` is in the key: only there is the copy known
    to come before the launch."""
    return _table(entries).pin_memory().to(device, non_blocking=True)


def _table(entries: tuple[Entry, ...]) -> Tensor:
    """Return int64 [4 * T + tiles]: the records as `pack_kernel` reads them, then the
    tensor of each tile."""
    tiles = [cdiv(numel, TILE) for _, _, numel in entries]
    records: list[int] = []
    first = 0
    for entry, count in zip(entries, tiles, strict=True):
        records += (*entry, first)
        first += count
    # The user's default device may be another one.
    numbers = torch.arange(len(entries), device="cpu")
    times = torch.tensor(tiles, device="cpu")
    tensor_of_tile = torch.repeat_interleave(numbers, times, output_size=first)
    return torch.cat((torch.tensor(records, device="cpu"), tensor_of_tile))
