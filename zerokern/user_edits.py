"""What users do to an optimizer between steps, as to torch's: they edit, extend and
empty param groups, thaw parameters, and empty the state or replace its tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from .sharding.handles import ParamHandles
from .sharding.placeholders import without_placeholders

Groups = Sequence[Mapping[str, Any]]
"""torch's param groups."""

State = MutableMapping[Any, Any]
"""`optimizer.state`."""

Entry = dict[str, Any]
"""The state of one parameter, by torch's names."""


class UserEdits:
    """Param groups and state as they were when the optimizer last looked."""

    def __init__(
        self,
        groups: Groups,
        handles: ParamHandles,
    ) -> None:
        """Look at the groups of a new optimizer."""
        self._members: list[int] = []
        """The number of parameters of each group, and these by id."""
        self._frozen: list[nn.Parameter] = []
        """Parameters in the groups that are not trained."""
        self._params: list[nn.Parameter] = []
        self._entries: list[Entry] = []
        """What is in the state, by parameter."""
        self._values: list[Any] = []
        """Of all entries, one after the other."""
        self._views: list[Entry] = []
        """What was put there: views of the shards."""
        self.note_groups(groups, handles)

    def are_none(
        self,
        groups: Groups,
        state: State,
    ) -> bool:
        """Return whether all is as it was. Values of the state that were written to in
        place are. Called at every step, so all loops are C's."""
        if _members(groups) != self._members:
            return False
        entries = self._entries
        if not all(map(operator.is_, map(state.get, self._params), entries)):
            return False
        if sum(map(len, entries)) != len(self._values):
            return False
        values = chain.from_iterable(map(dict.values, entries))
        if not all(map(operator.is_, values, self._values)):
            return False
        if not self._frozen:
            return True
        with without_placeholders():
            return not any(param.requires_grad for param in self._frozen)

    def has_members(self, groups: Groups) -> bool:
        """Return whether groups have the members that they had, and none was thawed."""
        with without_placeholders():
            thawed = any(param.requires_grad for param in self._frozen)
        return not thawed and _members(groups) == self._members

    def added(self, groups: Groups, handles: ParamHandles) -> list[nn.Parameter]:
        """Return the parameters in the groups that the optimizer has not got."""
        params = [param for group in groups for param in group["params"]]
        return [param for param in params if handles.find(param) is None]

    def note_groups(
        self,
        groups: Groups,
        handles: ParamHandles,
    ) -> None:
        """The optimizer has followed the groups."""
        self._members = _members(groups)
        self._frozen = []
        for group in groups:
            for param in group["params"]:
                handle = handles.find(param)
                if handle is None or handle.column < 0:
                    self._frozen.append(param)

    def show(
        self,
        state: State,
        views: Mapping[nn.Parameter, Entry],
    ) -> None:
        """Put views of each parameter's state into `optimizer.state`."""
        self._params, self._views = list(views), list(views.values())
        for param, entry in views.items():
            state[param] = dict(entry)
        self._note_state(state)

    def adopt(
        self,
        state: State,
        reset: Callable[[nn.Parameter], None],
    ) -> None:
        """Take over what was emptied or replaced in the state, and show the views
        again. What users have added is theirs.

        Args:
            state: where they were shown.
            reset: starts the state of a parameter anew, as torch does for one that has
                none.

        Raises:
            ValueError: a value does not fit. Nothing was changed.
        """
        changes = []
        for param, views in zip(self._params, self._views, strict=True):
            changes.append(_changes(state.get(param), views))
        for param, views, changed in zip(
            self._params, self._views, changes, strict=True
        ):
            if changed is None:
                reset(param)
            else:
                for name, value in changed.items():
                    _write(views[name], value)
            state.setdefault(param, {}).update(views)
        self._note_state(state)

    def _note_state(self, state: State) -> None:
        self._entries = [state[param] for param in self._params]
        self._values = list(chain.from_iterable(map(dict.values, self._entries)))


def _members(groups: Groups) -> list[int]:
    """Return the number of parameters of each group, and these by id."""
    members: list[int] = []
    for group in groups:
        members.append(len(group["params"]))
        members += map(id, group["params"])
    return members


def _changes(entry: Entry | None, views: Entry) -> Entry | None:
    """Return the values of one parameter that were replaced; None if there is no state
    any more."""
    tensors = {name: v for name, v in views.items() if isinstance(v, Tensor)}
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
                f"optimizer.state of a parameter has {name!r} of shape {shape} now; it"
                f" must be {tuple(view.shape)}, this rank's part. Nothing was updated"
            )
        changed[name] = value
    return changed


def _write(view: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        view.copy_(value)
    else:
        view.fill_(value)
