"""A second stream of a GPU, for work that waits for a collective while the main stream
goes on computing. On a CPU there is none.

Memory needs no `record_stream`: what the side stream works on is given back only after
the main stream has waited for it, so the allocator can hand it on at once and holds no
more than was planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """None on a CPU, where the host itself would wait."""

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue what follows on the side, after all that the main stream was given."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def record(self) -> torch.cuda.Event:
        """Return an event that happens when the side has done all it was given."""
        assert self.stream is not None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the main stream wait for an event of the side."""
        assert self.stream is not None
        torch.cuda.current_stream(self.stream.device).wait_event(event)
