"""What the machine code says about a kernel: registers, spills, the widths of accesses,
how many instructions run.

NVIDIA's code is disassembled by the tool in Triton's wheel; AMD's compiler leaves
assembly.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)([^;]*);", re.MULTILINE
)
_WIDE = ("64", "128", "256")


class Instruction(NamedTuple):
    """One instruction of NVIDIA's machine code."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = (
            re.search(r"0x([0-9a-f]+)\s*$", self.operands)
            if self.name == "BRA"
            else None
        )
        return int(found[1], 16) if found else None


def nvidia(cubin: bytes) -> dict[str, Any]:
    """Return what NVIDIA's machine code says: the fields of `cards.Card` that come of
    it, and its instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [TOOL, "-res-usage", "-sass", path],
            capture_output=True,
            text=True,
            check=True,
        )
    sass = text.stdout + text.stderr
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", sass))
    code = parse(sass)
    return {
        "registers": int(usage["REG"]),
        "spill_bytes": int(usage["STACK"]) + int(usage["LOCAL"]),
        "loads": _widths(code, "LDG"),
        "stores": _widths(code, "STG"),
        "code": code,
    }


def parse(listing: str) -> list[Instruction]:
    """Return the instructions of a disassembly."""
    found = _LINE.findall(listing)
    return [
        Instruction(int(address, 16), predicate, *rest)
        for address, predicate, *rest in found
    ]


def _widths(code: list[Instruction], name: str) -> dict[str, int]:
    return dict(
        Counter(_width(instruction) for instruction in code if instruction.name == name)
    )


def _width(instruction: Instruction) -> str:
    bits = {
        "256": "256",
        "128": "128",
        "64": "64",
        "U16": "16",
        "S16": "16",
        "U8": "8",
        "S8": "8",
    }
    return next(
        (bits[suffix] for suffix in instruction.opcode.split(".") if suffix in bits),
        "32",
    )


def blocks_of(code: list[Instruction]) -> dict[int, list[Instruction]]:
    """Return the basic blocks by their addresses, without those that nothing but
    trouble leads to.

    Quotients and roots branch to a subroutine for subnormal, infinite and such
    operands. Blocks that call it are left out; so is all code behind the last wide
    store: the subroutines themselves, and the tails of copies that are no multiple of
    8, which one program in many runs.
    """
    last = max(
        (i.address for i in code if i.name == "STG" and _width(i) in _WIDE), default=-1
    )
    code = [instruction for instruction in code if instruction.address <= last]
    starts = {instruction.target for instruction in code} | {0}
    blocks: dict[int, list[Instruction]] = {}
    fresh = True
    for instruction in code:
        if fresh or instruction.address in starts:
            block = blocks.setdefault(instruction.address, [])
        block.append(instruction)
        fresh = instruction.name in ("BRA", "EXIT", "RET")
    return {
        a: block
        for a, block in blocks.items()
        if all(i.name not in ("CALL", "RET") for i in block)
    }


def instructions_run(code: list[Instruction], loads_in_loops: float) -> float:
    """Return how many instructions a warp issues, but for the troubled paths that
    `blocks_of` leaves out.

    Without loops these are all that are left. With loops (over ranks; compilers unroll
    them in several ways) it is the shortest way through that enters none, and for every
    global load that the loops must make, the instructions per load of the loop that has
    fewest.

    Args:
        code: a kernel.
        loads_in_loops: global loads that a thread makes in loops.
    """
    blocks = blocks_of(code)
    if not loads_in_loops:
        return sum(map(len, blocks.values()))
    return _shortest(blocks) + loads_in_loops * _least_per_load(blocks)


def _least_per_load(blocks: dict[int, list[Instruction]]) -> float:
    rates = []
    for block in blocks.values():
        start, end = block[-1].target, block[-1].address
        if start is not None and start <= block[0].address:
            body = [
                i for address, b in blocks.items() if start <= address <= end for i in b
            ]
            loads = sum(i.name == "LDG" for i in body)
            rates += [len(body) / loads] if loads else []
    return min(rates)


def _shortest(blocks: dict[int, list[Instruction]]) -> int:
    """Return the instructions of the shortest way from the first block to the last,
    which goes only forward."""
    addresses = sorted(blocks)
    lengths = {addresses[0]: 0}
    for address, following in zip(addresses, [*addresses[1:], None], strict=True):
        if address not in lengths:
            continue
        done = lengths[address] + len(blocks[address])
        if following is None:
            return done
        last = blocks[address][-1]
        ways = [last.target] if last.target is not None else []
        if last.name not in ("BRA", "EXIT") or last.predicate or "P" in last.operands:
            ways.append(following)
        for way in ways:
            if way in blocks and way > address:
                lengths[way] = min(lengths.get(way, done), done)
    raise ValueError("no way leads to the last wide store")


def amd(assembly: str) -> dict[str, Any]:
    """Return what AMD's assembly says: the fields of `cards.Card` that come of it."""

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", assembly)[1])  # type: ignore[index]

    def widths(kind: str) -> dict[str, int]:
        bits = {
            "dwordx4": "128",
            "dwordx2": "64",
            "dword": "32",
            "ushort": "16",
            "short": "16",
            "ubyte": "8",
        }
        bits |= {"byte": "8", "sbyte": "8"}
        found = re.findall(rf"\b(?:global|buffer|flat)_{kind}_([a-z\d]+)", assembly)
        return dict(Counter(bits.get(suffix, suffix) for suffix in found))

    return {
        "registers": number("vgpr_count"),
        "spill_bytes": (
            number("private_segment_fixed_size") + 4 * number("vgpr_spill_count")
        ),
        "loads": widths("load"),
        "stores": widths("store"),
    }
