"""Rates of the machine at hand: a few steps of small models on a few ranks, and the rates that explain their times."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..config import Buckets
from ..optimizer import AdamW
from .decoder import Decoder
from .forecast import Setting, Way, forecast
from .machine import Machine
from .rehearsal import Launch, Trace, Work
from .subject import Subject

STEPS = 12
"""Measured steps of a job; the median counts."""
WARMUP = 3


@dataclass(frozen=True)
class Job:
    """A model and a way to train it, in fp32."""

    layers: int
    width: int
    tokens: int
    stage: int
    bucket: int = Buckets().bytes

    def build(self) -> tuple[Decoder, Tensor]:
        """Return the model and a batch."""
        return Decoder(self.layers, self.width, vocabulary=2048), torch.zeros(1, self.tokens + 1, dtype=torch.int64)

    def trace(self, world: int) -> Trace:
        """Return what a step does."""
        subject = Subject(
            title="", tokens=self.tokens,
            build=lambda: (self.build()[0], lambda model: model.loss(self.build()[1])),
        )  # fmt: skip
        setting = Setting(world=world, buckets=Buckets(bytes=self.bucket))
        return forecast(subject, Way(stage=self.stage), setting).trace


JOBS = [
    Job(2, 256, 128, 1), Job(2, 256, 128, 1, bucket=2**17), Job(8, 128, 64, 3), Job(6, 256, 64, 3),
    Job(2, 768, 32, 1), Job(2, 768, 32, 3), Job(3, 384, 384, 1), Job(4, 384, 256, 3),
]  # fmt: skip
"""Many tokens show the rate of compute, few tokens that of kernels and links, small buckets and units latencies."""


def measure(world: int, jobs: Sequence[Job], *, rounds: int = 2) -> list[float]:
    """Return the seconds of a step of each job on so many ranks of this machine: the slowest rank's, the median step.

    Rounds go through all jobs, so that a noisy minute falls on all of them.
    """
    launch = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, run_id="zerokern", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0,
    )  # fmt: skip
    seconds: list[float] = elastic_launch(launch, measure_here)(list(jobs), rounds)[0]
    return seconds


def measure_here(jobs: Sequence[Job], rounds: int) -> list[float]:
    """Be one of the ranks of `measure`."""
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        times: list[list[float]] = [[] for _ in jobs]
        for _ in range(rounds):
            for job, known in zip(jobs, times, strict=True):
                known += _steps(job, "cuda" if on_gpu else "cpu")
        everybody: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybody, times)
        return [
            statistics.median(max(steps) for steps in zip(*of_job, strict=True))
            for of_job in zip(*everybody, strict=True)
        ]
    finally:
        dist.destroy_process_group()


def _steps(job: Job, device: str) -> list[float]:
    model, text = job.build()
    model, text = model.to(device), text.to(device)
    optimizer = AdamW(model.parameters(), lr=1e-3, stage=job.stage, model=model, buckets=Buckets(bytes=job.bucket))
    times = []
    for _ in range(WARMUP + STEPS):
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        model.loss(text).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times[WARMUP:]


def fit(observed: Sequence[tuple[Trace, int, float]], machine: Machine) -> Machine:
    """Return the machine whose rates explain times best, relative to each.

    Args:
        observed: what was done, on how many ranks, in how many seconds.
        machine: cores, ranks of a node and name are taken from it.
    """
    rows = torch.tensor(
        [[x / seconds for x in _features(trace, world, machine)] for trace, world, seconds in observed],
        dtype=torch.float64,
    )
    costs = non_negative(rows, torch.ones(len(rows), dtype=torch.float64)).clamp(min=1e-30).tolist()
    return Machine(
        compute=1 / costs[0], peak=1 / costs[0], memory=1 / costs[1], per_operation=costs[2], intra=1 / costs[3],
        inter=1 / costs[3], latency=costs[4], per_node=machine.per_node, native_gather=machine.native_gather,
        cores=machine.cores, name=machine.name,
    )  # fmt: skip


def _features(trace: Trace, world: int, machine: Machine) -> list[float]:
    """Return what a step costs, in units of each rate, where ranks share cores and nothing runs beside anything."""
    work = [event for event in trace.events if isinstance(event, Work)]
    launches = [event for event in trace.events if isinstance(event, Launch)]
    crowding = machine.crowding(world)
    return [
        crowding * sum(event.flops for event in work),
        crowding * sum(event.bytes for event in work),
        crowding * sum(event.operations for event in work),
        crowding * sum(sum(machine.split(event, world)) for event in launches),
        len(launches) * machine.hops(world),
    ]


def non_negative(rows: Tensor, values: Tensor) -> Tensor:
    """Return the least squares solution without negative numbers: what would be negative is left out, worst first."""
    scale = rows.norm(dim=0).clamp(min=1e-30)
    kept = list(range(rows.shape[1]))
    while True:
        found = torch.linalg.lstsq(rows[:, kept] / scale[kept], values[:, None], driver="gelsd").solution[:, 0]
        if (found >= 0).all():
            solution = torch.zeros(rows.shape[1], dtype=rows.dtype)
            solution[kept] = found / scale[kept]
            return solution
        del kept[int(found.argmin())]


def calibrate(worlds: Sequence[int] = (2, 3)) -> Machine:
    """Measure this machine. Takes a minute or two on a CPU."""
    machine = here()
    observed = []
    for world in worlds:
        traces = [job.trace(world) for job in JOBS]
        observed += list(zip(traces, [world] * len(JOBS), measure(world, JOBS), strict=True))
    return fit(observed, machine)


def here() -> Machine:
    """Return what is known of this machine without measuring."""
    if torch.cuda.is_available():
        return Machine(per_node=torch.cuda.device_count(), name=torch.cuda.get_device_name())
    cores = len(os.sched_getaffinity(0))
    return Machine(
        per_node=2**16, cores=float(cores), native_gather=False, name=f"{cores} cores, {platform.machine()}, gloo"
    )
