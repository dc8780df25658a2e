"""How a microbenchmark is timed: CUDA events and a flushed L2 on a GPU, the wall clock
on a CPU; and its ceiling.

Every repetition times the ceiling first, on as many bytes as the case has to move: an
in-place multiply on a CPU, which reads what it writes as an optimizer does (a CPU's
copy also reads what it overwrites, so it is none), a copy on a GPU.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS = 20 if DEVICE == "cuda" else 9
WARMUP = 3
HOST_ROUNDS = 9
MOST_FLUSHES = 200


class Instant:
    """A moment on the GPU's own clock. A difference waits for the later one, and is in
    seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Instant) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


now: Callable[[], Any] = Instant if DEVICE == "cuda" else time.perf_counter
"""The timer. The flush queued before the first moment keeps the GPU busy while the host
launches."""


@functools.cache
def _flush_buffer() -> Tensor:
    return torch.empty(
        2 * torch.cuda.get_device_properties(0).L2_cache_size,
        dtype=torch.int8,
        device=DEVICE,
    )


def flush() -> None:
    """Overwrite the GPU's L2 cache. On a CPU the probe has just done so."""
    if DEVICE == "cuda":
        _flush_buffer().zero_()


class Clock:
    """What a measurement asks of a device. Tests put their own in its place."""

    def __init__(self, device: str = DEVICE) -> None:
        """Measure on a device."""
        self.device = device
        self.copies = device == "cuda"
        """Whether the ceiling is a copy."""

    def now(self) -> Any:
        """Return a moment; the difference of two is in seconds."""
        return now() if self.device == DEVICE else time.perf_counter()

    def flush(self, times: int = 1) -> None:
        """Leave the L2 cache of a GPU cold, and its queue full for as long as this
        takes."""
        if self.device == "cuda":
            for _ in range(times):
                flush()

    def host_seconds(self, run: Callable[[], Any]) -> float | None:
        """Return the median time that a call takes the host, with nothing queued before
        it. None on a CPU."""
        if self.device != "cuda":
            return None
        seconds = []
        for _ in range(HOST_ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(seconds)

    def flushes(self, host: float | None) -> int:
        """Return how many flushes keep the GPU busy for twice as long as the host needs
        to enqueue a call.

        One flush lasts some 30 us and a step of many launches takes the host longer:
        the events would measure that.
        """
        if host is None:
            return 1
        self.flush(2)
        start = self.now()
        self.flush()
        seconds = float(self.now() - start)
        return min(max(math.ceil(2 * host / seconds), 1), MOST_FLUSHES)


class Ceiling:
    """The bandwidth that memory reaches in this run, measured between the repetitions
    of a case."""

    def __init__(self, moved: float, clock: Clock | None = None) -> None:
        """Set up a probe for a case that moves `moved` bytes.

        A copy moves as many: it reads half of them and writes half. A multiply works on
        as many, which moves twice as much but leaves nothing of the case's tensors in a
        CPU's cache.
        """
        self.clock = Clock() if clock is None else clock
        self.copies = self.clock.copies
        self.destination = torch.ones(
            max(int(moved) // (8 if self.copies else 4), 1), device=self.clock.device
        )
        self.source = (
            torch.ones_like(self.destination) if self.copies else self.destination
        )
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Time the probe once, then leave the cache cold (GPU)."""
        self.clock.flush()
        start = self.clock.now()
        if self.copies:
            self.destination.copy_(self.source)
        else:
            self.destination.mul_(1.0)
        self.seconds.append(self.clock.now() - start)
        self.clock.flush()

    @property
    def gb_per_s(self) -> float:
        """Median bandwidth, reads and writes counted."""
        return 2 * self.destination.nbytes / statistics.median(self.seconds) / 1e9


@dataclass(frozen=True)
class Case:
    """Something to time."""

    op: str
    recipe: str
    provider: str
    numel: int
    bytes_per_element: float
    """What one pass over the data has to read and write: the same for every provider,
    however many passes it takes."""
    run: Callable[[], Any]

    @property
    def moved(self) -> float:
        """Bytes that the floor moves."""
        return self.bytes_per_element * self.numel

    def score(self, seconds: float, ceiling_gb_per_s: float) -> dict[str, Any]:
        """Return the row of a median time."""
        achieved = self.moved / seconds / 1e9
        return {
            "op": self.op,
            "recipe": self.recipe,
            "provider": self.provider,
            "numel": self.numel,
            "bytes_per_element": self.bytes_per_element,
            "median_ms": seconds * 1e3,
            "gb_per_s": achieved,
            "ceiling_gb_per_s": ceiling_gb_per_s,
            "fraction": achieved / ceiling_gb_per_s,
        }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 20th and 80th percentile in milliseconds, as fields of a row."""
    ordered = sorted(seconds)
    p20, p80 = (
        ordered[round((len(ordered) - 1) * percent / 100)] for percent in (20, 80)
    )
    return {"p20_ms": p20 * 1e3, "p80_ms": p80 * 1e3}


def measure(
    case: Case, clock: Clock | None = None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Time a case without pytest: its row, with the 20th and 80th percentile and what
    it costs the host."""
    clock = Clock() if clock is None else clock
    for _ in range(WARMUP):
        case.run()
    ceiling = Ceiling(case.moved, clock)
    host = clock.host_seconds(case.run)
    flushes = clock.flushes(host)
    seconds = []
    for _ in range(rounds):
        ceiling()
        clock.flush(flushes)
        start = clock.now()
        case.run()
        seconds.append(clock.now() - start)
    row = case.score(statistics.median(seconds), ceiling.gb_per_s)
    return {
        **row,
        **spread(seconds),
        "rounds": rounds,
        "host_us": None if host is None else host * 1e6,
    }


COLUMNS = (
    "op",
    "recipe",
    "provider",
    "Mi elements",
    "ms",
    "bytes per element",
    "GB/s",
    "ceiling GB/s",
    "%",
    "host us",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of Markdown under HEADER."""
    cells = [
        row["op"],
        row["recipe"],
        row["provider"],
        f"{row['numel'] / 2**20:g}",
        f"{row['median_ms']:.3f}",
    ]
    cells += [
        f"{row['bytes_per_element']:g}",
        f"{row['gb_per_s']:.1f}",
        f"{row['ceiling_gb_per_s']:.1f}",
    ]
    host = row.get("host_us")
    cells += [f"{100 * row['fraction']:.0f}", "" if host is None else f"{host:.0f}"]
    return f"| {' | '.join(cells)} |"
