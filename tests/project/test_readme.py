"""Every Python block of the README runs, in order, in a process of its own and on two
ranks."""

from __future__ import annotations

import re

import pytest
import ranks
import torch
from repository import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def _run_blocks() -> float:
    """Run the blocks one after the other in one namespace, which holds what they take
    for granted; return the loss."""
    torch.manual_seed(0)
    names = {
        "model": torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
    }
    names |= {"inputs": torch.randn(4, 8), "targets": torch.randn(4, 1)}  # type: ignore[dict-item]
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, Python block {number + 1}", "exec"), names)
    return float(names["loss"].detach())


@pytest.mark.parametrize("world", [1, 2])
def test_python_blocks_run(world: int) -> None:
    assert BLOCKS
    losses = ranks.run(world, _run_blocks)
    assert all(loss == losses[0] for loss in losses)
