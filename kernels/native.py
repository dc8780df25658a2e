"""The update and the reduction compiled for the CPU: `native.c` through the machine's C
compiler, loaded with ctypes.

Compiling takes three seconds and happens once per machine: the library lies in the
user's cache folder, under a name made of source, compiler and processor. Without a
compiler, `available()` is False and the reference runs instead, with the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from . import reference
from .arguments import BLOCK, MASTERS, ColumnMap, Moment, Rule, Shard

SOURCE = Path(__file__).with_name("native.c")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-fopenmp",
)
"""No contraction, for the bits. What is off besides changes none: error numbers and
exception flags, which nobody reads, keep loops scalar. Vectors of floats are also read
as words."""

FORMATS: dict[torch.dtype | None, int] = {
    None: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.uint8: 7,
}
"""What `enum format` in native.c calls the dtypes of gradients, moments, chunks and
lone parameters."""

MASTER_FORMATS = {
    form.dtype: 4 + position for position, form in enumerate(MASTERS.values()) if form
}
"""What it calls weights that have a master, by the master's dtype."""

RULES: tuple[Rule, ...] = ("adam", "lion", "sgd")
"""In the order of `enum rule`."""


class _Moment(ctypes.Structure):
    """`struct moment`."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("format", ctypes.c_int64),
    )


class _Update(ctypes.Structure):
    """`struct update`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "master", "grad")),
        *(
            (name, ctypes.c_int64)
            for name in ("param_format", "weight_format", "grad_format")
        ),
        *((name, _Moment) for name in ("first", "second", "largest")),
        *(
            (name, ctypes.c_void_p)
            for name in ("table", "keys", "origin", "block_column")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("columns", "blocks", "rule", "l2", "threads")
        ),
    )


def available() -> bool:
    """Return whether the library can be had here. The first call may compile it."""
    return _library() is not None


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
    """See the twin, `reference.update_`. Inactive parameters are not even read."""
    library = _library()
    if library is None or not _knows(library, shard.param.dtype, grad.dtype):
        reference.update_(
            shard, grad, rule=rule, table=table, keys=keys, columns=columns, l2=l2
        )
        return
    weights = (
        FORMATS[shard.param.dtype]
        if shard.master is None
        else MASTER_FORMATS[shard.master.dtype]
    )
    arguments = _Update(
        _address(shard.param),
        _address(shard.param if shard.master is None else shard.master),
        _address(grad),
        FORMATS[shard.param.dtype],
        weights,
        FORMATS[grad.dtype],
        *(_moment(moment) for moment in shard.moments),
        _address(table),
        _address(keys),
        _address(columns.origin),
        _address(columns.block_column),
        table.shape[1],
        columns.block_column.numel(),
        RULES.index(rule),
        int(l2),
        torch.get_num_threads(),
    )
    library.zerokern_update(ctypes.byref(arguments))


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
    """See the twin, `reference.reduce_`."""
    library = _library()
    if (
        library is None
        or shard.numel() % BLOCK
        or not _knows(library, shard.dtype, own.dtype)
    ):
        reference.reduce_(
            shard,
            own,
            received,
            partials,
            rank=rank,
            scale=scale,
            accumulate=accumulate,
        )
        return
    chunks = [*received[:rank].unbind(0), own, *received[rank:].unbind(0)]
    addresses = (ctypes.c_void_p * len(chunks))(*(chunk.data_ptr() for chunk in chunks))
    library.zerokern_reduce(
        _address(shard),
        FORMATS[shard.dtype],
        addresses,
        len(chunks),
        FORMATS[own.dtype],
        _address(partials),
        ctypes.c_int64(shard.numel()),
        ctypes.c_float(scale),
        int(accumulate),
        torch.get_num_threads(),
    )


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _moment(moment: Moment | None) -> _Moment:
    if moment is None:
        return _Moment(None, None, FORMATS[None])
    return _Moment(
        _address(moment.values), _address(moment.scale), FORMATS[moment.values.dtype]
    )


def _knows(library: ctypes.CDLL, *dtypes: torch.dtype) -> bool:
    """Return whether the library has these floating formats: fp16 needs a compiler that
    knows it."""
    return torch.float16 not in dtypes or bool(library.zerokern_has_fp16())


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library, compiled if need be, or None. If ranks compile at once, the
    last rename wins."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.name != "posix":
        return None
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    sources = [path.read_text() for path in (SOURCE, SOURCE.with_name("vectors.h"))]
    identity = "\n".join(
        [*sources, *FLAGS, compiler, version, platform.machine(), _processor()]
    )
    folder = _cache_folder()
    path = folder / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / path.name
                subprocess.run(
                    [compiler, *FLAGS, "-o", fresh, SOURCE, "-lm"],
                    check=True,
                    capture_output=True,
                    timeout=120,
                )
                fresh.replace(path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    """Return what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted(
            {
                line
                for line in lines
                if line.startswith(("model name", "flags", "Features"))
            }
        )
    )


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zerokern"
