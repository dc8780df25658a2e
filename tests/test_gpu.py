"""The whole step on GPUs over NCCL, bit for bit against CPU ranks over gloo: `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_worker
import pytest
import torch

WORKER = Path(gpu_worker.__file__)


def _run(device: str, folder: Path) -> list[dict]:
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(WORKER.parents[1]), str(WORKER.parent)])
    )
    if device == "cuda":
        environment |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # two ranks on one GPU, where NCCL is recent enough
        environment.pop("TRITON_INTERPRET", None)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    command = [*launch, "--device", device, "--out", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return _run("cpu", tmp_path_factory.mktemp("cpu"))


def test_the_worker_gives_the_same_bits_on_every_rank_and_stage(on_cpu: list[dict]) -> None:
    """What the GPUs are compared with."""
    first, second = on_cpu
    for dtype, stage in gpu_worker.CASES:
        assert all(map(torch.equal, first[dtype, stage], second[dtype, stage]))
        assert all(map(torch.equal, first[dtype, stage], first[dtype, 1]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_give_the_bits_of_the_cpu(on_cpu: list[dict], tmp_path: Path) -> None:
    for result in _run("cuda", tmp_path):
        for case in gpu_worker.CASES:
            assert all(map(torch.equal, result[case], on_cpu[0][case])), case
