"""Everything about the kernels that needs a GPU, in one command: are they right, and
how fast.

    python -m bench.gpu [--quick] [--sizes 1,16,64,256,1024] [--out FILE]
        [--recipes fp32,split24+8bit]

First every kernel against its twin in `kernels/reference.py`, bit for bit; replays of a
CUDA graph against eager steps; and a shard of more than 2^31 elements. Then every
recipe at every size (in Mi elements), beside what others offer for the same work: CUDA
events, a cold L2, and a copy of as many bytes before every repetition.

Exits 2 without a CUDA device, 1 if anything is wrong (nothing is timed then), 0
otherwise. Rows are appended to bench/results/DEVICE.jsonl as they come.

Providers of the work "update": "zerokern kernel" is the update alone; "zerokern" is
`scalars_` + `update_`, what others do in `optimizer.step()`; "zerokern graph" replays
that. "step" adds the norm and clipping: for "zerokern" the reduction of one rank with
its sums of squares, so an AMP pipeline is compared with all that replaces it.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerokern import config
from zerokern.kernels import launch

from . import checks, graphs, large, machine, providers, timing
from .recipes import RECIPES, Recipe, Unavailable, mebi, select
from .shards import Step

SIZES = "1,16,64,256,1024"
GRAPH_NUMEL = 2**20 + 64
SLACK = 1.05
"""What else a size needs beside the tensors that are counted: partial sums, row map,
the L2's flush buffer."""


def main() -> int:
    """Run as asked on the command line."""
    options = arguments()
    if not torch.cuda.is_available():
        print(
            "bench.gpu: torch sees no CUDA device, so there is nothing to check or time"
            " here",
            file=sys.stderr,
        )
        return 2
    if launch.INTERPRETED:
        print(
            "bench.gpu: TRITON_INTERPRET is set, so kernels would not run on the GPU;"
            " unset it",
            file=sys.stderr,
        )
        return 2
    recipes = select(options.recipes)
    wrong = verify(recipes)
    if wrong:
        print(
            f"{len(wrong)} checks failed, so nothing was timed:",
            *wrong,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    if not options.quick:
        out = (
            options.out
            or machine.ROOT
            / "bench"
            / "results"
            / f"{slug(torch.cuda.get_device_name())}.jsonl"
        )
        time_all(out, recipes, mebi(options.sizes), rounds=options.rounds)
    return 0


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="check only, time nothing")
    parser.add_argument("--sizes", default=SIZES, help=f"Mi elements; default {SIZES}")
    parser.add_argument("--recipes", help=f"some of: {', '.join(RECIPES)}")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument(
        "--out",
        type=Path,
        help="rows are appended there; default: named after the device",
    )
    return parser.parse_args(line)


def slug(name: str) -> str:
    """Return a device's name as a file name."""
    return re.sub(r"\W+", "-", name).strip("-").lower()


def verify(
    recipes: Sequence[Recipe],
    device: str = "cuda",
    backend: config.Backend = "triton",
    shards: Sequence[int] = checks.SHARDS,
    capture: graphs.Capture = graphs.cuda_graph,
    graph_numel: int = GRAPH_NUMEL,
) -> list[str]:
    """Run every check; return the names of those that failed."""
    wrong = [
        name
        for name, check in checks.checks(recipes, shards)
        if not checks.same(name, check, device, backend)
    ]
    for recipe in recipes:
        if not graphs.replay_is_eager(recipe, graph_numel, device, capture, backend):
            wrong.append(f"graph replay, {recipe.name}")
    return wrong + _verify_large(device)


def _verify_large(device: str) -> list[str]:
    free, needed = free_bytes(device), large.BYTES_PER_ELEMENT * large.NUMEL
    if free < needed:
        print(
            f"not checked: {large.NUMEL} elements need {needed / 1e9:.0f} GB and"
            f" {free / 1e9:.0f} GB are free"
        )
        return []
    found = large.faults(device)
    print(
        f"{'DIFFERS  ' if found else 'same bits'}  {large.NUMEL} elements,"
        f" {large.RECIPE.name}",
        flush=True,
    )
    release(device)
    return found


def time_all(
    out: Path,
    recipes: Sequence[Recipe],
    sizes: Sequence[int],
    *,
    rounds: int = timing.ROUNDS,
    clock: timing.Clock | None = None,
    capture: graphs.Capture = graphs.cuda_graph,
    backend: config.Backend = "triton",
) -> list[dict[str, Any]]:
    """Time every recipe at every size; append the rows to a file, print them, and
    return them.

    A size that does not fit and a provider that cannot run are a line each.
    """
    clock = timing.Clock() if clock is None else clock
    about, rows = describe(), []
    absent: dict[str, None] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    print(timing.HEADER)
    with out.open("a") as file:
        for numel in sizes:
            for recipe in recipes:
                for result in Timer(numel, rounds, clock, capture, backend).everyone(
                    recipe
                ):
                    if isinstance(result, str):
                        absent[result] = None
                        continue
                    rows.append({**about, **result})
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
                    print(timing.line(result), flush=True)
    for reason in absent:
        print(f"did not run: {reason}")
    print(f"{len(rows)} rows: {out}")
    return rows


def describe() -> dict[str, Any]:
    """Return what every row says about its origin."""
    about = machine.describe()
    return {
        **about,
        "device": about["machine"],
        "driver": about.get("driver"),
        "cuda": torch.version.cuda,
    }


@dataclass(frozen=True)
class Timer:
    """How one recipe after the other is timed at one size. What did not run is a string
    among the rows."""

    numel: int
    rounds: int
    clock: timing.Clock
    capture: graphs.Capture
    backend: config.Backend

    def everyone(self, recipe: Recipe) -> Iterator[dict[str, Any] | str]:
        """Yield the rows of all providers of a recipe, one after the other: only one
        has its tensors at a time."""
        device = self.clock.device
        candidates = [("zerokern", recipe.state_bytes, self.ours(recipe))]
        candidates += [
            (p.name, p.bytes_per_element, self.other(recipe, p))
            for p in providers.for_recipe(recipe, device)
        ]
        for name, held, rows in candidates:
            where = f"{name}, {recipe.name}, {self.numel / 2**20:g} Mi"
            reason = does_not_fit(held, recipe.step_bytes, self.numel, device)
            try:
                if reason:
                    yield f"{where}: {reason}"
                else:
                    yield from rows
            except Unavailable as error:
                yield str(error)
            except torch.OutOfMemoryError as error:
                yield f"{where}: {str(error).splitlines()[0]}"
            release(device)

    def ours(self, recipe: Recipe) -> Iterator[dict[str, Any]]:
        """Yield the rows of zerokern."""
        step = Step.of(recipe, self.numel, self.clock.device, self.backend)
        yield self.measured(recipe, "zerokern kernel", "update", step.update)
        yield self.measured(recipe, "zerokern", "update", step.step)
        yield self.measured(recipe, "zerokern graph", "update", self.capture(step.step))
        step.set(max_norm=1.0)
        yield self.measured(recipe, "zerokern", "step", step.clipped_step)

    def other(
        self, recipe: Recipe, provider: providers.Provider
    ) -> Iterator[dict[str, Any]]:
        """Yield the row of another provider."""
        run, note = providers.build(provider, recipe, self.numel, self.clock.device)
        row = self.measured(recipe, provider.name, provider.work, run)
        yield {**row, "note": note} if note else row

    def measured(
        self, recipe: Recipe, name: str, work: providers.Work, run: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return the row of a call."""
        floor = recipe.update_bytes if work == "update" else recipe.step_bytes
        return timing.measure(
            timing.Case(work, recipe.name, name, self.numel, floor, run),
            self.clock,
            self.rounds,
        )


def does_not_fit(held: float, moved: float, numel: int, device: str) -> str | None:
    """Return why a size does not fit beside the copy's two buffers, or None if it does.
    Bytes are per element."""
    needed, free = SLACK * (held + moved) * numel, free_bytes(device)
    return (
        f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        if needed > free
        else None
    )


def free_bytes(device: str) -> float:
    """Return the bytes that can be allocated on a device; unknown on a CPU, where only
    tests run this."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else float("inf")


def release(device: str) -> None:
    """Give what is no longer used back to the device, so that the next size finds
    it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
