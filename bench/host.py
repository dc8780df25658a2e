"""What a training step costs the host: bookkeeping alone, with tiny tensors and a fake
process group, which sends nothing.

    python -m bench.host                            # this checkout
    python -m bench.host --against ../other         # beside another, interleaved

A case is a model of many small parameters; a step is zero_grad, forward, backward and
step of a rank of two. Time is CPU time of the process, the median over the steps, and
the least of all rounds beside it. Calls are Python functions of zerokern that a step
enters: a number that no neighbour on the machine disturbs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

CASES = {
    "stage 1, 70 buckets x 10": (1, 70, 10),
    "stage 2, 70 buckets x 10": (2, 70, 10),
    "stage 3, 70 units x 10": (3, 70, 10),
    "stage 2, 1 bucket x 700": (2, 1, 700),
}
"""(stage, units, parameters of a unit)."""
WARMUP, STEPS = 3, 10


def measure(stage: int, units: int, params: int) -> dict[str, float]:
    """Train, and return microseconds of CPU time and calls of a step."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import zerokern

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(64) for _ in range(params))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = x * weight
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(Unit() for _ in range(units))

        def forward(self, x: Tensor) -> Tensor:
            for unit in self.units:
                x = unit(x)
            return x

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model, x = Model(), torch.ones(64)
    optimizer = zerokern.AdamW(
        model.parameters(),
        stage=stage,
        model=model,
        buckets=zerokern.Buckets(bytes=params * 64 * 4),
    )

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    times = []
    for _ in range(STEPS):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    calls = _calls(step, str(Path(zerokern.__file__).resolve().parents[1]))
    dist.destroy_process_group()
    return {"us": 1e6 * statistics.median(times), "calls": calls}


def _calls(step: Any, root: str) -> int:
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        inside = name.startswith((f"{root}/zerokern", f"{root}/kernels"))
        count += event == "call" and inside

    sys.setprofile(profile)
    step()
    sys.setprofile(None)
    return count


def run(checkout: Path, case: str) -> dict[str, float]:
    """Measure one case of a checkout in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", case]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, env=environment, cwd=checkout, capture_output=True, text=True
    )
    if found.returncode:
        raise SystemExit(f"{checkout}, {case}:\n{found.stderr}")
    answer: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, measured too")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*CASES[options.case])))
        return
    checkouts = [Path(__file__).resolve().parents[1]]
    if options.against:
        checkouts.append(options.against.resolve())
    found: dict[tuple[Path, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for case in CASES:
            for checkout in checkouts:
                found.setdefault((checkout, case), []).append(run(checkout, case))
    for case in CASES:
        print(_line(case, [found[checkout, case] for checkout in checkouts]))


def _line(case: str, of_checkouts: list[list[dict[str, float]]]) -> str:
    texts, medians = [], []
    for rounds in of_checkouts:
        times = [row["us"] for row in rounds]
        medians.append(statistics.median(times))
        texts.append(
            f"{medians[-1]:8.0f} us a step (least {min(times):.0f}),"
            f" {rounds[0]['calls']:.0f} calls"
        )
    if len(of_checkouts) == 1:
        return f"{case}: {texts[0]}"
    ratio = medians[0] / medians[1]
    return f"{case}: {texts[0]}; the other {texts[1]}; ratio {ratio:.2f}"


if __name__ == "__main__":
    main()
