"""What Triton's own dialects say about a kernel: the bytes it moves, and the products
that its addresses come of."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1}

_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULTS = re.compile(r"^(%[\w$.-]+)(?::(\d+))? = ")
_OPERATION = re.compile(r'"?([a-z_]\w*\.\w[\w.]*)"?')
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
# Where the walk ends: a loaded value is not arithmetic, and a comparison only chooses.
_ENDS = ("tt.load", "arith.cmpi", "arith.cmpf")
_PRODUCTS = ("arith.muli", "arith.shli")


def streams(
    ttgir: str, operation: str, tile: int, rows: int, trips: float
) -> dict[int, float]:
    """Count what every element of a tile has its own of: accesses of the whole tile, by
    bytes per element.

    Scales, one byte for each of the tile's `rows` blocks, are in the entry 0, each as
    its share of a byte per element.

    Args:
        ttgir: a kernel in Triton's GPU dialect.
        operation: "tt.load" or "tt.store".
        tile: elements per program.
        rows: blocks per program; 0 if scales are not to be looked for.
        trips: how often the body of a loop runs.
    """
    counted: Counter[int] = Counter()
    for line, in_loop in _with_loops(ttgir):
        found = re.search(
            rf"{re.escape(operation)} .*: tensor<([\dx]+)x!tt.ptr<(\w+)>", line
        )
        if not found:
            continue
        numel = 1
        for length in found[1].split("x"):
            numel *= int(length)
        times = trips if in_loop else 1
        if numel == tile:
            counted[BYTES[found[2]]] += times  # type: ignore[assignment]
        elif numel == rows and found[2] == "i8":
            counted[0] += times * rows / tile  # type: ignore[assignment]
    return dict(counted)


def bytes_per_element(counted: dict[int, float]) -> float:
    """Return the bytes per element of what `streams` counted."""
    return sum((size or 1) * count for size, count in counted.items())


def _with_loops(ir: str) -> Iterator[tuple[str, bool]]:
    """Yield every line, and whether it is in a loop."""
    indents: list[int] = []
    for line in ir.splitlines():
        indent = len(line) - len(line.lstrip())
        if indents and indent == indents[-1] and re.match(r" *\}(?! do)", line):
            indents.pop()
        if re.search(r"\bscf\.(while|for)\b", line):
            indents.append(indent)
        yield line, bool(indents)


@dataclasses.dataclass
class _Region:
    """An operation that holds other operations, while those are read."""

    operation: str
    results: list[str]
    carried: list[str] = dataclasses.field(default_factory=list)
    """Arguments of a loop that its body yields anew."""
    passed: list[str] = dataclasses.field(default_factory=list)
    """What the arguments of the next block are."""


class _Graph:
    """Which values each value is computed from, which are addresses, and which are
    products."""

    def __init__(self, ttir: str) -> None:
        self.sources: defaultdict[str, set[str]] = defaultdict(set)
        self.products: dict[str, str] = {}
        self.roots: set[str] = set()
        self._open: list[_Region] = []
        for line in ttir.splitlines():
            self._read(_LOCATION.sub("", line).strip())

    def _read(self, text: str) -> None:
        found = _RESULTS.match(text)
        results = [found[1]] if found and not found[2] else []
        if found and found[2]:
            results = [f"{found[1]}#{index}" for index in range(int(found[2]))]
        text = text[found.end() :] if found else text
        operation = (_OPERATION.search(text) or [""] * 2)[1]
        used = _NAME.findall(text)
        if text.startswith("}") and self._open:
            region = self._open.pop()
            if text.endswith("{"):  # do, else
                self._open.append(region)
        elif text.startswith("^") and self._open:
            self._flow(used, self._open[-1].passed)
        elif text.endswith("{"):
            self._enter(_Region(operation, results), text, used)
        elif operation in ("scf.yield", "scf.condition") or operation.endswith(
            ".return"
        ):
            self._leave(operation, used)
        elif operation not in _ENDS:
            for name in results:
                self.sources[name].update(used)
        if operation in ("tt.addptr", "tt.int_to_ptr"):
            self.roots.update(used)
        if operation in _PRODUCTS and re.search(
            r": (?:tensor<[\dx]*xi32\b|i32\b)", text
        ):
            self.products.update((name, f"{name} = {text}") for name in results)

    def _enter(self, region: _Region, text: str, used: list[str]) -> None:
        self._open.append(region)
        if region.operation in ("scf.while", "scf.for"):
            pairs = _CARRIED.findall(text)
            # The first is the counter: it comes of both bounds and the step.
            if region.operation == "scf.for":
                self.sources[pairs.pop(0)[0]].update(used[1:4])
                self._flow(region.results, [value for _, value in pairs])
            region.carried = [name for name, _ in pairs]
            self._flow(region.carried, [value for _, value in pairs])
        # Tt.reduce and the like: anything may become of anything.
        elif region.operation != "scf.if":
            region.passed = used
            for name in region.results:
                self.sources[name].update(used)

    def _leave(self, operation: str, used: list[str]) -> None:
        """Read the operation that ends a block: what it names becomes the loop's
        arguments or the results."""
        if not self._open:
            return
        region = self._open[-1]
        if operation == "scf.condition":
            region.passed = used[1:]
            self._flow(region.results, used[1:])
            return
        self._flow(region.carried, used)
        if region.operation != "scf.while":
            self._flow(region.results, used)

    def _flow(self, names: list[str], values: list[str]) -> None:
        """Note that each name is the value at its place; where the numbers differ, any
        of them."""
        for index, name in enumerate(names):
            self.sources[name].update(
                [values[index]] if len(names) == len(values) else values
            )


def products_in_addresses(ttir: str) -> list[str]:
    """Return the products (and left shifts) of 32-bit integers that an address comes
    of: each overflows at 2^31.

    The graph of values is walked backwards from every address, through loops, up to
    loads and comparisons.
    """
    graph = _Graph(ttir)
    return [
        graph.products[name]
        for name in sorted(_reached(graph.roots, graph.sources) & graph.products.keys())
    ]


def _reached(roots: set[str], sources: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(sources.get(name, ()))
    return reached
