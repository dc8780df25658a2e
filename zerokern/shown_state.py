"""`optimizer.state`, as torch's users know it: views of the state that is in the shards,
which they may also empty or replace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

Entry = dict[str, Any]
"""The state of one parameter, by torch's names."""


class ShownState:
    """What was put into `optimizer.state`."""

    def __init__(self) -> None:
        self._params: list[nn.Parameter] = []
        self._entries: list[Entry] = []
        self._values: list[Any] = []
        """Of all entries, one after the other."""
        self._ours: list[Entry] = []
        """The entries as they were shown."""

    def show(
        self, state: MutableMapping[Any, Any], views: Mapping[nn.Parameter, Entry]
    ) -> None:
        """Put views of each parameter's state into a mapping."""
        self._params, self._ours = list(views), list(views.values())
        self._entries = []
        for param, entry in views.items():
            state[param] = shown = dict(entry)
            self._entries.append(shown)
        self._note()

    def _note(self) -> None:
        self._values = list(chain.from_iterable(map(dict.values, self._entries)))

    def is_untouched(self, state: Mapping[Any, Any]) -> bool:
        """Return whether all is as it was shown. Values that were written to in place
        are."""
        entries = self._entries
        if not all(map(operator.is_, map(state.get, self._params), entries)):
            return False
        if sum(map(len, entries)) != len(self._values):
            return False
        values = chain.from_iterable(map(dict.values, entries))
        return all(map(operator.is_, values, self._values))

    def adopt(
        self, state: MutableMapping[Any, Any], reset: Callable[[nn.Parameter], None]
    ) -> None:
        """Take over what was emptied or replaced, and show the views again. What users
        have added is theirs.

        Args:
            state: where it was shown.
            reset: starts the state of a parameter anew, as torch does for one that has
                none.

        Raises:
            ValueError: a value does not fit. Nothing was changed.
        """
        changes = [self._changes(state, index) for index in range(len(self._params))]
        for param, ours, changed in zip(self._params, self._ours, changes, strict=True):
            entry = state.setdefault(param, {})
            if changed is None:
                reset(param)
            else:
                for name, value in changed.items():
                    _write(ours[name], value)
            entry.update(ours)
        self._entries = [state[param] for param in self._params]
        self._note()

    def _changes(self, state: Mapping[Any, Any], index: int) -> Entry | None:
        """Return the values of one parameter that were replaced; None if there is no
        state any more."""
        entry = state.get(self._params[index])
        ours = self._ours[index]
        tensors = {n: v for n, v in ours.items() if isinstance(v, Tensor)}
        if not entry or not any(name in entry for name in tensors):
            return None
        changed = {}
        for name, view in tensors.items():
            value = entry.get(name, view)
            if value is view:
                continue
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            if shape != tuple(view.shape):
                raise ValueError(
                    f"optimizer.state of a parameter has {name!r} of shape {shape} now;"
                    f" it must be {tuple(view.shape)}, this rank's part. Nothing was"
                    " updated"
                )
            changed[name] = value
        return changed


def _write(view: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        view.copy_(value)
    else:
        view.fill_(value)
