"""ZEROKERN_CHECK runs a loop in plain torch and as it is, and says where they part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from checked_loops import FAULTS, LOOPS, NONE, everything_said
from marks import in_stages
from registry import cases_of
from repository import ROOT
from torchrun import TORCHRUN

case = cases_of("checks")

at_worlds = pytest.mark.parametrize("at", ranks.worlds(2, rarely=(1, 3)))


@case(stages=(0,))
def said(_: int) -> dict[tuple[str, str, int], str]:
    return everything_said()


@at_worlds
@in_stages
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_trains_as_under_torch_is_passed(
    name: str, stage: int, at: int
) -> None:
    for results in case.done(at)["said", 0]:
        assert results[name, NONE, stage] == ""


@at_worlds
@in_stages
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_name(fault: str, stage: int, at: int) -> None:
    """What zerokern once did, or could do, to a loop."""
    name, _, needed, words = FAULTS[fault]
    for results in case.done(at)["said", 0]:
        if at >= needed:
            clause = results[name, fault, stage]
            assert clause.startswith("ZEROKERN_CHECK: in step ")
            assert words in clause


# ------------------------------------------------------------------------- real scripts


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from zerokern import AdamW

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
optimizer = AdamW(model.parameters(), lr=1e-2, stage=int(sys.argv[1]), model=model)
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.clip_grad_norm_(0.1)
    {body}
    optimizer.step()
print("went on")
dist.destroy_process_group()
"""


def run(folder: Path, body: str, *arguments: str) -> tuple[int, str]:
    """Run a script without seeds on two ranks under the check."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(body=body))
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(script), *arguments],
        cwd=ROOT,
        env={**os.environ, "ZEROKERN_CHECK": "3"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_script_is_compared_and_ended(tmp_path: Path) -> None:
    code, output = run(tmp_path, "pass", "3", "10")
    assert code == 0, output
    assert "3 steps of 4 parameters agree with plain torch" in output
    assert "went on" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "steps", "words"),
    [
        (
            "optimizer.param_groups[0]['lr'] = time.time() % 1",
            "10",
            "not do the same twice",
        ),
        ("pass", "2", "the script ended before its step 3"),
    ],
)
def test_what_cannot_be_compared_is_said(
    tmp_path: Path, body: str, steps: str, words: str
) -> None:
    """A loop that depends on the time; a script that ends before."""
    code, output = run(tmp_path, f"import time; {body}", "1", steps)
    assert code == 1, output
    assert words in output
