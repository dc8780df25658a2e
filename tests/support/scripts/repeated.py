"""A unit is used several times."""

from __future__ import annotations

import models
from oracle import Run
from registry import script


@script(exact=False, build=lambda: models.forked().bfloat16())
def a_unit_is_used_twice_in_bf16(run: Run) -> None:
    """Both uses count, whatever the precision; compared by moments, which are sums
    of gradients."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 1, 0, 1, 1))
        run.step()
