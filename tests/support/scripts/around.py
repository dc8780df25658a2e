"""Around forward and backward: closures, schedules, evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from oracle import Run
from registry import script
from torch.optim import lr_scheduler


@script()
def closure(run: Run) -> None:
    """Forward and backward inside of step."""
    for step in range(3):

        def compute(step: int = step) -> torch.Tensor:
            run.optimizer.zero_grad()
            run.backward(step)
            return torch.tensor(float(step))

        run.seen.append(run.optimizer.step(compute))


def _scheduled(
    run: Run, make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    scheduler = make(run.optimizer)
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        scheduler.step()
    run.seen.append(torch.tensor(run.optimizer.param_groups[0]["lr"]))


@script()
def scheduler_lambda(run: Run) -> None:
    _scheduled(
        run,
        lambda optimizer: lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (step + 1)
        ),
    )


@script()
def scheduler_one_cycle_moves_betas(run: Run) -> None:
    _scheduled(
        run,
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=6
        ),
    )


@script()
def scheduler_cosine(run: Run) -> None:
    _scheduled(
        run, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    )


@script()
def evaluation_between_steps(run: Run) -> None:
    run.evaluate(50)
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.evaluate(51)
        run.step()
        run.evaluate(52)


@script()
def evaluation_between_backwards(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(2 * step)
        run.evaluate(51)
        run.backward(2 * step + 1)
        run.step()
