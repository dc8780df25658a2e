"""Any number of backward passes for each step, with and without no_sync."""

from __future__ import annotations

from oracle import Run
from registry import script


@script()
def step_twice_without_backward(run: Run) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        run.step()


@script()
def step_before_any_backward(run: Run) -> None:
    run.step()
    run.backward(0)
    run.step()


@script()
def several_backwards_accumulate(run: Run) -> None:
    """Sum, not the last one, and nothing reduced twice."""
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(3):
            run.backward(10 * step + micro)
        run.step()


@script()
def number_of_backwards_changes(run: Run) -> None:
    """Stage 1 foresees the last backward from the step before; a wrong guess must cost
    traffic only."""
    for step, micros in enumerate((1, 3, 2, 1, 1, 2)):
        run.optimizer.zero_grad()
        for micro in range(micros):
            run.backward(10 * step + micro)
        run.step()


@script()
def no_sync_but_for_the_last(run: Run) -> None:
    """Works in every stage."""
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step)
            run.backward(10 * step + 1)
        run.backward(10 * step + 2)
        run.step()


@script()
def no_sync_around_all_backwards(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step)
            run.backward(10 * step + 1)
        run.step()


@script()
def no_sync_after_a_reduced_backward(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(10 * step)
        with run.no_sync():
            run.backward(10 * step + 1)
        run.step()


@script()
def no_sync_never_zeroed(run: Run) -> None:
    for step in range(3):
        with run.no_sync():
            run.backward(10 * step)
        run.backward(10 * step + 1)
        run.step()


@script()
def used_only_under_no_sync(run: Run) -> None:
    """Left only in the first micro-batch, right only in the last."""
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step, use="left")
        run.backward(10 * step + 1, use="right")
        run.step()


@script()
def backward_by_parts_of_one_graph(run: Run) -> None:
    """Two losses of one forward, two backward calls."""
    for step in range(3):
        run.optimizer.zero_grad()
        for rank in run.each():
            loss = run.loss(step, rank) / (run.ranks if run.torch else 1)
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
        run.step()
