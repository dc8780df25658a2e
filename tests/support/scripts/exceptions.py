"""A user's code raises; the next step is like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oracle import Run
from registry import script


class Boom(Exception):
    """Raised by a user's code."""


def _raise(*_: Any) -> None:
    raise Boom


def _failing(run: Run, install: Callable[[], Any]) -> None:
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    handle = install()
    with pytest.raises(Boom):
        run.backward(1)
    handle.remove()
    run.optimizer.zero_grad()
    for step in range(2, 5):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


@script()
def exception_in_forward(run: Run) -> None:
    """The next step works, nothing needs resetting by hand."""
    _failing(run, lambda: run.model.blocks[1].down.register_forward_hook(_raise))


@script()
def exception_in_backward(run: Run) -> None:
    _failing(run, lambda: run.model.blocks[1].up.register_full_backward_hook(_raise))


@script()
def exception_in_recomputation(run: Run) -> None:
    run.model.checkpoint = False
    calls = []

    def second_time(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Boom

    _failing(run, lambda: run.model.blocks[0].up.register_forward_hook(second_time))


@script()
def exception_in_reentrant_recomputation(run: Run) -> None:
    run.model.checkpoint = True
    calls = []

    def second_time(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Boom

    _failing(run, lambda: run.model.blocks[0].up.register_forward_hook(second_time))
