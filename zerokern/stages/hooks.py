"""Hooks on a user's modules and gradients that do not keep an optimizer alive, nor
follow a module into its copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..eager import eager


class ModuleHook:
    """Calls `method(owner, argument, module, ...)` while the owner lives, for one
    module; in a copy it does nothing."""

    def __init__(
        self, module: nn.Module, owner: Any, method: Callable[..., None], argument: Any
    ) -> None:
        self._module = weakref.ref(module)
        self._owner: weakref.ref[Any] | None = weakref.ref(owner)
        self._method, self._argument = method, argument
        self._handle: RemovableHandle | None = None

    # Not what it calls: torch.compile looks for a graph in every frame that is entered
    # while it is on.
    @eager
    def __call__(self, module: nn.Module, *args: Any) -> None:
        owner = self._owner() if self._owner else None
        if owner is not None and module is self._module():
            self._method(owner, self._argument, module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the module have a hook that does nothing."""
        return _Nothing, ()

    def before_forward(self) -> ModuleHook:
        """Run before the module's forward, first of all hooks."""
        self._handle = self._alive().register_forward_pre_hook(
            self, prepend=True, with_kwargs=True
        )
        return self

    def after_forward(self) -> ModuleHook:
        """Run after the module's forward, also if that raised: then the output is
        None."""
        self._handle = self._alive().register_forward_hook(self, always_call=True)
        return self

    def around_state_dict(self) -> ModuleHook:
        """Run before the module's state_dict is read or loaded."""
        self._alive().register_state_dict_pre_hook(self)
        self._alive().register_load_state_dict_pre_hook(self)
        return self

    def remove(self) -> None:
        """Do nothing from now on."""
        self._owner = None
        if self._handle is not None:
            self._handle.remove()

    def _alive(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module


class _Nothing:
    """What a hook becomes in a copy."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class GradientHook:
    """Calls `method(owner, argument, first)` for the gradients of one call's outputs;
    `first` for the first of them."""

    def __init__(
        self, owner: Any, method: Callable[[Any, str, bool], None], argument: str
    ) -> None:
        self._owner, self._method, self._argument = weakref.ref(owner), method, argument
        self._first = True

    @eager
    def __call__(self, grad: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            first, self._first = self._first, False
            self._method(owner, self._argument, first)


class PassEnd:
    """The callback of one graph task. Only the engine holds it, so it dies with a pass
    that an exception ended."""

    def __init__(
        self, owner: Any, method: Callable[[Any, int], None], task: int
    ) -> None:
        self._owner, self._method, self.task = weakref.ref(owner), method, task

    @eager
    def __call__(self) -> None:
        owner = self._owner()
        if owner is not None:
            self._method(owner, self.task)
