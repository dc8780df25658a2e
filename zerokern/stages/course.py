"""The order in which an iteration comes to the units of stage 3: a hint for what to
gather ahead, never a promise."""

from __future__ import annotations

from collections.abc import Sequence


class Course:
    """Remembers the last forward, and says what probably comes next."""

    def __init__(self) -> None:
        self._last: list[str] = []
        self._now: list[str] = []
        self._back = 0
        """Units of the last forward that backward has come to."""

    def begin_forward(self) -> None:
        """A forward begins."""
        self._now, self._back = [], 0

    def end_forward(self, *, raised: bool) -> None:
        """A forward has ended; one that raised says nothing about the next."""
        if not raised:
            self._last = self._now

    def end_backward(self) -> None:
        """A backward has ended."""
        self._back = 0

    def forward(self, name: str) -> Sequence[str]:
        """Forward comes to a unit. Return what follows, at most one."""
        self._now.append(name)
        return _following(self._last, name, len(self._now) - 1)

    def backward(self, name: str, *, first: bool) -> Sequence[str]:
        """Backward comes to a unit, for the first time by this call of it. Return what
        follows, at most one."""
        order = self._last[::-1]
        position = self._back if first else max(self._back - 1, 0)
        self._back += first
        return _following(order, name, position)

    def backward_begins(self) -> Sequence[str]:
        """Backward comes to the outputs of the model. Return what follows, at most
        one."""
        return self._last[-1:]


def _following(order: Sequence[str], name: str, position: int) -> Sequence[str]:
    """Return what follows a unit that is used at a position, or wherever else the last
    iteration has used it."""
    if order[position : position + 1] != [name]:
        if name not in order:
            return []
        position = order.index(name)
    return order[position + 1 : position + 2]
