"""Rates from measured steps, and what they predict."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import nodes
import pytest
import torch
from nodes import OTHERS

from zerokern.plan import calibration
from zerokern.plan.calibration import ALL, JOBS, Job, calibrate, here, measure
from zerokern.plan.machine import Machine
from zerokern.plan.rates import fit, non_negative
from zerokern.plan.rehearsal import Launch, Trace, Wait, Work
from zerokern.plan.replay import replay

TRUE = Machine(
    compute=50e9,
    memory=9e9,
    per_operation=5e-6,
    intra=1.5e9,
    inter=1.5e9,
    latency=3e-4,
    per_node=64,
    cores=2.0,
    native_gather=False,
)
ERROR = 0.15


def random_trace(seed: int, world: int) -> Trace:
    draw = random.Random(seed)
    trace = Trace()
    for number in range(draw.randrange(4, 60)):
        op = draw.choice(("all_gather", "reduce_scatter"))
        trace.events.append(Launch(number, op, world, draw.randrange(10**4, 10**7)))
        work = Work(
            "forward",
            flops=draw.randrange(10**9),
            bytes=draw.randrange(10**8),
            operations=draw.randrange(99),
        )
        rest = [work, Wait(number)]
        trace.events += rest if draw.random() < 0.7 else reversed(rest)
    return trace


@pytest.mark.parametrize(
    "true",
    [
        TRUE,
        replace(TRUE, per_node=2, cores=1.0, inter=0.1e9),
        replace(TRUE, cores=16.0),
        replace(
            TRUE, cores=None, native_gather=True, latency=2e-4, per_node=2, inter=0.5e9
        ),
    ],
    ids=["shared-cores", "shared-cores-slow-link", "many-cores", "gpus"],
)
def test_rates_are_found_again(true: Machine) -> None:
    """From times that a machine of known rates would take, also for ranks and traces
    that were not seen."""
    traces = [
        (random_trace(seed, world), world) for world in (2, 3) for seed in range(20)
    ]
    unknown = replace(
        true,
        compute=1.0,
        memory=1.0,
        per_operation=1.0,
        intra=1.0,
        inter=1.0,
        latency=1.0,
    )
    measured = [
        (trace, world, replay(trace, true, world).step) for trace, world in traces
    ]
    found = fit(measured, unknown)
    for name in ("compute", "memory", "per_operation", "intra", "latency", "inter"):
        expected = pytest.approx(getattr(true, name), rel=1e-3)
        assert getattr(found, name) == expected, name
    unseen = random_trace(99, 4)
    expected = pytest.approx(replay(unseen, true, 4).step, rel=1e-3)
    assert replay(unseen, found, 4).step == expected


def test_no_rate_is_negative() -> None:
    rows = torch.tensor([[1, 1], [1, 2], [1, 3]], dtype=torch.float64)
    rising = torch.tensor([2, 3, 4], dtype=torch.float64)
    falling = torch.tensor([3, 2, 1], dtype=torch.float64)
    assert non_negative(rows, rising).tolist() == pytest.approx([1, 1])
    assert non_negative(rows, falling).tolist() == pytest.approx([2, 0])


def test_a_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    TRUE.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == TRUE
    (tmp_path / "machine.json").write_text('{"compute": 1, "speed": 2}')
    with pytest.raises(ValueError, match=r"is no machine file.*--calibrate"):
        Machine.load(tmp_path / "machine.json")


@pytest.mark.parametrize(
    ("local", "ranks", "worlds"),
    [
        (0, 0, [2, 3]),
        (2, 4, [2, 4]),
        (1, 3, [2, 3]),
        (3, 3, [2, 3]),
        (8, 16, [2, 8, 16]),
    ],
)
def test_it_measures_the_ranks_that_are_there(
    local: int, ranks: int, worlds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 and 3 ranks of this machine; under torchrun 2, those of a node and all, and
    rank 0 has the result."""
    asked: list[Sequence[int]] = []

    def measure(worlds: Sequence[int], jobs: Sequence[Job]) -> dict[int, list[float]]:
        asked.append(worlds)
        return {world: [0.1] * len(jobs) for world in worlds}

    monkeypatch.setattr(calibration, "JOBS", [JOBS[0]])
    monkeypatch.setattr(calibration, "measure_here" if ranks else "measure", measure)
    if ranks:
        launched = {
            "TORCHELASTIC_RUN_ID": 1,
            "RANK": 0,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": local,
        }
        for name, value in launched.items():
            monkeypatch.setenv(name, str(value))
    machine = calibrate()
    assert asked == [worlds]
    assert machine is not None and machine.cores is not None
    assert machine.per_node == (local if local < ranks else ALL)
    if ranks:
        monkeypatch.setenv("RANK", "1")
        assert calibrate() is None


def test_one_rank_cannot_be_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(
        ValueError, match=r"1 rank: .* at least two are needed; or give --compute"
    ):
        calibrate()


@pytest.mark.long
def test_two_and_three_ranks_predict_four_and_other_sizes() -> None:
    """Step times, each within 15 %, measured in one interleaved run on this machine."""
    assert misses(here(), measure((2, 3, 4), JOBS + OTHERS)) == {}


@pytest.mark.long
@pytest.mark.skipif(nodes.missing() != "", reason=nodes.missing())
def test_they_do_so_over_a_slow_link(tmp_path: Path) -> None:
    """Two nodes of two ranks and one core each: the third rank is the first that sends
    over the link."""
    machine, measured = nodes.measure(tmp_path, "1gbit", rounds=2)
    assert misses(Machine.load(machine), measured) == {}


def misses(
    machine: Machine, measured: Mapping[int, Sequence[float]]
) -> dict[str, float]:
    """Fit to JOBS on 2 and 3 ranks; return predicted / measured where that is off, on 4
    ranks or of OTHERS."""
    times = {
        (world, job): took
        for world, of_jobs in measured.items()
        for job, took in zip(JOBS + OTHERS, of_jobs, strict=True)
    }
    traces = {(world, job): job.trace(world) for world, job in times}
    known = [(world, job) for world, job in times if world != 4 and job not in OTHERS]
    fitted = fit([(traces[key], key[0], times[key]) for key in known], machine)
    ratios = {
        (world, job): replay(traces[world, job], fitted, world).step / took
        for (world, job), took in times.items()
    }

    print(fitted)
    for (world, job), ratio in ratios.items():
        print(f"{world} ranks, {job}: {ratio:.3f}")
    return {
        f"{world} ranks, {job}": ratio
        for (world, job), ratio in ratios.items()
        if (world, job) not in known and abs(ratio - 1) > ERROR
    }
