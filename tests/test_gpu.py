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
from torch import nn

import zerokern
from zerokern.plan.decoder import Decoder
from zerokern.plan.forecast import Setting, Strategy, forecast
from zerokern.plan.workload import Workload

WORKER = Path(gpu_worker.__file__)


def _run(device: str, folder: Path) -> list[dict]:
    environment = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([str(WORKER.parents[1]), str(WORKER.parent)]),
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", RECIPES, ids=lambda p: f"{p.master}-{p.moments}")
def test_a_captured_step_is_a_step(precision: zerokern.Precision) -> None:
    """Row 48: learning rate, decay and loss scale are tensors, which replays read
    again; so are the gradients."""

    def built() -> tuple[list[nn.Parameter], zerokern.AdamW, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        values = [
            torch.randn(n, generator=generator).bfloat16().cuda() for n in (64, 1000, 5)
        ]
        params = [nn.Parameter(value) for value in values]
        knobs = {
            name: torch.tensor(value, device="cuda")
            for name, value in (("lr", 1e-2), ("weight_decay", 0.1))
        }
        for param in params:
            param.grad = torch.ones_like(param)
        return (
            params,
            zerokern.AdamW(params, **knobs, max_grad_norm=1.0, precision=precision),
            knobs,
        )

    def prepare(
        step: int,
        params: list[nn.Parameter],
        knobs: dict[str, torch.Tensor],
        scale: torch.Tensor,
    ) -> None:
        generator = torch.Generator().manual_seed(step)
        knobs["lr"].fill_(1e-2 / step)
        knobs["weight_decay"].fill_(0.1 * step)
        scale.fill_(2.0**step)
        for param in params:
            param.grad.copy_(torch.randn(param.shape, generator=generator) * 2.0**step)

    eager, captured = built(), built()
    scales = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    for step in range(1, 6):
        for (params, optimizer, knobs), scale in zip(
            (eager, captured), scales, strict=True
        ):
            prepare(step, params, knobs, scale)
            if optimizer is eager[1] or step == 1:
                optimizer.unscale_(scale)
                optimizer.step()
        if step == 2:
            with torch.cuda.graph(graph):  # records, and runs nothing
                captured[1].unscale_(scales[1])
                captured[1].step()
        if step >= 2:
            graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(captured[0], eager[0], strict=True):
        assert torch.equal(ours, theirs)
    mine, its = (
        captured[1].full_state_dict()["state"],
        eager[1].full_state_dict()["state"],
    )
    for index, entry in its.items():
        assert all(
            torch.equal(mine[index][name], value) for name, value in entry.items()
        )


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
    assert planned.peak is not None and planned.peak.bytes > 2**31
    model = Decoder(4, 1024).bfloat16().cuda()
    text = torch.zeros(2, 513, dtype=torch.int64, device="cuda")
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-3)
    model.loss(text)  # libraries take their workspaces
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(text).backward()
        optimizer.step()
    assert planned.peak.bytes == pytest.approx(
        torch.cuda.max_memory_allocated(), rel=0.1
    )
