"""Exceptions in users' code: every place of an iteration where it may raise one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from oracle import Run
from torch import Tensor, nn


class Boom(Exception):
    """Raised by a user's code."""


def boom(*_: Any) -> None:
    """Raise it."""
    raise Boom


PLACES: dict[str, Callable[[Run, int], None]] = {}
"""By where it raises: a function that runs one iteration, up to the exception."""


def _place(function: Callable[[Run, int], None]) -> Callable[[Run, int], None]:
    PLACES[function.__name__] = function
    return function


@contextmanager
def _hooked(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_call(number: int) -> Callable[..., None]:
    """Raise at the given call, counted from 1."""
    calls = []

    def hook(*_: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            raise Boom

    return hook


@_place
def forward_of_the_root_before_units(run: Run, step: int) -> None:
    with _hooked(run.model.embedding.register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_before_a_unit(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].register_forward_pre_hook(boom)):
        run.backward(step)


@_place
def forward_inside_a_unit(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].down.register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_after_a_unit(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_of_the_root_after_units(run: Run, step: int) -> None:
    with _hooked(run.model.head.register_forward_pre_hook(boom)):
        run.backward(step)


@_place
def hook_of_the_root_after_its_forward(run: Run, step: int) -> None:
    with _hooked(run.model.register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_without_gradients(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[2].register_forward_hook(boom)):
        run.evaluate(step)


@_place
def unit_called_directly(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[0].down.register_forward_hook(boom)):
        run.model.blocks[0](torch.ones(17))


@_place
def between_forward_and_backward(run: Run, step: int) -> None:
    run.loss(step, run.each()[0])
    boom()


@_place
def module_hook_in_backward(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].up.register_full_backward_hook(boom)):
        run.backward(step)


@_place
def tensor_hook_in_backward(run: Run, step: int) -> None:
    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(boom)

    with _hooked(run.model.blocks[0].down.register_forward_hook(watch)):
        run.backward(step)


@_place
def first_gradient_of_backward(run: Run, step: int) -> None:
    with _hooked(run.model.head.bias.register_hook(boom)):
        run.backward(step)


@_place
def last_gradient_of_backward(run: Run, step: int) -> None:
    with _hooked(run.model.embedding.weight.register_hook(boom)):
        run.backward(step)


@_place
def hook_after_a_gradient_of_a_unit(run: Run, step: int) -> None:
    with _hooked(
        run.model.blocks[0].up.weight.register_post_accumulate_grad_hook(boom)
    ):
        run.backward(step)


@_place
def end_of_backward(run: Run, step: int) -> None:
    """A callback of the engine, which somebody else queued."""

    def queue(*_: Any) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(boom)

    with _hooked(run.model.blocks[1].up.weight.register_hook(queue)):
        run.backward(step)


def _in_recomputation(run: Run, step: int, reentrant: bool) -> None:
    run.model.checkpoint = reentrant
    try:
        with _hooked(run.model.blocks[1].down.register_forward_hook(_on_call(2))):
            run.backward(step)
    finally:
        run.model.checkpoint = None


@_place
def recomputation(run: Run, step: int) -> None:
    _in_recomputation(run, step, False)


@_place
def reentrant_recomputation(run: Run, step: int) -> None:
    _in_recomputation(run, step, True)


@_place
def backward_inside_a_reentrant_checkpoint(run: Run, step: int) -> None:
    run.model.checkpoint = True
    try:
        with _hooked(run.model.blocks[0].up.weight.register_hook(boom)):
            run.backward(step)
    finally:
        run.model.checkpoint = None


@_place
def forward_inside_no_sync(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].down.register_forward_hook(boom)), run.no_sync():
        run.backward(step)


@_place
def backward_inside_no_sync(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[0].up.weight.register_hook(boom)), run.no_sync():
        run.backward(step)


@_place
def backward_after_one_inside_no_sync(run: Run, step: int) -> None:
    with run.no_sync():
        run.backward(step)
    module_hook_in_backward(run, step)


@_place
def backward_after_another(run: Run, step: int) -> None:
    run.backward(step)
    module_hook_in_backward(run, step)


@_place
def closure_before_its_backward(run: Run, step: int) -> None:
    run.optimizer.step(boom)


@_place
def closure_in_its_backward(run: Run, step: int) -> None:
    run.optimizer.step(lambda: module_hook_in_backward(run, step))


@_place
def closure_after_its_backward(run: Run, step: int) -> None:
    def compute() -> None:
        run.backward(step)
        boom()

    run.optimizer.step(compute)


@_place
def inside_full_params(run: Run, step: int) -> None:
    with nullcontext() if run.torch else run.optimizer.full_params():
        boom()


@_place
def forward_inside_full_params(run: Run, step: int) -> None:
    with nullcontext() if run.torch else run.optimizer.full_params():
        forward_without_gradients(run, step)
