"""Stage 3: methods other than forward that use a unit's parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from .schedule import UnitSchedule


class ForwardMethods:
    """Methods of modules that gather as a forward does, as long as this lives."""

    def __init__(self, schedule: UnitSchedule) -> None:
        self._schedule = weakref.ref(schedule)
        self._wrapped: list[_Wrapped] = []

    def __del__(self) -> None:
        # Whoever drops the optimizer keeps the model, and it must be as it was before.
        with suppress(Exception):  # the interpreter may be on its way out
            self.remove()

    def add(
        self,
        module: nn.Module,
        name: str,
        method: Callable[..., Any],
    ) -> None:
        """Wrap a method, on this module object."""
        self._wrapped.append(_Wrapped(self._schedule, module, name, method))

    def remove(self) -> None:
        """Put back what was there, the last one first."""
        while self._wrapped:
            self._wrapped.pop().remove()


class _Wrapped:
    """A wrapped method, and what was there before it."""

    def __init__(
        self,
        schedule: weakref.ref[UnitSchedule],
        module: nn.Module,
        name: str,
        original: Callable[..., Any],
    ) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._before = vars(module).get(name)
        this = self._module

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            gatherer = schedule()
            owner = this()
            if gatherer is None or owner is None:
                return original(*args, **kwargs)
            with gatherer.calling(owner, args, kwargs) as output:
                output.append(original(*args, **kwargs))
            return output[0]

        setattr(module, name, method)
        self._installed = method

    def remove(self) -> None:
        module = self._module()
        if module is None or vars(module).get(self._name) is not self._installed:
            return
        if self._before is None:
            delattr(module, self._name)
        else:
            setattr(module, self._name, self._before)
