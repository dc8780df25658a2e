"""Gradients are zeroed: before or after the step, in place or not, or never."""

from __future__ import annotations

from oracle import Run
from registry import script


@script()
def zero_grad_sets_to_none(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=True)
        run.backward(step)
        run.step()


@script()
def zero_grad_in_place(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(step)
        run.step()


@script()
def zeroed_after_the_step(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.step()
        run.optimizer.zero_grad()


@script()
def model_zero_grad(run: Run) -> None:
    for step in range(3):
        run.model.zero_grad()
        run.backward(step)
        run.step()


@script()
def never_zeroed_accumulates(run: Run) -> None:
    for step in range(4):
        run.backward(step)
        run.step()


@script()
def zeroed_in_place_and_stepped_decays_only(run: Run) -> None:
    """In torch a gradient of zero is a gradient: moments decay, the step counts."""
    run.backward(0)
    run.step()
    run.optimizer.zero_grad(set_to_none=False)
    run.step()
    run.backward(1)
    run.step()


@script()
def zeroed_to_none_and_stepped_does_nothing(run: Run) -> None:
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    run.step()
    run.backward(1)
    run.step()


@script()
def zeroed_between_backward_and_step(run: Run) -> None:
    run.backward(0)
    run.optimizer.zero_grad()
    run.backward(1)
    run.step()
    run.backward(2)
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(3)
    run.step()


@script()
def zeroed_in_place_after_a_backward_that_added_to_a_reduced_gradient(run: Run) -> None:
    run.backward(0)
    run.step()
    with run.no_sync():
        run.backward(1)
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(2)
    run.step()


@script()
def one_parameter_zeroed_by_hand(run: Run) -> None:
    """Never zeroed, but for one parameter: its gradient alone starts afresh."""
    for step in range(3):
        run.backward(step)
        run.step()
        run.model.head.bias.grad.zero_()
