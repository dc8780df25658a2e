"""How a microbenchmark is timed: CUDA events and a flushed L2 on a GPU, the wall clock on a CPU; and its ceiling.

Every repetition times the ceiling first, on as many bytes as the case touches: an in-place multiply on a CPU, which
reads what it writes as an optimizer does (a CPU's copy also reads what it overwrites, so it is none), a copy on a GPU.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS = 20 if DEVICE == "cuda" else 9


class Instant:
    """A moment on the GPU's own clock. A difference waits for the later one, and is in seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Instant) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


now: Callable[[], Any] = Instant if DEVICE == "cuda" else time.perf_counter
"""The timer. The flush queued before the first moment keeps the GPU busy while the host launches."""


class Ceiling:
    """The bandwidth that memory reaches in this run, measured between the repetitions of a case."""

    def __init__(self, touched: int) -> None:
        """Set up a probe on `touched` bytes."""
        self.touched = touched
        half = max(touched // 8, 1)
        self.buffer = torch.ones(2 * half, device=DEVICE)
        self.source, self.destination = self.buffer[:half], self.buffer[half:]
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Time the probe once, then leave the cache cold (GPU)."""
        flush()
        start = now()
        if DEVICE == "cuda":
            self.destination.copy_(self.source)
        else:
            self.buffer.mul_(1.0)
        self.seconds.append(now() - start)
        flush()

    @property
    def gb_per_s(self) -> float:
        """Median bandwidth, reads and writes counted."""
        moved = self.buffer.nbytes * (1 if DEVICE == "cuda" else 2)
        return moved / statistics.median(self.seconds) / 1e9


@functools.cache
def _flush_buffer() -> Tensor:
    return torch.empty(2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.int8, device=DEVICE)


def flush() -> None:
    """Overwrite the GPU's L2 cache. On a CPU the probe has just done so."""
    if DEVICE == "cuda":
        _flush_buffer().zero_()


@dataclass(frozen=True)
class Case:
    """Something to time."""

    op: str
    recipe: str
    provider: str
    numel: int
    bytes_per_element: float
    """What one pass over the data has to read and write: the same for every provider, however many passes it takes."""
    touched: int
    """Bytes of all tensors."""
    run: Callable[[], Any]

    def score(self, seconds: float, ceiling: Ceiling) -> dict[str, Any]:
        """Return the row of a median time."""
        achieved = self.bytes_per_element * self.numel / seconds / 1e9
        return {
            "op": self.op,
            "recipe": self.recipe,
            "provider": self.provider,
            "numel": self.numel,
            "ms": seconds * 1e3,
            "bytes_per_element": self.bytes_per_element,
            "gb_per_s": achieved,
            "ceiling_gb_per_s": ceiling.gb_per_s,
            "percent": 100 * achieved / ceiling.gb_per_s,
        }


def measure(case: Case) -> dict[str, Any]:
    """Time a case without pytest: its row, with the 20th and 80th percentile."""
    ceiling = Ceiling(case.touched)
    case.run()
    seconds = []
    for _ in range(ROUNDS):
        ceiling()
        start = now()
        case.run()
        seconds.append(now() - start)
    seconds.sort()
    row = case.score(statistics.median(seconds), ceiling)
    return {**row, "p20_ms": seconds[len(seconds) // 5] * 1e3, "p80_ms": seconds[len(seconds) * 4 // 5] * 1e3}


COLUMNS = ("op", "recipe", "provider", "Mi elements", "ms", "bytes per element", "GB/s", "ceiling GB/s", "%")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of Markdown under HEADER."""
    cells = [row["op"], row["recipe"], row["provider"], f"{row['numel'] / 2**20:g}", f"{row['ms']:.3f}"]
    cells += [f"{row['bytes_per_element']:g}", f"{row['gb_per_s']:.1f}", f"{row['ceiling_gb_per_s']:.1f}"]
    return f"| {' | '.join(cells)} | {row['percent']:.0f} |"
