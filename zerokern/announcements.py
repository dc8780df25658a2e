"""Announcements of collectives, before they start."""

from __future__ import annotations

import weakref
from typing import Protocol


class Listener(Protocol):
    """Whoever must know what this rank is about to do."""

    def about_to(self, event: str, index: int) -> None:
        """This rank is about to take part in a collective."""


class Announcements:
    """Tells one listener, if there is one. Who announces looks at `are_heard` first."""

    def __init__(self) -> None:
        self.are_heard = False
        self._listener: weakref.ref[Listener] | None = None

    def listen(self, listener: Listener | None) -> None:
        """Tell `listener`, which is held weakly; None for nobody."""
        self._listener = None if listener is None else weakref.ref(listener)
        self.are_heard = listener is not None

    def announce(self, event: str, index: int = 0) -> None:
        """Say what this rank is about to do."""
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener.about_to(event, index)
