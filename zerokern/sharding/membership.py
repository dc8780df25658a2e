"""Which parameters are in which param group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .handles import ParamHandles
from .placeholders import without_placeholders

Groups = Sequence[Mapping[str, Any]]
"""torch's param groups."""


class Membership:
    """The param groups as they were when the optimizer last followed them. Users sort,
    extend and empty them, and thaw what is in them."""

    def __init__(self, groups: Groups, handles: ParamHandles) -> None:
        self._members = _members(groups)
        self._frozen: list[nn.Parameter] = []
        for group in groups:
            for param in group["params"]:
                handle = handles.find(param)
                if handle is None or handle.column < 0:
                    self._frozen.append(param)

    def is_current(self, groups: Groups) -> bool:
        """Return whether nothing was edited, and nothing thawed."""
        if _members(groups) != self._members:
            return False
        if not self._frozen:
            return True
        with without_placeholders():
            return not any(param.requires_grad for param in self._frozen)


def _members(groups: Groups) -> list[int]:
    """Return the parameters of all groups, by id, and how many each has."""
    members: list[int] = []
    for group in groups:
        params = group["params"]
        members.append(len(params))
        members += map(id, params)
    return members
