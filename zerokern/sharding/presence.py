"""Whether a model still has the parameters that its optimizer trains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .handles import ParamHandles


class Presence:
    """Looks at the parameters of a model that bring no gradient any more: another one
    may have taken their place, which nobody trains."""

    def __init__(self, model: nn.Module | None, num_columns: int) -> None:
        """Watch a model, if there is one."""
        self._model = model
        self._used = set(range(num_columns))
        """Columns of those that had a gradient in the last step."""

    def check(self, used: Sequence[int], handles: ParamHandles) -> None:
        """Look at those that brought a gradient in the last step and do not in this.

        Args:
            used: columns of the parameters that have a gradient here.
            handles: of all parameters.

        Raises:
            RuntimeError: one was replaced; names it and the remedy.
        """
        if self._model is None:
            return
        gone, self._used = self._used.difference(used), set(used)
        for handle in handles if gone else ():
            if handle.column not in gone:
                continue
            param = _found(self._model, handle.name)
            if param is None or param is handle.param or not param.requires_grad:
                continue
            if handles.find(param) is None:
                raise RuntimeError(
                    f"{handle.name!r} of the model is another parameter now than the"
                    " one that the optimizer trains, as after"
                    " load_state_dict(assign=True): load without assign=True, add the"
                    " new one to the optimizer, or build a new optimizer. Nothing was"
                    " updated"
                )


def _found(model: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter of a name, which may be a placeholder; None if there is
    none."""
    path, _, last = name.rpartition(".")
    try:
        return model.get_submodule(path)._parameters.get(last)
    except AttributeError:
        return None
