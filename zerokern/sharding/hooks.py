"""Hooks on a user's modules, gradients and backward passes. None of them keeps an
optimizer alive, and none follows a module into its copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ..eager import eager
from . import transforms


class Handles:
    """Hooks that live as long as this does."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __del__(self) -> None:
        # Whoever drops the optimizer keeps the model, and it must be as it was before.
        with suppress(Exception):  # the interpreter may be on its way out
            self.remove()

    def add(self, *handles: RemovableHandle) -> None:
        """Remove these, too, in the end."""
        self._handles += handles

    def remove(self) -> None:
        """Remove all of them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class ModuleHook:
    """Calls `method(owner, argument, module, ...)` while the owner lives, for one
    module; in a copy of the module it does nothing."""

    def __init__(
        self,
        module: nn.Module,
        owner: Any,
        method: Callable[..., None],
        argument: Any,
    ) -> None:
        self._module = weakref.ref(module)
        self._owner = weakref.ref(owner)
        self._method = method
        self._argument = argument

    # Not what it calls: torch.compile looks for a graph in every frame that is entered
    # while it is on.
    @eager
    def __call__(self, module: nn.Module, *args: Any) -> None:
        owner = self._owner()
        if owner is not None and module is self._module():
            self._method(owner, self._argument, module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the module have a hook that does nothing."""
        return _Nothing, ()

    def before_forward(self) -> RemovableHandle:
        """Run before the module's forward, first of all hooks."""
        module = self._alive()
        return module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def after_forward(self) -> RemovableHandle:
        """Run after the module's forward, also if that raised: then the output is
        None."""
        return self._alive().register_forward_hook(self, always_call=True)

    def around_state_dict(self) -> list[RemovableHandle]:
        """Run before the module's state_dict is read or loaded."""
        module = self._alive()
        return [
            module.register_state_dict_pre_hook(self),
            module.register_load_state_dict_pre_hook(self),
        ]

    def _alive(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module


class _Nothing:
    """The hook of a copied module: it does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class GradientHook:
    """Calls `method(owner, argument, first)` for the gradients of one call's outputs;
    `first` for the first of them."""

    def __init__(
        self, owner: Any, method: Callable[[Any, str, bool], None], argument: str
    ) -> None:
        self._owner = weakref.ref(owner)
        self._method = method
        self._argument = argument
        self._first = True

    @eager
    def __call__(self, grad: Tensor) -> None:
        owner = self._owner()
        if owner is not None and transforms.innermost() is None:
            first, self._first = self._first, False
            self._method(owner, self._argument, first)


class PassEvents(Protocol):
    """Whoever must know when backward ends."""

    def backward_ended(self) -> None:
        """The outermost backward pass has ended."""

    def backward_failed(self) -> None:
        """A backward pass has ended in an exception."""


class BackwardPasses:
    """The backward passes under way, outermost first: reentrant checkpoints nest
    them."""

    def __init__(self, events: PassEvents) -> None:
        self.running = False
        """A backward pass is under way, or has failed unnoticed."""
        self.task = -1
        """The pass that was entered last, if it is under way still."""
        self._events = weakref.ref(events)
        self._passes: list[weakref.ref[_PassEnd]] = []
        # Told that the engine has dropped a pass: the callback died before it ran.
        self._on_death = weakref.WeakMethod(self._died)

    def enter(self, nodes: Sequence[Node]) -> bool:
        """Notice, from inside of a hook, which pass is under way, to be told of its
        end. Return whether it comes to any of these nodes."""
        task = torch._C._current_graph_task_id()
        found = failed = False
        for known in self._passes:
            end = known()
            if end is None:
                failed = True
            elif end.task == task:
                found = True
        if failed:
            self._fail()
        self.task = task
        if not found:
            end = _PassEnd(self, task)
            on_death = self._on_death

            def died(reference: weakref.ref[_PassEnd]) -> None:
                method = on_death()
                if method is not None:
                    method(reference)

            self.running = True
            self._passes.append(weakref.ref(end, died))
            torch.autograd.Variable._execution_engine.queue_callback(end)
        runs = torch._C._will_engine_execute_node
        for node in nodes:
            try:
                if runs(node):
                    return True
            except RuntimeError:
                pass  # a leaf of autograd.grad: its gradient is returned instead
        return False

    def forget(self) -> None:
        """Take all passes for ended."""
        self._passes.clear()
        self.running = False
        self.task = -1

    def ended(self, task: int) -> None:
        """Called by the engine at the end of a graph task."""
        left = []
        for known in self._passes:
            end = known()
            if end is not None and end.task != task:
                left.append(known)
        self._passes = left
        self.running = bool(left)
        self.task = -1
        events = self._events()
        if not left and events is not None:
            events.backward_ended()

    def _died(self, reference: weakref.ref[_PassEnd]) -> None:
        """Fail as soon as the engine has dropped a pass, while the user's exception is
        on its way.

        A rank that never took part fails the next use of what it left behind, too, and
        is reported there.
        """
        if any(reference is known for known in self._passes):
            with suppress(RuntimeError):
                self._fail()

    def _fail(self) -> None:
        self.forget()
        events = self._events()
        if events is not None:
            events.backward_failed()


class _PassEnd:
    """The callback of one graph task. Only the engine holds it, so it dies with a pass
    that an exception ended."""

    def __init__(self, passes: BackwardPasses, task: int) -> None:
        self._passes = weakref.ref(passes)
        self.task = task

    @eager
    def __call__(self) -> None:
        passes = self._passes()
        if passes is not None:
            passes.ended(self.task)
