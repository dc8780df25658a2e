"""A second queue of a GPU, for work that waits for the wire while the first goes on
computing. On a CPU there is none.

Memory needs no `record_stream`: what the side works on is given back only after the
main stream has waited for it, so the allocator can hand it on at once and holds no more
than was planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """A side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def runs_ahead(self) -> bool:
        """Whether the host may queue work that waits: on a CPU it would wait itself."""
        return self.stream is not None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Queue what follows on the side, after all that the main stream was given so
        far."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """Return an event that happens when the side has done all that it was given so
        far."""
        assert self.stream is not None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def join(self, mark: torch.cuda.Event) -> None:
        """Let the main stream wait for a mark."""
        assert self.stream is not None
        torch.cuda.current_stream(self.stream.device).wait_event(mark)
