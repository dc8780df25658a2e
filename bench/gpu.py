"""Everything about the kernels that needs a GPU, in one command: are they right, and how fast.

    python -m bench.gpu [--quick] [--out bench/results/DEVICE.jsonl]

First every kernel against its twin in `kernels/reference.py`, bit for bit, then the cases of the microbenchmarks, timed
with CUDA events and a cold L2. Without a CUDA device it says so and exits 2; a kernel that differs exits 1, untimed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zerokern import ops

from . import machine, timing
from .cases import DTYPES, MAKERS, Unavailable, every, make, row_map, table

SHARDS = (64, 4096, 64 * 1023, 2**20 + 64)
SPECIAL = (0.0, -0.0, 1e-45, 1.0, -65504.0, 3.4e38, math.inf, -math.inf, math.nan)


def main() -> int:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="check only, time nothing")
    parser.add_argument("--out", type=Path, help="rows are appended there; default: named after the device")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: torch sees no CUDA device, so there is nothing to check or time here", file=sys.stderr)
        return 2
    wrong = [name for name, run in checks() if not report(name, run)]
    if wrong:
        print(f"{len(wrong)} kernels differ from their twins: not timed", file=sys.stderr)
        return 1
    if not options.quick:
        slug = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
        time_all(options.out or machine.ROOT / "bench" / "results" / f"{slug}.jsonl")
    return 0


def time_all(out: Path) -> None:
    """Time every case; append the rows to a file and print them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    about, absent = machine.describe(), {}
    print(timing.HEADER)
    with out.open("a") as file:
        for op in MAKERS:
            for recipe, provider, numel in every(op):
                try:
                    row = timing.measure(make(op, recipe, provider, numel))
                except (Unavailable, torch.OutOfMemoryError) as reason:
                    absent[f"{op} {provider}: {str(reason).splitlines()[0]}"] = None
                    continue
                file.write(json.dumps({**about, **row}) + "\n")
                print(timing.line(row), flush=True)
    for reason in absent:
        print(f"did not run: {reason}")
    print(f"rows: {out}")


def report(name: str, run: Callable[[str], list[Tensor]]) -> bool:
    """Run a check on both devices; say and return whether all bits are equal."""
    ours, twins = run("cuda"), run("cpu")
    same = all(torch.equal(_bits(a.cpu()), _bits(b)) for a, b in zip(ours, twins, strict=True))
    print(f"{'same bits' if same else 'DIFFERS  '}  {name}", flush=True)
    return same


def checks() -> Iterator[tuple[str, Callable[[str], list[Tensor]]]]:
    """Yield a name and a function from a device to the tensors that a kernel writes there."""
    for numel, (name, dtype) in itertools.product(SHARDS, DTYPES.items()):
        for l2 in (False, True):
            yield f"adamw {name} {numel} l2={l2}", partial(_adamw, numel=numel, dtype=dtype, l2=l2)
        for target_name, target in DTYPES.items():
            yield f"cast {name} to {target_name} {numel}", partial(_cast, numel=numel, source=dtype, target=target)
            yield f"pack {name} to {target_name} {numel}", partial(_pack, numel=numel, source=dtype, target=target)
        for world in (1, 2, 4, 7):
            yield f"reduce {world} x {name} {numel}", partial(_reduce, numel=numel, dtype=dtype, world=world)
    yield "scalars", _scalars


def _numbers(
    device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, special: bool = False
) -> Tensor:
    """Return the same small normal numbers on any device; `special` puts infinities, NaN and such first."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1e-2
    if special:
        values.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values.to(dtype).to(device)


def _adamw(device: str, numel: int, dtype: torch.dtype, l2: bool) -> list[Tensor]:
    weights, exp_avg = (_numbers(device, numel, seed=seed) for seed in (1, 2))
    exp_avg_sq = _numbers(device, numel, seed=3).square()
    grad = _numbers(device, numel, dtype=dtype, seed=4)
    rows = row_map(numel, min(7, numel // ops.BLOCK), device)
    scalars = table(7, device)
    scalars[ops.TABLE.index("l2")] = 0.1 * l2
    scalars[ops.TABLE.index("active"), 1:2] = 0.0
    param, master = (weights, None) if dtype == torch.float32 else (weights.to(dtype), weights)
    ops.adamw_(param, master, exp_avg, exp_avg_sq, grad, table=scalars, rows=rows, l2=l2)
    return [param, weights, exp_avg, exp_avg_sq]


def _cast(device: str, numel: int, source: torch.dtype, target: torch.dtype) -> list[Tensor]:
    out = torch.empty(numel, dtype=target, device=device)
    ops.cast_(out, _numbers(device, numel, dtype=source, special=True))
    return [out]


def _pack(device: str, numel: int, source: torch.dtype, target: torch.dtype) -> list[Tensor]:
    sizes = [1, numel // 3, numel - 1 - numel // 3]  # starts off 16 bytes too
    results = []
    for scale in (1.0, 0.3):
        bucket = torch.zeros(numel, dtype=target, device=device)
        gradients = [_numbers(device, size, dtype=source, seed=size) for size in sizes]
        ops.pack_(bucket.split(sizes), gradients, scale)
        results.append(bucket)
    return results


def _reduce(device: str, numel: int, dtype: torch.dtype, world: int) -> list[Tensor]:
    results = []
    for rank in {0, world - 1}:
        own = _numbers(device, numel, dtype=dtype, seed=5)
        received = _numbers(device, world - 1, numel, dtype=dtype, seed=6)
        shard = _numbers(device, numel, seed=7)
        for accumulate in (False, True):
            partials = torch.zeros(ops.partials_numel(numel), dtype=torch.float64, device=device)
            ops.reduce_(shard, own, received, partials, rank=rank, scale=1 / world, accumulate=accumulate)
            results.append(shard.clone())  # the order of fp64 square sums is the kernel's own, so these may differ
    return results


def _scalars(device: str) -> list[Tensor]:
    rows = 70
    scalars = torch.zeros(len(ops.TABLE), rows, device=device)
    steps = torch.arange(rows, device=device)
    report = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=device)
    groups = [[1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, 1.0], [2e-3, 0.8, 0.99, 1e-6, 0.0, -1.0, 0.0]]
    hyper = torch.tensor(groups, dtype=torch.float64)
    squares = torch.tensor([2.0, 3.0], dtype=torch.float64).view(torch.int64).view(2, 1)
    words = torch.tensor([[0xFFFF, 0x0F0F, 0], [0, 0xF0F0, 1]], dtype=torch.int64)
    ops.scalars_(
        scalars, steps, report, hyper=hyper.to(device), group_of_row=(torch.arange(rows) % 2).to(device),
        gathered=torch.cat([squares, words], dim=1).to(device),
        limits=torch.tensor([1.0, 8.0], dtype=torch.float64, device=device),
    )  # fmt: skip
    return [scalars, steps, report]


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's words; every NaN as one, since its payload is the hardware's."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), math.nan)
    return tensor.contiguous().view(torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
