"""Rates from measured steps, and what they predict."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zerokern.plan.calibration import JOBS, Job, fit, here, measure, non_negative
from zerokern.plan.machine import Machine
from zerokern.plan.rehearsal import Launch, Trace, Wait, Work
from zerokern.plan.replay import replay

TRUE = Machine(
    compute=50e9, memory=9e9, per_operation=5e-6, intra=1.5e9, inter=1.5e9, latency=3e-4, per_node=64, cores=2.0,
    native_gather=False,
)  # fmt: skip
OTHERS = [Job(3, 320, 96, 1), Job(3, 320, 96, 3), Job(8, 448, 64, 1), Job(8, 448, 64, 3)]
"""Models and batches that are not among JOBS."""
ERROR = 0.15


def random_trace(seed: int, world: int) -> Trace:
    draw = random.Random(seed)
    trace = Trace()
    for number in range(draw.randrange(4, 60)):
        trace.events.append(Launch(number, "all_gather", world, draw.randrange(10**4, 10**7)))
        work = Work("forward", flops=draw.randrange(10**9), bytes=draw.randrange(10**8), operations=draw.randrange(99))
        trace.events += [work, Wait(number)]
    return trace


def test_rates_are_found_again() -> None:
    """From times that a machine of known rates would take, also for ranks and traces that were not seen."""
    traces = [(random_trace(seed, world), world) for world in (2, 3) for seed in range(8)]
    found = fit(
        [(trace, world, replay(trace, TRUE, world).step) for trace, world in traces], replace(TRUE, compute=1.0)
    )
    for name in ("compute", "memory", "per_operation", "intra", "latency"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    unseen = random_trace(99, 4)
    assert replay(unseen, found, 4).step == pytest.approx(replay(unseen, TRUE, 4).step, rel=1e-3)


def test_no_rate_is_negative() -> None:
    rows = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    assert non_negative(rows, torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)).tolist() == pytest.approx([1, 1])
    falling = non_negative(rows, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    assert falling.tolist() == pytest.approx([2, 0])


def test_a_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    TRUE.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == TRUE
    (tmp_path / "machine.json").write_text('{"compute": 1, "speed": 2}')
    with pytest.raises(ValueError, match=r"is no machine file.*--calibrate"):
        Machine.load(tmp_path / "machine.json")


@pytest.mark.long
def test_two_and_three_ranks_predict_four_and_other_sizes() -> None:
    """Step times, each within 15 %, in one run on this machine."""
    observed = []
    for world in (2, 3):
        times = measure(world, JOBS)
        observed += [(job.trace(world), world, seconds) for job, seconds in zip(JOBS, times, strict=True)]
    machine = fit(observed, here())
    wrong = {}
    for world, jobs in ((4, JOBS), (3, OTHERS)):
        for job, seconds in zip(jobs, measure(world, jobs), strict=True):
            ratio = replay(job.trace(world), machine, world).step / seconds
            if abs(ratio - 1) > ERROR:
                wrong[world, job] = ratio
    assert wrong == {}
