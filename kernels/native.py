"""The update and the reduction compiled for the CPU: `native.c` through the machine's C compiler, loaded with ctypes.

Compiling takes a second and happens once per machine: the library lies in the user's cache folder, under a name made of
source, compiler and processor. Without a compiler, `available()` is False and the reference runs instead. Same bits.
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
from .reference import BLOCK, RowMap

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def available() -> bool:
    """Return whether the library can be had here. The first call may compile it."""
    return _library() is not None


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
    """See the twin, `reference.adamw_`. Inactive parameters are not even read."""
    library = _library()
    if library is None or grad.dtype != torch.float32 or not _knows(library, param.dtype):
        reference.adamw_(param, master, exp_avg, exp_avg_sq, grad, table=table, rows=rows, l2=l2)
        return
    weights = param if master is None else master
    library.zerokern_adamw(
        _address(param), DTYPES[param.dtype], _address(weights), _address(exp_avg),
        _address(exp_avg_sq), _address(grad),
        _address(table), ctypes.c_int64(table.shape[1]), _address(rows.block_row),
        ctypes.c_int64(param.numel() // BLOCK), torch.get_num_threads(),
    )  # fmt: skip


def reduce_(
    shard: Tensor, own: Tensor, received: Tensor, partials: Tensor, *, rank: int, scale: float, accumulate: bool
) -> None:
    """See the twin, `reference.reduce_`."""
    library = _library()
    if library is None or shard.numel() % BLOCK or not _knows(library, own.dtype):
        reference.reduce_(shard, own, received, partials, rank=rank, scale=scale, accumulate=accumulate)
        return
    chunks = [*received[:rank].unbind(0), own, *received[rank:].unbind(0)]
    addresses = (ctypes.c_void_p * len(chunks))(*(chunk.data_ptr() for chunk in chunks))
    library.zerokern_reduce(
        _address(shard), addresses, len(chunks), DTYPES[own.dtype], _address(partials), ctypes.c_int64(shard.numel()),
        ctypes.c_float(scale), int(accumulate), torch.get_num_threads(),
    )  # fmt: skip


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _knows(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    return dtype in DTYPES and (dtype != torch.float16 or bool(library.zerokern_has_fp16()))


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library, compiled if need be, or None. If ranks compile at once, the last rename wins."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.name != "posix":
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    identity = "\n".join([SOURCE.read_text(), *FLAGS, compiler, version, platform.machine(), _processor()])
    folder = _cache_folder()
    path = folder / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / path.name
                subprocess.run(
                    [compiler, *FLAGS, "-o", fresh, SOURCE, "-lm"], check=True, capture_output=True, timeout=120
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
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zerokern"
