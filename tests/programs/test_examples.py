"""The programs in examples/ run as a user runs them, under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import STAGES
from repository import ROOT
from torchrun import TORCHRUN, run_python

EXAMPLES = {
    "causal_lm.py": ["--checkpoint"],
    "moe.py": [],
    "lora.py": [],
    "image.py": [],
    "diffusion.py": [],
}


def run_example(script: str, *arguments: str) -> list[float]:
    """Run an example on two ranks; return the losses that it prints."""
    command = [*TORCHRUN, f"examples/{script}", *arguments]
    printed = run_python(*command, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    steps = [line for line in printed.splitlines() if line.startswith("step")]
    return [float(line.split()[-1]) for line in steps]


@pytest.mark.long
@pytest.mark.parametrize("script", EXAMPLES)
def test_examples_learn_and_every_stage_prints_the_same(
    script: str, tmp_path: Path
) -> None:
    options = [*EXAMPLES[script]]
    if script == "lora.py":
        options += ["--out", str(tmp_path / "adapter")]

    losses = [run_example(script, "--stage", str(stage), *options) for stage in STAGES]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] < 0.9 * losses[0][0]
    if script == "lora.py":
        assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 0


def test_the_example_of_a_language_model_runs() -> None:
    losses = run_example("causal_lm.py", "--stage", "3", "--steps", "20")
    assert losses[-1] < losses[0]


def test_every_example_is_listed_with_its_command() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    there = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert sorted(EXAMPLES) == there
    for script in EXAMPLES:
        assert f"torchrun --nproc-per-node 2 examples/{script}" in listed
        assert len((ROOT / "examples" / script).read_text().splitlines()) < 100
