"""Every way in which the library launches its kernels, and the fewest bytes that each
way must move.

Update recipes are named "update rule param [+ master] [+ moments], grad dtype[,
options]"; without "+ moments" these are fp32, or there are none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl

from zerokern.kernels import cast, pack, reduce, scalars, update
from zerokern.kernels.arguments import (
    BLOCK,
    HYPER,
    MASTERS,
    MOMENTS,
    PARTIAL,
    STEP_BITS,
)
from zerokern.kernels.codecs import E3M4, UE3M5

WORLD = 4
"""Ranks for which the bytes and the instructions of the reduction are counted."""

ITEMSIZE = {
    "fp64": 8,
    "i64": 8,
    "fp32": 4,
    "i32": 4,
    "bf16": 2,
    "fp16": 2,
    "i16": 2,
    "i8": 1,
    "u8": 1,
}
TL_DTYPE = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
"""Triton's names of the dtypes that states are stored in."""
MASTER_DTYPE = {name: TYPES[form.dtype] for name, form in MASTERS.items() if form}
MOMENT_DTYPE = {name: TYPES[form.dtype] for name, form in MOMENTS.items()}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to compile a kernel: as its launcher would for tensors on 16 bytes."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Runtime arguments."""
    constexprs: dict[str, Any]
    warps: int
    tile: int
    """Elements per program."""
    sizes: dict[str, float]
    """What the words of the docstring's byte counts stand for."""
    floor: float | None
    """Bytes per element, read and written, that no kernel for this recipe can do
    without; added up by hand."""


def recipes() -> Iterator[Recipe]:
    """Yield every recipe."""
    yield from _updates()
    for wire, shard, accumulate, floor in (
        ("fp32", "fp32", False, 20),
        ("bf16", "fp32", False, 12),
        ("fp16", "fp32", False, 12),
        ("bf16", "bf16", False, 10),
        ("fp32", "fp32", True, 24),
        ("bf16", "fp32", True, 16),
        ("bf16", "bf16", True, 12),
    ):
        yield _reduce(wire, shard, accumulate, floor)
    for source, destination, scaled, floor in (
        ("bf16", "bf16", False, 4),
        ("fp32", "fp32", False, 8),
        ("bf16", "fp32", False, 6),
        ("fp32", "bf16", True, 6),
    ):
        yield _pack(source, destination, scaled, floor)
    for source, out, floor in (
        ("fp32", "bf16", 6),
        ("bf16", "fp32", 6),
        ("fp32", "fp16", 6),
    ):
        types = {"out_ptr": f"*{out}", "source_ptr": f"*{source}", "numel": "i32"}
        sizes = {"source": ITEMSIZE[source], "out": ITEMSIZE[out]}
        name = f"cast {source} -> {out}"
        yield Recipe(
            name,
            cast.cast_kernel,
            types,
            {"TILE": cast.TILE},
            4,
            cast.TILE,
            sizes,
            floor,
        )
    for rule in ("adam", "lion", "sgd"):
        yield _scalars(rule)


def _updates() -> Iterator[Recipe]:
    scale = 2 / BLOCK  # one scale per block, read and written
    yield _update("fp32", grad="fp32", floor=28)
    yield _update("fp32", floor=26)
    yield _update("bf16", "fp32", floor=30)
    yield _update("bf16", "fp32", grad="fp32", floor=32)
    yield _update("fp16", "fp32", grad="fp16", floor=30)
    yield _update("bf16", "split32", floor=26)
    yield _update("bf16", "split32", "bf16", floor=18)
    yield _update("bf16", "split32", "8bit", floor=14 + 2 * scale)
    yield _update("bf16", "split24", "8bit", floor=12 + 2 * scale)
    yield _update("bf16", None, "bf16", floor=14)
    yield _update("bf16", None, "8bit", floor=10 + 2 * scale)
    yield _update("fp32", None, "bf16", grad="fp32", floor=20)
    yield _update("fp32", None, "8bit", grad="fp32", floor=16 + 2 * scale)
    yield _update("fp32", grad="fp32", amsgrad=True, floor=36)
    yield _update("bf16", "split32", "bf16", amsgrad=True, floor=22)
    yield _update("fp32", grad="fp32", l2=True, floor=28)
    yield _update("bf16", "split32", "8bit", l2=True, floor=14 + 2 * scale)
    yield _update("fp32", rule="lion", grad="fp32", floor=20)
    yield _update("bf16", "split32", "8bit", rule="lion", floor=12 + scale)
    yield _update("bf16", None, "8bit", rule="lion", floor=8 + scale)
    yield _update("fp32", rule="sgd", grad="fp32", floor=20)
    yield _update("bf16", "split32", "bf16", rule="sgd", floor=14)
    yield _update("fp32", None, None, rule="sgd", grad="fp32", floor=12)


def _update(
    param: str,
    master: str | None = None,
    moments: str | None = "fp32",
    *,
    rule: str = "adam",
    grad: str = "bf16",
    amsgrad: bool = False,
    l2: bool = False,
    floor: float,
) -> Recipe:
    """Return a recipe of the update. As in `update.update_`, the parameter stands in
    for tensors that there are not."""
    constexprs = {
        "RULE": rule,
        "HAS_MOMENTUM": moments is not None,
        "AMSGRAD": amsgrad,
        "HAS_L2": l2,
        "BLOCKS": update.BLOCKS,
        "BLOCK": BLOCK,
        "M_MANTISSA": E3M4.mantissa,
        "M_FLOOR": E3M4.floor,
        "V_MANTISSA": UE3M5.mantissa,
        "V_FLOOR": UE3M5.floor,
    }
    options = f"{', amsgrad' if amsgrad else ''}{', l2' if l2 else ''}"
    return Recipe(
        f"update {rule} {_state(param, master, moments)}, grad {grad}{options}",
        update.update_kernel,
        _update_types(param, master, moments, rule, grad, amsgrad),
        constexprs,
        4,
        update.BLOCKS * BLOCK,
        _update_sizes(param, master, moments, rule, grad, amsgrad),
        floor,
    )


def _state(param: str, master: str | None, moments: str | None) -> str:
    """Return the name of a parameter's formats."""
    parts = [param]
    if master:
        parts.append(f"{master} master")
    if moments != "fp32":
        parts.append(f"{moments or 'no'} moments")
    return " + ".join(parts)


def _update_types(
    param: str,
    master: str | None,
    moments: str | None,
    rule: str,
    grad: str,
    amsgrad: bool,
) -> dict[str, str]:
    first = MOMENT_DTYPE[moments] if moments else param
    second = first if rule == "adam" else param
    dtypes = {
        "param_ptr": param,
        "master_ptr": MASTER_DTYPE[master] if master else param,
        "first_ptr": first,
        "second_ptr": second,
        "largest_ptr": first if amsgrad else param,
        "first_scale_ptr": "u8" if first == "u8" else param,
        "second_scale_ptr": "u8" if second == "u8" else param,
        "grad_ptr": grad,
        "table_ptr": "fp32",
        "keys_ptr": "i64",
        "block_column_ptr": "i32",
        "origin_ptr": "i64",
    }
    types = {name: f"*{dtype}" for name, dtype in dtypes.items()}
    return {**types, "num_blocks": "i32", "num_columns": "i32"}


def _update_sizes(
    param: str,
    master: str | None,
    moments: str | None,
    rule: str,
    grad: str,
    amsgrad: bool,
) -> dict[str, float]:
    kept = ITEMSIZE[MASTER_DTYPE[master]] if master else 0
    sizes: dict[str, float] = {
        "grad": ITEMSIZE[grad],
        "param": ITEMSIZE[param],
        "master": kept,
        "weights": ITEMSIZE[param] + kept,
        "moments": 0,
    }
    if moments is not None:
        moment = ITEMSIZE[MOMENT_DTYPE[moments]]
        scale = 1 / BLOCK if moments == "8bit" else 0
        number = {"adam": 2, "lion": 1, "sgd": 1}[rule] + amsgrad
        sizes["moments"] = (moment + scale) * number
    return sizes


def _reduce(wire: str, shard: str, accumulate: bool, floor: float) -> Recipe:
    types = {
        "shard_ptr": f"*{shard}",
        "own_ptr": f"*{wire}",
        "received_ptr": f"*{wire}",
        "partials_ptr": "*fp64",
    }
    types |= dict.fromkeys(
        ("numel", "received_stride", "rank", "num_received"), "i32"
    ) | {"scale": "fp32"}
    constexprs = {
        "ACCUMULATE": accumulate,
        "WHOLE_BLOCKS": True,
        "BLOCK": BLOCK,
        "PARTIAL": PARTIAL,
    }
    out = ITEMSIZE[shard]
    sizes = {
        "W": WORLD,
        "wire": ITEMSIZE[wire],
        "shard": out if accumulate else 0,
        "out": out,
    }
    name = f"reduce {wire} -> {shard}{', accumulate' if accumulate else ''}"
    return Recipe(
        name, reduce.reduce_kernel, types, constexprs, 8, PARTIAL, sizes, floor
    )


def _pack(source: str, destination: str, scaled: bool, floor: float) -> Recipe:
    constexprs = {
        "SOURCE": TL_DTYPE[source],
        "DESTINATION": TL_DTYPE[destination],
        "SCALED": scaled,
        "ALIGNED": True,
    }
    constexprs |= {"TILE": cast.TILE}
    types = {"table_ptr": "*i64", "num_tensors": "i32", "scale": "fp32"}
    sizes = {"source": ITEMSIZE[source], "destination": ITEMSIZE[destination]}
    name = f"pack {source} -> {destination}{', scaled' if scaled else ''}"
    return Recipe(name, pack.pack_kernel, types, constexprs, 4, cast.TILE, sizes, floor)


def _scalars(rule: str) -> Recipe:
    pointers = {
        "table": "fp32",
        "keys": "i64",
        "steps": "i64",
        "report": "fp64",
        "hyper": "fp64",
        "group": "i64",
    }
    pointers |= {"seeds": "i64", "gathered": "i64", "limits": "fp64"}
    types = {f"{name}_ptr": f"*{dtype}" for name, dtype in pointers.items()}
    types |= dict.fromkeys(("num_columns", "num_words", "world"), "i32")
    constexprs = {
        "RULE": rule,
        "NUM_HYPER": len(HYPER),
        "BITS": STEP_BITS,
        "TILE": scalars.TILE,
    }
    return Recipe(
        f"scalars {rule}",
        scalars.scalars_kernel,
        types,
        constexprs,
        4,
        scalars.TILE,
        {},
        None,
    )
