"""Attacks on the batch: gradients with respect to inputs, before the gradients that
train. They reduce nothing (`scripts/test_reductions_of_scripts.py`)."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor
from units import Stack, batch, loss_script, seeded, squares

import zerokern

SMOOTH = {"build": seeded(Stack), "eps": 1e-3}
ROUNDS = 3


def attacked(model: Any, x: Tensor) -> Tensor:
    """Return a batch that was moved uphill by signed steps."""
    for _ in range(ROUNDS):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(squares(model(x)), x)
        x = x + 0.1 * slope.sign()
    return x.detach()


@loss_script(Stack)
def projected_gradient_ascent(model: Any, x: Tensor) -> Tensor:
    return squares(model(attacked(model, x)))


@loss_script(Stack)
def free_noise_that_learns(model: Any, x: Tensor) -> Tensor:
    """The noise has a leaf and an optimizer of its own."""
    noise = torch.zeros_like(x, requires_grad=True)
    optimizer = torch.optim.SGD([noise], lr=0.5)
    for _ in range(ROUNDS):
        (noise.grad,) = torch.autograd.grad(-squares(model(x + noise)), noise)
        optimizer.step()
    return squares(model(x + noise.detach()))


@loss_script(Stack)
def virtual_adversarial_training(model: Any, x: Tensor) -> Tensor:
    """The direction that changes the output most, of a model whose output is kept."""
    with torch.no_grad():
        before = model(x)
    direction = torch.full_like(x, 0.1).requires_grad_()
    distance = (model(x + direction) - before).square().mean()
    (slope,) = torch.autograd.grad(distance, direction)
    worst = 0.3 * slope / (slope.norm() + 1e-6)
    return squares(model(x)) + (model(x + worst) - before).square().mean()


@script(buckets=zerokern.Buckets(bytes=600, update_in_backward=True), **SMOOTH)
def projected_gradient_ascent_before_updates_in_backward(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, s=step: squares(
                run.model(attacked(run.model, batch(s, rank)))
            ),
        )
        run.step()


@script(**SMOOTH)
def an_attack_between_backward_and_step(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, lambda rank, s=step: squares(run.model(batch(s, rank))))
        for rank in run.each():
            attacked(run.model, batch(step, rank))
        run.step()


NAMES = [
    "projected_gradient_ascent",
    "free_noise_that_learns",
    "virtual_adversarial_training",
    "projected_gradient_ascent_before_updates_in_backward",
    "an_attack_between_backward_and_step",
]
