"""The update, the reduction and the scalar table compiled for the CPU: `native.c`
through the machine's C compiler, loaded with ctypes.

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
from .arguments import BLOCK, MASTERS, ColumnMap, Rule, Shard

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
"""`enum format` of native.c, for gradients, moments, chunks and lone parameters."""

MASTER_FORMATS = {
    form.dtype: 4 + position for position, form in enumerate(MASTERS.values()) if form
}
"""`enum format` of native.c, for weights that have a master, by its dtype."""

RULES: tuple[Rule, ...] = ("adam", "lion", "sgd")
"""In the order of `enum rule`."""


POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64


class _Moment(ctypes.Structure):
    """`struct moment`."""

    _fields_ = (("values", POINTER), ("scale", POINTER), ("format", INTEGER))


class _Update(ctypes.Structure):
    """`struct update`."""

    _fields_ = (
        ("param", POINTER),
        ("master", POINTER),
        ("grad", POINTER),
        ("param_format", INTEGER),
        ("weight_format", INTEGER),
        ("grad_format", INTEGER),
        ("moments", _Moment * 3),
        ("table", POINTER),
        ("keys", POINTER),
        ("origin", POINTER),
        ("block_column", POINTER),
        ("columns", INTEGER),
        ("blocks", INTEGER),
        ("rule", INTEGER),
        ("l2", INTEGER),
        ("threads", INTEGER),
    )


class _Scalars(ctypes.Structure):
    """`struct scalars`."""

    _fields_ = (
        ("table", POINTER),
        ("keys", POINTER),
        ("steps", POINTER),
        ("report", POINTER),
        ("hyper", POINTER),
        ("group_of_column", POINTER),
        ("seeds", POINTER),
        ("gathered", POINTER),
        ("limits", POINTER),
        ("columns", INTEGER),
        ("words", INTEGER),
        ("ranks", INTEGER),
        ("rule", INTEGER),
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
    library, param, master = _library(), shard.param, shard.master
    if library is None or _lacks(library, param.dtype, grad.dtype):
        reference.update_(
            shard, grad, rule=rule, table=table, keys=keys, columns=columns, l2=l2
        )
        return
    weight_format = FORMATS[param.dtype]
    if master is not None:
        weight_format = MASTER_FORMATS[master.dtype]
    moments = (_Moment * 3)()
    for target, moment in zip(
        moments, (shard.first, shard.second, shard.largest), strict=True
    ):
        if moment is not None:
            target.values = moment.values.data_ptr()
            target.scale = None if moment.scale is None else moment.scale.data_ptr()
            target.format = FORMATS[moment.values.dtype]
    arguments = _Update(
        param.data_ptr(),
        param.data_ptr() if master is None else master.data_ptr(),
        grad.data_ptr(),
        FORMATS[param.dtype],
        weight_format,
        FORMATS[grad.dtype],
        moments,
        table.data_ptr(),
        keys.data_ptr(),
        columns.origin.data_ptr(),
        columns.block_column.data_ptr(),
        table.shape[1],
        columns.block_column.numel(),
        RULES.index(rule),
        l2,
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
    odd = shard.numel() % BLOCK
    if library is None or odd or _lacks(library, shard.dtype, own.dtype):
        options = {"rank": rank, "scale": scale, "accumulate": accumulate}
        reference.reduce_(shard, own, received, partials, **options)  # type: ignore[arg-type]
        return
    addresses = (POINTER * (received.shape[0] + 1))()
    for index, chunk in enumerate(received.unbind(0)):
        addresses[index + (index >= rank)] = chunk.data_ptr()
    addresses[rank] = own.data_ptr()
    library.zerokern_reduce(
        POINTER(shard.data_ptr()),
        FORMATS[shard.dtype],
        addresses,
        len(addresses),
        FORMATS[own.dtype],
        POINTER(partials.data_ptr()),
        INTEGER(shard.numel()),
        ctypes.c_float(scale),
        int(accumulate),
        torch.get_num_threads(),
    )


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
    """See the twin, `reference.scalars_`."""
    library = _library()
    if library is None:
        reference.scalars_(
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
        return
    arguments = _Scalars(
        table.data_ptr(),
        keys.data_ptr(),
        steps.data_ptr(),
        report.data_ptr(),
        hyper.data_ptr(),
        group_of_column.data_ptr(),
        seeds.data_ptr(),
        gathered.data_ptr(),
        limits.data_ptr(),
        steps.numel(),
        gathered.shape[1],
        gathered.shape[0],
        RULES.index(rule),
    )
    library.zerokern_scalars(ctypes.byref(arguments))


def _lacks(library: ctypes.CDLL, *dtypes: torch.dtype) -> bool:
    """Return whether the library lacks a floating format: fp16 needs a compiler that
    knows it."""
    return torch.float16 in dtypes and not library.zerokern_has_fp16()


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
