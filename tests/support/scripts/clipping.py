"""The total norm is bounded, by option or by call; groups of their own."""

from __future__ import annotations

from oracle import Run
from registry import script


@script(max_grad_norm=0.3)
def max_grad_norm(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def clip_grad_norm(run: Run) -> None:
    for step, bound in enumerate((0.3, 100.0, 0.1)):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(bound)
        run.step()


@script()
def clip_once_does_not_last(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        if step == 0:
            run.clip(0.1)
        run.step()


@script()
def clip_with_accumulation_and_an_unused_branch(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step, use="left")
        run.backward(10 * step + 1, use="left")
        run.clip(0.2)
        run.step()


@script(
    groups=lambda model: [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": 0.3,
            "betas": (0.8, 0.95),
        },
        {
            "params": [p for p in model.parameters() if p.dim() < 2],
            "weight_decay": 0.0,
            "lr": 3e-2,
            "eps": 1e-5,
        },
    ]
)
def groups_inside_one_bucket(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def clipped_then_dropped(run: Run) -> None:
    """A step that the user leaves out after a look at the norm, and one without
    clipping after it."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.1)
        if step == 1:
            run.optimizer.zero_grad()
            run.backward(7)
        run.step()
