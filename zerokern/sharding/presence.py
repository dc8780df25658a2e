"""Whether a model still has, in its modules, the parameters that are trained."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from .handles import ParamHandles


class Presence:
    """Looks at the parameters of a model that bring no gradient: another one
    may have taken their place in their module, and nobody trains that. A module that
    was replaced has parameters of its own, as in torch."""

    def __init__(self, model: nn.Module | None) -> None:
        """Watch a model, if there is one."""
        self._places: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        """The module of each parameter, by its id, and its name there."""
        for module in () if model is None else model.modules():
            for name, param in module.named_parameters(recurse=False):
                self._places[id(param)] = weakref.ref(module), name

    def check(self, used: Sequence[int], handles: ParamHandles) -> None:
        """Look at those that bring no gradient.

        Args:
            used: columns of the parameters that have a gradient here.
            handles: of all parameters.

        Raises:
            RuntimeError: one was replaced; names it and the remedy.
        """
        brought = set(used)
        for handle in handles if self._places else ():
            if handle.column < 0 or handle.column in brought:
                continue
            param = self._found(handle.param)
            if param is None or param is handle.param or not param.requires_grad:
                continue
            if handles.find(param) is None:
                raise RuntimeError(
                    f"{handle.name!r} was replaced: its module has another parameter"
                    " now than the one that the optimizer trains, as after"
                    " load_state_dict(assign=True). Load without assign=True, add the"
                    " new one to the optimizer, or build a new optimizer. Nothing was"
                    " updated"
                )

    def _found(self, param: nn.Parameter) -> nn.Parameter | None:
        """Return what is in a parameter's place now."""
        reference, name = self._places.get(id(param), (None, ""))
        module = None if reference is None else reference()
        return None if module is None else module._parameters.get(name)
