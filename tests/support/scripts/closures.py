"""Forward and backward inside of step, as trainers call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor
from torch.optim import lr_scheduler

from zerokern import GradScaler

STEPS = 3


def closure_of(run: Run, step: int, *, zero: bool = True) -> Callable[[], Tensor]:
    """Return what automatic optimisation passes to step."""

    def closure() -> Tensor:
        if zero:
            run.optimizer.zero_grad()
        run.backward(step)
        return torch.tensor(float(step))

    return closure


@script
def by_keyword(run: Run) -> None:
    for step in range(STEPS):
        run.seen.append(run.optimizer.step(closure=closure_of(run, step)))


@script
def by_position(run: Run) -> None:
    for step in range(STEPS):
        run.seen.append(run.optimizer.step(closure_of(run, step)))


@script
def none_by_keyword_and_by_position(run: Run) -> None:
    """Accelerate passes on the None that it got."""
    for step in range(STEPS):
        closure_of(run, step)()
        assert (
            run.optimizer.step(closure=None) if step == 1 else run.optimizer.step(None)
        ) is None


@script
def wrapped_with_clipping_inside(run: Run) -> None:
    """Lightning wraps the user's closure, and clips inside of the wrapper, after
    backward and before the update."""

    def wrap(closure: Callable[[], Tensor]) -> Tensor:
        loss = closure()
        run.clip(0.1)
        return loss

    for step in range(STEPS):
        run.seen.append(
            run.optimizer.step(closure=functools.partial(wrap, closure_of(run, step)))
        )


@script
def called_once_more_by_hand(run: Run) -> None:
    """A first call to look at the gradients, as sharpness-aware training does; step
    calls again."""
    for step in range(STEPS):
        closure = closure_of(run, step)
        run.seen.append(closure())
        run.seen.append(run.optimizer.step(closure))


@script
def called_twice_inside(run: Run) -> None:
    """The second call starts afresh; without zero_grad it adds."""
    for step in range(STEPS):
        first, second = (
            closure_of(run, step),
            closure_of(run, 10 + step, zero=step != 1),
        )

        def both(
            first: Callable[[], Tensor] = first, second: Callable[[], Tensor] = second
        ) -> Tensor:
            first()
            return second()

        run.seen.append(run.optimizer.step(both))


@script
def with_accumulation_before(run: Run) -> None:
    """All but the last micro-batch come before step, under no_sync; the last inside."""
    for step in range(STEPS):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(30 + 2 * step)
        run.optimizer.step(closure_of(run, 31 + 2 * step, zero=False))


@script
def with_several_backwards_inside(run: Run) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            run.optimizer.zero_grad()
            for micro in range(3):
                run.backward(10 * step + micro)
            return 1.0

        assert run.optimizer.step(closure) == 1.0


@script
def without_a_backward(run: Run) -> None:
    """A closure that only looks: nothing is updated in its place, and the step before
    stands."""
    run.optimizer.step(closure_of(run, 0))
    run.optimizer.zero_grad()
    run.optimizer.step(lambda: torch.tensor(1.0))
    run.optimizer.step(closure_of(run, 1))


@script
def through_a_scheduler_s_wrapper(run: Run) -> None:
    """A scheduler replaces optimizer.step by a wrapper of its own; so does
    Accelerate."""
    scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.7**step)
    original = run.optimizer.step
    calls = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    for step in range(STEPS):
        run.optimizer.step = watched
        run.seen.append(run.optimizer.step(closure=closure_of(run, step)))
        run.optimizer.step = original
        scheduler.step()
    assert len(calls) == STEPS


@script
def through_a_disabled_scaler(run: Run) -> None:
    """How one loop serves all precisions."""
    scaler = (torch.amp.GradScaler if run.torch else GradScaler)("cpu", enabled=False)
    for step in range(STEPS):
        run.seen.append(scaler.step(run.optimizer, closure_of(run, step)))
        scaler.update()
