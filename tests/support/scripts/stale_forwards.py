"""Steps between a forward and its backward: gradients of weights that are no longer
there, which torch refuses to form."""

from __future__ import annotations

import pytest
import torch
from oracle import Run
from registry import script
from torch import Tensor, nn


def _waiting(run: Run, step: int) -> list[Tensor]:
    """Return losses whose backward has not run yet."""
    return [run.loss(step, of_rank) for of_rank in run.each()]


def _refused(run: Run, losses: list[Tensor]) -> None:
    """Run backwards that cannot be right, and zero what they have left."""
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    run.optimizer.zero_grad()


def _backward(run: Run, losses: list[Tensor], **options: bool) -> None:
    for loss in losses:
        (loss / run.ranks if run.torch else loss).backward(**options)


@script()
def a_step_before_the_backward_of_a_batch(run: Run) -> None:
    """The script learns of it, and goes on."""
    first, second = _waiting(run, 0), _waiting(run, 1)
    run.optimizer.zero_grad()
    _backward(run, first)
    run.step()
    run.optimizer.zero_grad()
    _refused(run, second)
    run.train()


@script()
def a_step_between_two_backwards_of_one_graph(run: Run) -> None:
    """The graph was retained, its weights were not."""
    run.train(1)
    losses = _waiting(run, 3)
    _backward(run, losses, retain_graph=True)
    run.step()
    run.optimizer.zero_grad()
    _refused(run, losses)
    run.train()


@script()
def a_step_before_the_last_of_accumulated_backwards(run: Run) -> None:
    """The first of two micro-batches was stepped upon while the other waited."""
    for step in range(2):
        late = _waiting(run, 10 + step)
        with run.no_sync():
            run.backward(step)
        run.backward(5 + step)
        run.step()
        _refused(run, late)
        run.rest()


@script()
def a_step_in_a_closure_before_a_backward(run: Run) -> None:
    late = _waiting(run, 7)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        run.backward(0)
        return torch.zeros(())

    run.optimizer.step(closure)
    run.optimizer.zero_grad()
    _refused(run, late)
    run.train()


@script(groups=lambda model: [model.head.bias])
def a_step_of_what_no_backward_reads(run: Run) -> None:
    """The derivative of a sum does not need its terms, so torch has no objection."""
    for step in range(3):
        run.optimizer.zero_grad()
        late = _waiting(run, 10 + step)
        run.backward(step)
        run.step()
        run.optimizer.zero_grad()
        _backward(run, late)
        run.step()


class Heads(nn.Module):
    """Two heads that share nothing, in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(2)
        )

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x).square().mean()


def heads() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Heads()


def _of_head(run: Run, step: int, head: int) -> list[Tensor]:
    x = torch.linspace(-1, 1, 12).view(2, 6)
    return [run.model((1 + r + step) * x, head) for r in run.each()]


@script(build=heads, eps=1e-3)
def a_step_without_gradients_before_a_backward(run: Run) -> None:
    """It updates nothing, so the forward is as good as it was."""
    for step in range(3):
        run.optimizer.zero_grad()
        losses = _of_head(run, step, 0)
        run.step()
        _backward(run, losses)
        run.step()
        run.rest()


@script(build=heads, eps=1e-3)
def a_step_of_another_head_before_a_backward(run: Run) -> None:
    """It has no gradient for this head, whose weights stay."""
    for step in range(3):
        run.optimizer.zero_grad()
        first, second = _of_head(run, step, 0), _of_head(run, step, 1)
        _backward(run, first)
        run.step()
        run.optimizer.zero_grad()
        _backward(run, second)
        run.step()
        run.rest()
