"""Phases and routes through different units."""

from __future__ import annotations

import models
import torch
from oracle import Run
from registry import script
from torch import nn


@script()
def phases_with_different_parts(run: Run) -> None:
    """Train, evaluate and train again, each through other units; nothing is left
    after any phase."""
    for step, (trained, evaluated) in enumerate(
        [((0,), (1,)), ((1, 0), ()), ((), (0, 1)), ((1,), (1, 0))]
    ):
        run.optimizer.zero_grad()
        run.backward(step, order=trained)
        run.step()
        run.rest()
        with torch.no_grad():
            tokens, targets = models.batch(100 + step)
            logits = run.model(
                tokens, order=evaluated, use="left" if step % 2 else "right"
            )
            run.seen.append(
                nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            )
        run.rest()


@script()
def evaluation_with_gradients_on(run: Run) -> None:
    """A forward whose graph is dropped; the step after it is like any other."""
    for step in range(4):
        run.optimizer.zero_grad()
        tokens, targets = models.batch(100 + step)
        logits = run.model(tokens, order=(step % 2,))
        run.seen.append(
            nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten()
            ).detach()
        )
        del logits
        run.backward(step)
        run.step()
        run.rest()


@script()
def routing_alternates(run: Run) -> None:
    """Two experts whose order changes with every step, and which are sometimes
    left out."""
    for step in range(8):
        run.optimizer.zero_grad()
        run.backward(step, order=[(0, 1), (1, 0), (0,), (1,)][step % 4])
        run.step()
        run.rest()


# A large eps keeps Adam from magnifying the last bits of gradients that are nearly
# zero.
@script(eps=1e-4, stages=(1, 2))
def a_block_is_called_a_different_number_of_times(run: Run) -> None:
    """Stage 3 forbids it: ranks must run the same units there."""
    order_of = [(0, 1) if r == 0 else (0, 1, 1, 1) for r in range(run.ranks)]
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, lambda r, step=step: run.loss(step, r, order=order_of[r]))
        run.step()
