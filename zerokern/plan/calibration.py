"""The machine at hand: a few steps of small models on a few ranks, timed, and the rates
that explain the times."""

from __future__ import annotations

import itertools
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
from .forecast import Setting, Strategy, forecast
from .machine import Machine
from .rates import fit
from .rehearsal import Trace
from .workload import Workload

STEPS = 8
"""Measured steps of a job in a round."""
WARMUP = 2
ROUNDS = 4


@dataclass(frozen=True)
class Job:
    """A model and how it is trained."""

    layers: int
    width: int
    tokens: int
    stage: int
    bucket: int = Buckets().bytes
    dtype: torch.dtype = torch.float32

    def model(self) -> Decoder:
        """Return the model."""
        return Decoder(self.layers, self.width, vocabulary=2048).to(self.dtype)

    def text(self) -> Tensor:
        """Return a batch."""
        return torch.zeros(1, self.tokens + 1, dtype=torch.int64)

    def trace(self, world: int) -> Trace:
        """Return what a step does."""
        workload = Workload(
            title="",
            tokens=self.tokens,
            build=lambda: (self.model(), lambda model: model.loss(self.text())),
        )
        setting = Setting(world=world, buckets=Buckets(bytes=self.bucket))
        return forecast(workload, Strategy(stage=self.stage), setting).trace


JOBS = [
    Job(2, 256, 128, 1),
    Job(2, 256, 128, 1, bucket=2**17),
    Job(8, 128, 64, 3),
    Job(6, 256, 64, 3),
    Job(2, 768, 32, 1),
    Job(2, 512, 32, 3),
    Job(3, 384, 384, 1),
    Job(4, 384, 256, 3),
]
"""Many tokens show the rate of compute, few tokens that of kernels and links, small
buckets and units latencies.

Units stay well below 32 MiB: glibc maps larger blocks afresh every time, page fault by
page fault, which a step of a larger model on a CPU pays on top of what is predicted.
"""
JOBS_OF_GPUS = [
    Job(layers, width, tokens, stage, bucket, torch.bfloat16)
    for layers, width, tokens, stage, bucket in (
        (2, 512, 1024, 1, 2**18),
        (16, 512, 1024, 3, 2**25),
        (4, 2048, 256, 1, 2**25),
        (4, 2048, 256, 3, 2**25),
        (4, 2048, 4096, 1, 2**25),
        (4, 2048, 4096, 3, 2**25),
        (2, 4096, 8192, 1, 2**25),
        (2, 4096, 8192, 3, 2**25),
    )
]
"""What takes a CPU a second is all latency on a GPU."""


def measure(
    worlds: Sequence[int], jobs: Sequence[Job], *, rounds: int = ROUNDS
) -> dict[int, list[float]]:
    """Return, for each number of ranks of this machine, the seconds of a step of each
    job.

    That is the lower quartile over steps of the slowest rank: what else the machine
    does makes steps longer, never shorter. Rounds go through all numbers of ranks and
    all jobs, so that a noisy minute falls on all of them.
    """
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=max(worlds),
        run_id="zerokern",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    seconds: dict[int, list[float]] = elastic_launch(launch, measure_here)(
        list(worlds), list(jobs), rounds
    )[0]
    return seconds


def measure_here(
    worlds: Sequence[int], jobs: Sequence[Job], rounds: int = ROUNDS
) -> dict[int, list[float]]:
    """Be one of the ranks that measure; as many were launched as the largest world has,
    or more."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        groups = {world: dist.new_group(list(range(world))) for world in worlds}
        times: dict[tuple[int, int], list[float]] = {
            (w, j): [] for w in worlds for j in range(len(jobs))
        }
        for _, (world, index) in itertools.product(range(rounds), times):
            if dist.get_rank() < world:
                times[world, index] += _steps(jobs[index], device, groups[world])
            dist.barrier()  # those who do not take part wait without computing
        everybody: list[dict[tuple[int, int], list[float]]] = [
            {} for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(everybody, times)
        return {
            world: [
                _quartile([of[world, j] for of in everybody[:world]])
                for j in range(len(jobs))
            ]
            for world in worlds
        }
    finally:
        dist.destroy_process_group()


def _quartile(steps_of_ranks: Sequence[Sequence[float]]) -> float:
    slowest = [max(steps) for steps in zip(*steps_of_ranks, strict=True)]
    quartile: float = statistics.quantiles(slowest, n=4)[0]
    return quartile


def _steps(job: Job, device: str, group: dist.ProcessGroup) -> list[float]:
    model = job.model().to(device)
    text = job.text().to(device)
    optimizer = AdamW(
        model.parameters(),
        lr=1e-3,
        stage=job.stage,
        model=model,
        buckets=Buckets(bytes=job.bucket),
        process_group=group,
    )
    times = []
    for _ in range(WARMUP + STEPS):
        dist.barrier(group)
        begun = time.perf_counter()
        optimizer.zero_grad()
        model.loss(text).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return times[WARMUP:]


def calibrate() -> Machine | None:
    """Measure this machine, or, launched by torchrun on all of them, the cluster. Takes
    minutes.

    Returns:
        what was found; under torchrun on rank 0 only.

    Raises:
        ValueError: there is one rank or GPU, between which nothing can be sent.
    """
    machine = here()
    launched = dist.is_torchelastic_launched()
    ranks = (
        int(os.environ["WORLD_SIZE"])
        if launched
        else machine.per_node
        if machine.cores is None
        else 3
    )
    if ranks < 2:
        raise ValueError(
            f"{ranks} {'rank' if launched else 'GPU'}: links between ranks are"
            " measured, so at least two are needed; or give --compute, --intra and"
            " --inter by hand"
        )
    worlds = sorted(
        {world for world in (2, machine.per_node, ranks) if 2 <= world <= ranks}
    )
    jobs = JOBS_OF_GPUS if machine.cores is None else JOBS
    measured = measure_here(worlds, jobs) if launched else measure(worlds, jobs)
    if launched and int(os.environ["RANK"]) > 0:
        return None
    return fit(
        [
            (job.trace(w), w, took)
            for w in worlds
            for job, took in zip(jobs, measured[w], strict=True)
        ],
        machine,
    )


def here() -> Machine:
    """Return what is known of this machine, and of the others if torchrun launched this
    process, without measuring."""
    local, world = (
        int(os.environ.get(name, 0)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")
    )
    if torch.cuda.is_available():
        return Machine(
            per_node=local or torch.cuda.device_count(),
            name=torch.cuda.get_device_name(),
        )
    cores = len(os.sched_getaffinity(0))
    return Machine(
        per_node=local if local < world else ALL,
        cores=float(cores),
        native_gather=False,
        name=f"{cores} cores, {platform.machine()}, gloo",
    )


ALL = 2**16
"""Ranks of a node, where there is only one."""
