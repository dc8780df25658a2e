"""Ranks whose sets iterate in different orders: nothing that they agree on may depend
on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from at_rest import same_on_all_ranks
from oracle import REDUCED_SUMS, STAGES, Run, apart, differing
from repository import ROOT, SUPPORT, TESTS

import zerokern

STEPS = 20
PROGRAM = """
import conftest, sys
import test_hash_seeds
test_hash_seeds.train_as_a_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""

Results = dict[int, dict[str, Any]]
"""Of one rank, by stage."""


def train(run: Run) -> dict[str, Any]:
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward(step, use=("both", "left", "right")[step % 3])
        run.step()
    return run.result()


def train_as_a_rank(of_rank: int, at: int, folder: str) -> None:
    """Train in every stage, with buckets of unequal size, and save what came of it."""
    store = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=of_rank, world_size=at)
    results = {}
    for stage in STAGES:
        run = Run(stage, at, buckets=zerokern.Buckets(bytes=3000))
        results[stage] = train(run) | {"hash": hash("a")}
    torch.save(results, Path(folder) / f"{of_rank}.pt")
    dist.destroy_process_group()


def launch(of_rank: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a new interpreter with a hash seed of its own."""
    path = os.pathsep.join(map(str, (Path(__file__).parent, TESTS, SUPPORT, ROOT)))
    arguments = [str(of_rank), "2", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, *arguments],
        env={**os.environ, "PYTHONHASHSEED": str(1 + of_rank), "PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What two ranks with different hash seeds made of the script."""
    folder = tmp_path_factory.mktemp("hashed")
    processes = [launch(of_rank, folder) for of_rank in range(2)]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(2)]


@pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
def test_the_order_of_sets_does_not_matter(hashed: list[Results], stage: int) -> None:
    first, second = (results[stage] for results in hashed)
    assert first["hash"] != second["hash"]
    assert same_on_all_ranks([first["log"], second["log"]])
    sizes = {call.elements for call in first["log"] if call.op == "reduce_scatter"}
    assert len(sizes) > 1

    assert differing(first["params"], second["params"]) == []
    expected = train(Run(None, 2))["params"]
    assert apart(first["params"], expected, 5 * REDUCED_SUMS) == {}
