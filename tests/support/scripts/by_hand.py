"""Gradients that a user assigns, replaces or drops."""

from __future__ import annotations

import torch
from oracle import Run
from registry import script


def _hand(shape: torch.Size, step: int, rank: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(100 * step + rank)
    )


@script()
def every_gradient_set_by_hand(run: Run) -> None:
    for step in range(3):
        for name, param in run.model.named_parameters():
            run.set_gradient(
                name,
                lambda rank, shape=param.shape, step=step: _hand(shape, step, rank),
            )
        run.step()


@script()
def one_gradient_replaced_after_backward(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.set_gradient(
            "head.bias",
            lambda rank, step=step: _hand(run.model.head.bias.shape, step, rank),
        )
        run.step()


@script()
def one_gradient_dropped_before_the_step(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        if step == 1:
            run.model.blocks[0].up.weight.grad = None
        run.step()
