"""Kernel cards: what each kernel compiles to on each GPU, read from the machine code.
Needs no GPU.

    python -m bench.cards                           a table
    python -m bench.cards --json > FILE             the same for programs
    python -m bench.cards --write FILE [FILE ...]   bench/cards.md, from such files of
                                                    one or more Tritons

Triton compiles for any target on any machine, and its wheel ships NVIDIA's
disassembler. Bytes per element come from the loads and stores of Triton's GPU dialect,
products of 32-bit integers from its first dialect, widths and numbers of instructions
from the machine code, contraction from the PTX or LLVM IR (machine code has FMA inside
the expansions of correctly rounded quotients and roots).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zerokern.kernels import launch
from zerokern.kernels.arguments import BLOCK

from . import cards_ir, cards_table, sass
from .cards_recipes import WORLD, Recipe, recipes

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
PAGE = Path(__file__).parent / "cards.md"


@dataclasses.dataclass(frozen=True)
class Machine:
    """The public numbers of a GPU that bound how fast a kernel can be."""

    name: str
    multiprocessors: int
    gigahertz: float
    terabytes: float
    """Per second, of memory."""

    @property
    def instructions(self) -> float:
        """Instructions of single lanes per second: four schedulers a multiprocessor,
        each one warp instruction a cycle (CUDA C++ Programming Guide, "Compute
        Capabilities": 8.0, 9.0 and 10.0).
        """
        return self.multiprocessors * 4 * 32 * self.gigahertz * 1e9


# From memory of the vendors' papers; no link was opened for this.
# A100: "NVIDIA A100 Tensor Core GPU Architecture" (2020): 108 SMs, boost clock
#   1,410 MHz; data sheet of the 40 GB model: 1,555 GB/s.
# H100: "NVIDIA H100 Tensor Core GPU Architecture" (2022): 132 SMs (SXM5); data sheet:
#   3.35 TB/s. 1.755 GHz is the boost clock of the PCIe card and stands for a loaded SXM
#   one, whose peak of 67 fp32 TFLOPS means 1.98 GHz.
# B200: data sheet of HGX and DGX B200: 8 TB/s a GPU. 148 SMs and 1.85 GHz are what
#   drivers report.
# MI300X: left out, since how its SIMDs issue 64-wide waves is not clear enough for a
#   number of this kind.
MACHINES = {
    "sm_80": Machine("A100 40 GB", 108, 1.41, 1.555),
    "sm_90": Machine("H100 SXM", 132, 1.755, 3.35),
    "sm_100": Machine("B200", 148, 1.85, 8.0),
}


@dataclasses.dataclass
class Card:
    """What a recipe compiles to on a target."""

    recipe: str
    target: str
    triton: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    layout_changes: int
    """Conversions between layouts of threads, which go through shared memory unless
    they stay inside a warp."""
    loads: dict[str, int]
    """Global loads by width in bits, as they stand in the code. Loops may be
    unrolled."""
    stores: dict[str, int]
    read_streams: dict[str, float]
    """Loads of a whole tile, by bytes per element; entry "0" is the scales, in bytes
    per element."""
    write_streams: dict[str, float]
    read_bytes: float | None
    """Per element, counted. None where nothing is stated per element."""
    write_bytes: float | None
    stated_read_bytes: float | None
    stated_write_bytes: float | None
    floor_bytes: float | None
    """Read and written, by the recipe."""
    threads: int
    tile: int
    instructions: float | None
    """Per element: what a thread issues over the elements it owns
    (`sass.instructions_run`). None on AMD and where nothing is stated per element."""
    issue_fraction: float | None
    """Upper bound of the fraction of memory bandwidth, by the issue of instructions
    alone: time of memory over time of issue, at most 1. Slow instructions count as any
    other: MUFU (roots, quotients) runs at 1/8 of this rate, integer instructions (and
    on A100 fp32 ones) at 1/2 per pipe. Latency, occupancy and launches are not in
    it."""
    contractions: int
    """Fused multiply-adds in the PTX; on AMD, what LLVM IR allows to be fused."""
    approximations: int
    """Flushed subnormals, approximate quotients and roots in the PTX or LLVM IR."""
    address_products: list[str]
    """Products of 32-bit integers that an address comes of."""
    specialised: list[str]
    """Integer arguments for whose values Triton would compile again."""


def compile_card(recipe: Recipe, target: str) -> Card:
    """Compile a recipe for a target, with the hints that its launcher gives, and read
    the card off the code."""
    compiled = _compiled(recipe, target)
    stated = [_stated(recipe, section) for section in ("Reads", "Writes")]
    ir = compiled.asm["ttgir"]
    # The two loops of the reduction run W - 1 times together, so each counts for half
    # of that.
    rows = recipe.tile // BLOCK if "BLOCKS" in recipe.constexprs else 0
    read, written = (
        cards_ir.streams(ir, operation, recipe.tile, rows, (WORLD - 1) / 2)
        for operation in ("tt.load", "tt.store")
    )
    moved = [
        None if s is None else cards_ir.bytes_per_element(c)
        for s, c in zip(stated, (read, written), strict=True)
    ]
    if target in MACHINES:
        code = _nvidia_code(compiled)
        issued = code.pop("code")
    else:
        code = _amd_code(compiled)
        issued = None
    instructions = None
    if issued is not None and stated[0] is not None:
        instructions = _instructions(recipe, target, issued)
    return Card(
        recipe=recipe.name,
        target=target,
        triton=triton.__version__,
        shared_bytes=compiled.metadata.shared,
        layout_changes=len(re.findall(r"ttg\.convert_layout\b", ir)),
        read_streams={str(size): count for size, count in read.items()},
        write_streams={str(size): count for size, count in written.items()},
        read_bytes=moved[0],
        write_bytes=moved[1],
        stated_read_bytes=stated[0],
        stated_write_bytes=stated[1],
        floor_bytes=recipe.floor,
        threads=_threads(recipe, target),
        tile=recipe.tile,
        instructions=instructions,
        issue_fraction=_issue_fraction(target, instructions, sum(filter(None, moved))),
        address_products=cards_ir.products_in_addresses(compiled.asm["ttir"]),
        specialised=[
            parameter.name
            for parameter in recipe.kernel.params
            if recipe.types.get(parameter.name, "*").startswith("i")
            and not parameter.do_not_specialize
        ],
        **code,
    )


def _threads(recipe: Recipe, target: str) -> int:
    return recipe.warps * TARGETS[target].warp_size


def _nvidia_code(compiled: Any) -> dict[str, Any]:
    code = sass.nvidia(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    code["contractions"] = len(re.findall(r"\bfma\.", ptx))
    code["approximations"] = len(re.findall(r"\.ftz|\.approx|div\.full", ptx))
    return code


def _amd_code(compiled: Any) -> dict[str, Any]:
    code = sass.amd(compiled.asm["amdgcn"])
    llvm = compiled.asm["llir"]
    # Not llvm.fma: Triton 3.6 itself expands a root into some.
    contractions = re.findall(r"fmuladd|\bcontract\b|\bfast\b", llvm)
    code["contractions"] = len(contractions)
    approximations = re.findall(r"\b(?:afn|arcp|reassoc)\b|!fpmath", llvm)
    code["approximations"] = len(approximations)
    return code


def _instructions(recipe: Recipe, target: str, issued: list[sass.Instruction]) -> float:
    """Return the instructions per element that a thread issues."""
    threads = _threads(recipe, target)
    in_loops = 0.0
    if "W" in recipe.sizes:
        in_loops = (WORLD - 1) * recipe.sizes["wire"] * recipe.tile / threads / 16
    return sass.instructions_run(issued, in_loops) / (recipe.tile / threads)


def _compiled(recipe: Recipe, target: str) -> Any:
    names = recipe.kernel.arg_names
    signature = {name: recipe.types.get(name, "constexpr") for name in names}
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    constexprs = {
        (names.index(name),): value for name, value in recipe.constexprs.items()
    }
    return triton.compile(
        ASTSource(
            fn=recipe.kernel, signature=signature, constexprs=constexprs, attrs=hints
        ),
        target=TARGETS[target],
        options={
            **launch.compiler_options(nvidia=target.startswith("sm")),
            "num_warps": recipe.warps,
        },
    )


def _stated(recipe: Recipe, section: str) -> float | None:
    """Return the bytes per element that a section of the kernel's docstring states."""
    found = re.search(
        rf"{section}:(?:(?!\n    \w+:)[\s\S])*?bytes per element: ([^\n]+)",
        recipe.kernel.__doc__,
    )
    return float(eval(found[1], {"__builtins__": {}}, recipe.sizes)) if found else None


def _issue_fraction(
    target: str, instructions: float | None, moved: float
) -> float | None:
    if instructions is None:
        return None
    machine = MACHINES[target]
    return min(
        1.0, moved / (machine.terabytes * 1e12) / (instructions / machine.instructions)
    )


def check_targets(targets: Iterable[str]) -> None:
    """Refuse targets that this Triton cannot compile for, before anything is compiled.

    Raises:
        SystemExit: with the names of the missing ones.
    """
    for target in targets:
        if not any(
            backend.compiler.supports_target(TARGETS[target])
            for backend in backends.values()
        ):
            raise SystemExit(
                f"bench.cards: Triton {triton.__version__} has no back end for"
                f" {target}, only: {', '.join(backends)}; choose others with --target"
            )
        if target in MACHINES and not sass.TOOL.exists():
            raise SystemExit(
                f"bench.cards: Triton {triton.__version__} came without"
                f" {sass.TOOL.name}, which {target} needs: install the wheel from PyPI"
            )


def _made(task: tuple[int, str]) -> Card | str:
    """Make one card in a worker process, which finds the recipe by its number: kernels
    cannot be pickled."""
    recipe = list(recipes())[task[0]]
    try:
        return compile_card(recipe, task[1])
    except Exception as error:
        return (
            f"bench.cards: Triton {triton.__version__} fails at {recipe.name} for"
            f" {task[1]}: {error!r}"
        )


def make_cards(targets: Sequence[str], pattern: str = "") -> list[Card]:
    """Make the cards of all recipes whose names a pattern is found in.

    Raises:
        SystemExit: a target that is missing, recipes that do not compile, or none that
            match.
    """
    check_targets(targets)
    numbers = [
        number
        for number, recipe in enumerate(recipes())
        if re.search(pattern, recipe.name)
    ]
    if not numbers:
        raise SystemExit(
            f"bench.cards: no recipe matches {pattern!r}; run without --recipe to see"
            " their names"
        )
    tasks = [(number, target) for target in targets for number in numbers]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(_made, tasks, chunksize=4))
    failures = [failure for failure in made if isinstance(failure, str)]
    if failures:
        raise SystemExit("\n".join(failures))
    return [card for card in made if isinstance(card, Card)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the cards, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="write bench/cards.md from JSON files",
    )
    parser.add_argument(
        "--target",
        choices=TARGETS,
        action="append",
        help="only this target; may be repeated",
    )
    parser.add_argument(
        "--recipe",
        default="",
        help="only recipes that this regular expression is found in",
    )
    chosen = parser.parse_args(arguments)
    if chosen.write:
        machines = ", ".join(
            f"{machine.name} ({target})" for target, machine in MACHINES.items()
        )
        PAGE.write_text(
            cards_table.page(
                [json.loads(path.read_text()) for path in chosen.write], machines
            )
        )
        return
    if launch.INTERPRETED:
        raise SystemExit(
            "bench.cards: TRITON_INTERPRET is set, and interpreted kernels cannot be"
            " compiled; unset it"
        )
    cards = [
        dataclasses.asdict(card)
        for card in make_cards(chosen.target or list(TARGETS), chosen.recipe)
    ]
    print(json.dumps(cards) if chosen.json else cards_table.tables([cards]))


if __name__ == "__main__":
    main()
