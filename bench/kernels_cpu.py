"""The update on one CPU thread: every recipe of zerokern beside torch and other
packages, all in one interleaved run.

    python -m bench.kernels_cpu [--sizes 16,64] [--rounds 15] [--out FILE]
        [--recipes fp32,bf16+8bit]

Sizes are in Mi elements. In every round each provider runs once, in rotated order, and
so does an in-place multiply of as many fp32 elements (8 bytes each), whose bandwidth is
the ceiling of the run. What is reported are medians and ratios of medians; they mean
something on a quiet machine only. Rows are appended to bench/results/kernels-cpu.jsonl.

Peers (torchao, bitsandbytes, DeepSpeed) run where they import; a line says which do
not, and why. What they compile is compiled before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerokern import config
from zerokern.kernels import native

from . import machine, providers, timing
from .recipes import RECIPES, Recipe, Unavailable, mebi, select
from .shards import Step

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""What must be set before torch is imported: main starts Python again for it."""

OURS = "zerokern native"
CASTS = "torch fused AdamW, casts"
CEILING = ("ceiling", "in-place multiply")
SCALARS = ("scalars", OURS)
Key = tuple[str, str]  # recipe, provider


class Goal(NamedTuple):
    """How much less time a recipe should take than the fastest of some providers."""

    recipe: str
    against: tuple[str, ...]
    speedup: float
    """Their median over ours, at least."""


GOALS = (
    Goal("fp32", ("torch fused AdamW",), 1 / 1.15),
    Goal("master32", (CASTS,), 1.8),
    Goal(
        "bf16+8bit",
        (
            "torchao AdamW8bit",
            "torchao AdamW8bit, stochastic",
            "bitsandbytes AdamW8bit",
        ),
        8.0,
    ),
)
FRACTION = 0.6
"""Of the multiply's bandwidth, that each recipe should reach by the bytes of its
floor."""


def main() -> int:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="16,64", help="Mi elements")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recipes", help=f"some of: {', '.join(RECIPES)}")
    parser.add_argument(
        "--out",
        type=Path,
        default=machine.ROOT / "bench" / "results" / "kernels-cpu.jsonl",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not native.available():
        print(
            "bench.kernels_cpu: there is no C compiler, so there is no native back end"
            " to time",
            file=sys.stderr,
        )
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {**machine.describe(), "threads": 1}
    with options.out.open("a") as file:
        for numel in mebi(options.sizes):
            for row in run_size(numel, select(options.recipes), options.rounds):
                file.write(json.dumps({**about, **row}) + "\n")
    print(f"\nrows: {options.out}")
    return 0


def run_size(
    numel: int,
    recipes: Sequence[Recipe],
    rounds: int,
    clock: timing.Clock | None = None,
    backend: config.Backend = "native",
) -> list[dict[str, Any]]:
    """Time everything at one size; print and return the rows."""
    print(f"\n{numel / 2**20:g} Mi elements, {rounds} rounds", flush=True)
    needed, free = memory_needed(numel, recipes), available()
    if needed > free:
        print(
            f"did not run: all providers together need {needed / 1e9:.1f} GB, and"
            f" {free / 1e9:.1f} GB are available"
        )
        return []
    runs, notes, absent = build_all(numel, recipes, backend)
    seconds = interleave(runs, rounds, timing.Clock("cpu") if clock is None else clock)
    rows = [
        score(key, numel, times, seconds[CEILING], notes.get(key, ""))
        for key, times in seconds.items()
    ]
    ratios = list(compare(numel, seconds))
    for text in (*table(rows), "", *map(ratio_line, ratios), *goals_of_fraction(rows)):
        print(text)
    for reason in dict.fromkeys(absent):
        print(f"did not run: {reason}")
    runs.clear()
    gc.collect()
    return rows + ratios


def build_all(
    numel: int, recipes: Sequence[Recipe], backend: config.Backend
) -> tuple[dict[Key, Callable[[], Any]], dict[Key, str], list[str]]:
    """Return the calls to time, notes on some of them, and why others are absent. Each
    call has run once."""
    probe = torch.ones(numel)
    runs: dict[Key, Callable[[], Any]] = {CEILING: lambda: probe.mul_(1.0)}
    notes: dict[Key, str] = {}
    absent: list[str] = []
    for recipe in recipes:
        step = Step.of(recipe, numel, "cpu", backend)
        step.update()
        runs[recipe.name, OURS] = step.update
        runs.setdefault(SCALARS, step.scalars)
        for provider in providers.for_recipe(recipe, "cpu"):
            if provider.work != "update":
                continue
            key = (recipe.name, provider.name)
            try:
                runs[key], notes[key] = providers.build(provider, recipe, numel, "cpu")
            except Unavailable as reason:
                absent.append(str(reason))
    return runs, notes, absent


def interleave(
    runs: Mapping[Key, Callable[[], Any]], rounds: int, clock: timing.Clock
) -> dict[Key, list[float]]:
    """Run everything once per round; the order is rotated, so that no one always has
    the same neighbour."""
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    keys = list(runs)
    for index in range(rounds):
        shift = index % len(keys)
        for key in keys[shift:] + keys[:shift]:
            start = clock.now()
            runs[key]()
            seconds[key].append(clock.now() - start)
    return seconds


def score(
    key: Key,
    numel: int,
    times: Sequence[float],
    ceiling: Sequence[float],
    note: str = "",
) -> dict[str, Any]:
    """Return the row of one provider. The scalars' has no bytes: they are a table of a
    few parameters."""
    recipe, provider = key
    median = statistics.median(times)
    row: dict[str, Any] = {
        "op": "update",
        "recipe": recipe,
        "provider": provider,
        "numel": numel,
    }
    row |= {"median_ms": median * 1e3, **timing.spread(times), "rounds": len(times)}
    if note:
        row["note"] = note
    if key == SCALARS:
        return {**row, "op": "scalars"}
    floor = 8.0 if key == CEILING else RECIPES[recipe].update_bytes
    case = timing.Case(
        "ceiling" if key == CEILING else "update",
        recipe,
        provider,
        numel,
        floor,
        lambda: None,
    )
    scored = case.score(median, 8e-9 * numel / statistics.median(ceiling))
    return {**row, **scored, "ns_per_element": median * 1e9 / numel}


def compare(
    numel: int, seconds: Mapping[Key, Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for every provider's ratio to ours; a goal is stated against the
    fastest that it names."""
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    for (recipe, provider), median in medians.items():
        if provider != OURS and (recipe, OURS) in medians:
            speedup = median / medians[recipe, OURS]
            yield {
                "op": "ratio",
                "recipe": recipe,
                "provider": provider,
                "numel": numel,
                "speedup": speedup,
            }
    for goal in GOALS:
        present = [name for name in goal.against if (goal.recipe, name) in medians]
        if present and (goal.recipe, OURS) in medians:
            fastest = min(present, key=lambda name: medians[goal.recipe, name])
            speedup = medians[goal.recipe, fastest] / medians[goal.recipe, OURS]
            row = {
                "op": "goal",
                "recipe": goal.recipe,
                "provider": fastest,
                "numel": numel,
                "speedup": speedup,
            }
            yield {**row, "goal": goal.speedup, "met": speedup >= goal.speedup}


def ratio_line(row: Mapping[str, Any]) -> str:
    """Return a row of `compare` as text."""
    text = (
        f"{row['recipe']}: {OURS} takes {1 / row['speedup']:.2f} of {row['provider']},"
        f" {row['speedup']:.2f}x as fast"
    )
    if row["op"] == "goal":
        text = (
            f"goal {'met   ' if row['met'] else 'MISSED'} {text} (goal:"
            f" {row['goal']:.2f}x)"
        )
    return text


def goals_of_fraction(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line on each recipe's fraction of the multiply's bandwidth."""
    for row in rows:
        if row["op"] == "update" and row["provider"] == OURS:
            verdict = "met   " if row["fraction"] >= FRACTION else "MISSED"
            yield (
                f"goal {verdict} {row['recipe']}: {row['fraction']:.2f} of the multiply"
                f" (goal: {FRACTION})"
            )


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rows as a table in Markdown."""
    yield (
        "| recipe | provider | median ms (p20-p80) | ns per element | bytes per element"
        " | GB/s | of the multiply |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|"
    for row in rows:
        spread = f"{row['median_ms']:.3f} ({row['p20_ms']:.3f}-{row['p80_ms']:.3f})"
        cells = [
            row["recipe"],
            " ".join(filter(None, (row["provider"], _bracketed(row)))),
            spread,
        ]
        if row["op"] == "scalars":
            cells += ["", "", "", ""]
        else:
            cells += [f"{row['ns_per_element']:.2f}", f"{row['bytes_per_element']:g}"]
            cells += [f"{row['gb_per_s']:.1f}", f"{row['fraction']:.2f}"]
        yield f"| {' | '.join(cells)} |"


def _bracketed(row: Mapping[str, Any]) -> str:
    return f"({row['note']})" if "note" in row else ""


def memory_needed(numel: int, recipes: Sequence[Recipe]) -> float:
    """Return about how many bytes all providers hold together."""
    per_element = 4.0
    for recipe in recipes:
        per_element += recipe.state_bytes
        others = providers.for_recipe(recipe, "cpu")
        per_element += sum(
            provider.bytes_per_element
            for provider in others
            if provider.work == "update"
        )
    return per_element * numel


def available() -> float:
    """Return the bytes that can be allocated without swapping; infinity where the
    system does not say."""
    try:
        fields = dict(
            text.split(":", 1)
            for text in Path("/proc/meminfo").read_text().splitlines()
        )
        return float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return float("inf")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        again = [sys.executable, "-m", "bench.kernels_cpu", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **ENVIRONMENT})
    sys.exit(main())
