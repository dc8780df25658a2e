"""The record of each collective, and of the time spent waiting for them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Call(NamedTuple):
    """One collective, as one rank saw it."""

    op: str
    """"reduce_scatter", "all_gather", "broadcast" or "all_gather_words"."""
    unit: str
    """The bucket or unit that it served."""
    elements: int
    """Elements of the whole (unsharded) buffer, padding included."""
    dtype: str
    bytes: int
    """Bytes that this rank sent."""
    group: int
    """Ranks in the group."""
    phase: str
    """"init", "forward", "backward", "step" or "checkpoint"."""
    step: int
    """Optimizer steps that had finished."""


class StreamWaits:
    """Time that the current stream of a GPU has waited for collectives."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> torch.cuda.Event | None:
        """Mark the stream before it waits. None while it is captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begin: torch.cuda.Event | None) -> None:
        """Mark the stream after it has waited."""
        if begin is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((begin, event))

    def milliseconds(self) -> float:
        """Return the sum. The host waits until it is known."""
        total = 0.0
        for begin, end in self._events:
            end.synchronize()
            total += float(begin.elapsed_time(end))
        return total
