"""Kernel cards: what each kernel compiles to on each GPU, read from the machine code. Needs no GPU.

    python -m bench.cards           a table
    python -m bench.cards --json    the same for programs

Triton compiles for any target on any machine, and its wheel ships NVIDIA's disassembler. Bytes per element come from
the loads and stores of Triton's GPU dialect, their widths from the SASS, contraction from the PTX (SASS has FFMA inside
the expansions of correctly rounded quotients and roots).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zerokern.kernels import adamw, cast, launch, pack, reduce, scalars
from zerokern.kernels.reference import BLOCK, HYPER, PARTIAL, STEP_BITS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WORLD = 4
"""Ranks for which the bytes of the reduction are counted."""

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "f32": 4, "f16": 2, "f64": 8, "i64": 8, "i32": 4}
TL_DTYPE = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


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
    sizes: dict[str, int]
    """What the words of the docstring's byte counts stand for."""


@dataclasses.dataclass
class Card:
    """What a recipe compiles to on a target."""

    recipe: str
    target: str
    registers: int
    spill_bytes: int
    loads: dict[str, int]
    """Global loads by width in bits, as they stand in the code. Loops may be unrolled."""
    stores: dict[str, int]
    read_bytes: float | None
    """Per element, counted. None where nothing is stated per element."""
    write_bytes: float | None
    stated_read_bytes: float | None
    stated_write_bytes: float | None
    threads: int
    tile: int
    contractions: int | None
    """Fused multiply-adds in the PTX. None on AMD: its assembly cannot tell them from expanded quotients."""
    approximations: int | None
    """Flushed subnormals, approximate quotients and roots in the PTX."""
    i32_products: int
    """Products of 32-bit integers. An address may come of any of them."""
    specialised: list[str]
    """Integer arguments for whose values Triton would compile again."""


def recipes() -> Iterator[Recipe]:
    """Yield every recipe the library launches."""
    for param, grad in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16")):
        yield _adamw(param, grad)
    yield _adamw("fp32", "fp32", l2=True)
    for wire, accumulate in (("fp32", False), ("bf16", False), ("fp16", False), ("fp32", True), ("bf16", True)):
        yield _reduce(wire, accumulate)
    for source, destination, scaled in (
        ("bf16", "bf16", False), ("fp32", "fp32", False), ("bf16", "fp32", False), ("fp32", "bf16", True)
    ):  # fmt: skip
        yield _pack(source, destination, scaled)
    for source, out in (("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16")):
        types = {"out_ptr": f"*{out}", "source_ptr": f"*{source}", "numel": "i32"}
        sizes = {"source": ITEMSIZE[source], "out": ITEMSIZE[out]}
        yield Recipe(f"cast {source} -> {out}", cast.cast_kernel, types, {"TILE": cast.TILE}, 4, cast.TILE, sizes)
    pointers = {"table": "fp32", "steps": "i64", "report": "fp64", "hyper": "fp64", "group": "i64"}
    pointers |= {"gathered": "i64", "limits": "fp64"}
    types = {f"{name}_ptr": f"*{dtype}" for name, dtype in pointers.items()}
    types |= dict.fromkeys(("num_rows", "num_words", "world"), "i32")
    constexprs = {"HYPER": len(HYPER), "BITS": STEP_BITS, "TILE": scalars.TILE}
    yield Recipe("scalars", scalars.scalars_kernel, types, constexprs, 4, scalars.TILE, {})


def _adamw(param: str, grad: str, l2: bool = False) -> Recipe:
    master = param != "fp32"
    types = {"param_ptr": f"*{param}", "weight_ptr": "*fp32", "exp_avg_ptr": "*fp32", "exp_avg_sq_ptr": "*fp32"}
    types |= {"grad_ptr": f"*{grad}", "table_ptr": "*fp32", "block_row_ptr": "*i32"}
    types |= dict.fromkeys(("num_blocks", "num_rows"), "i32")
    constexprs = {"HAS_MASTER": master, "L2": l2, "ROWS": adamw.ROWS, "BLOCK": BLOCK}
    sizes = {"grad": ITEMSIZE[grad], "param": ITEMSIZE[param] if master else 0}
    name = f"adamw {param}{' + fp32 master' if master else ''}, grad {grad}{', l2' if l2 else ''}"
    return Recipe(name, adamw.adamw_kernel, types, constexprs, 4, adamw.ROWS * BLOCK, sizes)


def _reduce(wire: str, accumulate: bool) -> Recipe:
    types = {"shard_ptr": "*fp32", "own_ptr": f"*{wire}", "received_ptr": f"*{wire}", "partials_ptr": "*fp64"}
    types |= dict.fromkeys(("numel", "received_stride", "rank", "num_received"), "i32") | {"scale": "fp32"}
    constexprs = {"ACCUMULATE": accumulate, "WHOLE_BLOCKS": True, "BLOCK": BLOCK, "PARTIAL": PARTIAL}
    sizes = {"W": WORLD, "wire": ITEMSIZE[wire], "shard": 4 if accumulate else 0}
    name = f"reduce {wire}{', accumulate' if accumulate else ''}"
    return Recipe(name, reduce.reduce_kernel, types, constexprs, 8, PARTIAL, sizes)


def _pack(source: str, destination: str, scaled: bool) -> Recipe:
    constexprs = {"SOURCE": TL_DTYPE[source], "DESTINATION": TL_DTYPE[destination], "SCALED": scaled, "ALIGNED": True}
    constexprs |= {"TILE": cast.TILE}
    types = {"table_ptr": "*i64", "num_tensors": "i32", "scale": "fp32"}
    sizes = {"source": ITEMSIZE[source], "destination": ITEMSIZE[destination]}
    name = f"pack {source} -> {destination}{', scaled' if scaled else ''}"
    return Recipe(name, pack.pack_kernel, types, constexprs, 4, cast.TILE, sizes)


def compile_card(recipe: Recipe, target: str) -> Card:
    """Compile a recipe for a target, with the hints that its launcher gives, and read the card off the code."""
    names = recipe.kernel.arg_names
    signature = {name: recipe.types.get(name, "constexpr") for name in names}
    hints = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    constexprs = {(names.index(name),): value for name, value in recipe.constexprs.items()}
    compiled = triton.compile(
        ASTSource(fn=recipe.kernel, signature=signature, constexprs=constexprs, attrs=hints),
        target=TARGETS[target],
        options={"enable_fp_fusion": False, "num_warps": recipe.warps},
    )
    ir = compiled.asm["ttgir"]
    stated = [_stated(recipe, section) for section in ("Reads", "Writes")]
    if target.startswith("sm"):
        code = _nvidia(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        code["contractions"] = len(re.findall(r"\bfma\.", ptx))
        code["approximations"] = len(re.findall(r"\.ftz|\.approx|div\.full", ptx))
    else:
        code = _amd(compiled.asm["amdgcn"])
    return Card(
        recipe=recipe.name,
        target=target,
        read_bytes=_counted(ir, "tt.load", recipe.tile) if stated[0] is not None else None,
        write_bytes=_counted(ir, "tt.store", recipe.tile) if stated[1] is not None else None,
        stated_read_bytes=stated[0],
        stated_write_bytes=stated[1],
        threads=recipe.warps * TARGETS[target].warp_size,
        tile=recipe.tile,
        i32_products=len(re.findall(r"arith\.muli .*: (?:tensor<[\dx]*xi32\b|i32\b)", compiled.asm["ttir"])),
        specialised=[
            parameter.name
            for parameter in recipe.kernel.params
            if recipe.types.get(parameter.name, "*").startswith("i") and not parameter.do_not_specialize
        ],
        **code,
    )


def _stated(recipe: Recipe, section: str) -> float | None:
    """Return the bytes per element that a section of the kernel's docstring states."""
    found = re.search(rf"{section}:(?:(?!\n    \w+:)[\s\S])*?bytes per element: ([^\n]+)", recipe.kernel.__doc__)
    return float(eval(found[1], {"__builtins__": {}}, recipe.sizes)) if found else None


def _counted(ir: str, operation: str, tile: int) -> float:
    """Return the bytes per element that whole-tile loads or stores move.

    Loops only run over ranks: the two of the reduction run W - 1 times together, so each counts for half of that.
    """
    total = 0.0
    loop_indents: list[int] = []
    for line in ir.splitlines():
        indent = len(line) - len(line.lstrip())
        if loop_indents and indent == loop_indents[-1] and re.match(r" *\}(?! do)", line):
            loop_indents.pop()
        if "scf.while" in line:
            loop_indents.append(indent)
        found = re.search(rf"{re.escape(operation)} .*: tensor<([\dx]+)x!tt.ptr<(\w+)>", line)
        if found:
            numel = 1
            for length in found[1].split("x"):
                numel *= int(length)
            if numel == tile:
                total += ITEMSIZE[found[2]] * ((WORLD - 1) / 2 if loop_indents else 1)
    return total


def _nvidia(cubin: bytes) -> dict[str, Any]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", "-sass", path], capture_output=True, text=True, check=True)
    sass = text.stdout + text.stderr
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", sass))
    return {
        "registers": int(usage["REG"]),
        # Spills go to the stack, and the instructions that reach it are LDL and STL.
        "spill_bytes": int(usage["STACK"]) + int(usage["LOCAL"]) + len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "loads": _widths(re.findall(r"\bLDG((?:\.\w+)*)", sass)),
        "stores": _widths(re.findall(r"\bSTG((?:\.\w+)*)", sass)),
    }


def _widths(suffixes: list[str]) -> dict[str, int]:
    bits = {"256": "256", "128": "128", "64": "64", "U16": "16", "S16": "16", "U8": "8", "S8": "8"}
    return dict(Counter(next((bits[s] for s in suffix.split(".") if s in bits), "32") for suffix in suffixes))


def _amd(assembly: str) -> dict[str, Any]:
    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", assembly)[1])  # type: ignore[index]

    def widths(kind: str) -> dict[str, int]:
        bits = {"dwordx4": "128", "dwordx2": "64", "dword": "32", "ushort": "16", "short": "16", "short_d16": "16"}
        found = re.findall(rf"\b(?:global|buffer|flat)_{kind}_(\w+)", assembly)
        return dict(Counter(bits.get(suffix, suffix) for suffix in found))

    return {
        "registers": number("vgpr_count"),
        "spill_bytes": number("private_segment_fixed_size") + 4 * number("vgpr_spill_count"),
        "loads": widths("load"),
        "stores": widths("store"),
        "contractions": None,
        "approximations": None,
    }


def main() -> None:
    """Print the cards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this target; may be repeated")
    arguments = parser.parse_args()
    if launch.INTERPRETED:
        raise SystemExit("bench.cards: TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")
    cards = [compile_card(recipe, target) for target in arguments.target or TARGETS for recipe in recipes()]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(card) for card in cards]))
        return
    print("| kernel | target | registers | spills | bytes per element read + written | loads | stores |")
    print("| --- " * 7 + "|")
    for card in cards:
        moved = "" if card.read_bytes is None else f"{card.read_bytes:g} + {card.write_bytes:g}"
        loads, stores = (", ".join(f"{n} x {bits}" for bits, n in w.items()) for w in (card.loads, card.stores))
        row = (card.recipe, card.target, card.registers, card.spill_bytes, moved, loads, stores)
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
