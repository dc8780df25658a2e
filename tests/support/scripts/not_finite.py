"""Gradients that are not finite on one rank."""

from __future__ import annotations

import math

from oracle import Run
from registry import script


def _with_bad_gradient(run: Run, value: float) -> None:
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    if not run.torch:
        run.backward(
            1,
            lambda rank: run.loss(1, rank) * (value if rank == run.ranks - 1 else 1.0),
        )
        run.step()
    for step in range(2, 4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def infinite_on_one_rank_skips_all(run: Run) -> None:
    _with_bad_gradient(run, math.inf)


@script()
def nan_on_one_rank_skips_all(run: Run) -> None:
    _with_bad_gradient(run, math.nan)


@script(max_grad_norm=0.5)
def nan_on_one_rank_skips_all_with_clipping(run: Run) -> None:
    _with_bad_gradient(run, math.nan)


@script()
def nan_clipped_by_a_call_skips_one_step(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        if step != 1:
            run.backward(step)
            run.clip(0.3)
            run.step()
        elif not run.torch:
            run.backward(step, lambda rank: run.loss(1, rank) * math.nan)
            run.optimizer.clip_grad_norm_(0.3)
            run.step()
