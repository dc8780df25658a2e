"""Activations that are computed again in backward."""

from __future__ import annotations

from oracle import Run
from registry import script


def _checkpointed(run: Run, reentrant: bool) -> None:
    run.model.checkpoint = reentrant
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def checkpoint_reentrant(run: Run) -> None:
    _checkpointed(run, True)


@script()
def checkpoint_not_reentrant(run: Run) -> None:
    _checkpointed(run, False)


@script()
def checkpoint_reentrant_used_twice(run: Run) -> None:
    run.model.checkpoint = True
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 1, 0))
        run.step()


@script()
def checkpoint_not_reentrant_used_twice(run: Run) -> None:
    run.model.checkpoint = False
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 1, 0))
        run.step()


@script()
def checkpoint_with_accumulation(run: Run) -> None:
    for step in range(3):
        run.model.checkpoint = step != 1
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(2 * step)
        run.backward(2 * step + 1)
        run.step()
