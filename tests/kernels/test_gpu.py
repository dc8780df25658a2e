"""The whole step on GPUs over NCCL, bit for bit against CPU ranks over gloo: `pytest -m
gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu_worker
import pytest
import torch
from repository import ROOT
from torch import nn

import zerokern
from zerokern.plan.decoder import Decoder
from zerokern.plan.forecast import Setting, Strategy, forecast
from zerokern.plan.workload import Workload

WORKER = Path(gpu_worker.__file__)


def _run(device: str, folder: Path) -> list[dict]:
    """Return what each of two ranks on devices of this kind made of every case."""
    folders = (str(ROOT), str(WORKER.parent))
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(folders),
    )
    if device == "cuda":
        # Two ranks on one GPU, where NCCL is recent enough.
        environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        environment.pop("TRITON_INTERPRET", None)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(WORKER),
    ]
    command = [*launch, "--device", device, "--out", str(folder)]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return _run("cpu", tmp_path_factory.mktemp("cpu"))


def test_the_worker_gives_the_same_bits_on_every_rank_stage_and_way(
    on_cpu: list[dict],
) -> None:
    """What the GPUs are compared with. Nor does it matter when things happen."""
    first, second = on_cpu
    for dtype, stage, way in gpu_worker.CASES:
        assert all(
            map(torch.equal, first[dtype, stage, way], second[dtype, stage, way])
        )
        assert all(
            map(torch.equal, first[dtype, stage, way], first[dtype, 1, "by hand"])
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_give_the_bits_of_the_cpu(on_cpu: list[dict], tmp_path: Path) -> None:
    for result in _run("cuda", tmp_path):
        for case in gpu_worker.CASES:
            assert all(map(torch.equal, result[case], on_cpu[0][case])), case


RECIPES = [
    zerokern.Precision(master=master, moments=moments, gradients=torch.bfloat16)
    for master in ("fp32", "split32", "split24", "none")
    for moments in ("fp32", "bf16", "8bit")
]


class Training:
    """Three parameters, whose gradients, learning rate, decay and loss scale are
    written to before each step."""

    def __init__(self, precision: zerokern.Precision, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [
            nn.Parameter(torch.randn(n, generator=generator).bfloat16().to(device))
            for n in (64, 1000, 5)
        ]
        for param in self.params:
            param.grad = torch.ones_like(param)
        self.lr = torch.tensor(1e-2, device=device)
        self.weight_decay = torch.tensor(0.1, device=device)
        self.scale = torch.ones((), device=device)
        self.optimizer = zerokern.AdamW(
            self.params,
            lr=self.lr,
            weight_decay=self.weight_decay,
            max_grad_norm=1.0,
            precision=precision,
        )

    def prepare(self, step: int) -> None:
        """Write what a step reads."""
        generator = torch.Generator().manual_seed(step)
        self.lr.fill_(1e-2 / step)
        self.weight_decay.fill_(0.1 * step)
        self.scale.fill_(2.0**step)
        for param in self.params:
            gradient = torch.randn(param.shape, generator=generator)
            param.grad.copy_(gradient * 2.0**step)

    def step(self) -> None:
        self.optimizer.unscale_(self.scale)
        self.optimizer.step()


def assert_same_training(actual: Training, expected: Training) -> None:
    """Compare parameters and states."""
    for ours, theirs in zip(actual.params, expected.params, strict=True):
        assert torch.equal(ours, theirs)
    states = actual.optimizer.full_state_dict()["state"]
    for index, entry in expected.optimizer.full_state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(states[index][name], value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", RECIPES, ids=lambda p: f"{p.master}-{p.moments}")
def test_a_captured_step_is_a_step(precision: zerokern.Precision) -> None:
    """Learning rate, decay and loss scale are tensors, which replays read again; so are
    the gradients."""
    eager = Training(precision, "cuda")
    captured = Training(precision, "cuda")
    graph = torch.cuda.CUDAGraph()
    for step in range(1, 6):
        eager.prepare(step)
        eager.step()
        captured.prepare(step)
        if step == 1:
            captured.step()
            continue
        if step == 2:
            # Records, and runs nothing.
            with torch.cuda.graph(graph):
                captured.step()
        graph.replay()
    torch.cuda.synchronize()
    assert_same_training(captured, eager)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_planned_peak_is_the_allocators() -> None:
    """Within 10 %: of 2 GiB, what libraries take for workspaces and what the allocator
    rounds up are little."""

    def build() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        return Decoder(4, 1024).bfloat16(), lambda model: model.loss(
            torch.zeros(2, 513, dtype=torch.int64)
        )

    planned = forecast(
        Workload(title="", build=build, tokens=1024),
        Strategy(stage=1),
        Setting(world=1),
    )
    assert planned.peak is not None
    assert planned.peak.bytes > 2**31
    model = Decoder(4, 1024).bfloat16().cuda()
    text = torch.zeros(
        2,
        513,
        dtype=torch.int64,
        device="cuda",
    )
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-3)
    model.loss(text)  # libraries take their workspaces
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(text).backward()
        optimizer.step()
    assert planned.peak.bytes == pytest.approx(
        torch.cuda.max_memory_allocated(),
        rel=0.1,
    )
