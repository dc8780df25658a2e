"""A reduce-scatter under way: the chunks that come in, and the sum that is formed of
them when they are there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..buffers import Scratch
from ..comm import Comm, Work
from ..lane import Lane


class Exchange:
    """Sends a bucket's chunks, receives this rank's, and reduces: on a GPU on the side,
    so that backward goes on."""

    def __init__(self, comm: Comm, scratch: Scratch, lane: Lane, name: str) -> None:
        """Prepare.

        Args:
            comm: the group to reduce over.
            scratch: where chunks come from.
            lane: where sums are formed.
            name: of the bucket.
        """
        self.comm, self.scratch, self.lane, self.name = comm, scratch, lane, name
        self._work = Work()
        self._received: Tensor | None = None
        self._reduce: Callable[[Tensor], None] | None = None
        self._mark: torch.cuda.Event | None = None

    def start(self, local: Tensor, reduce: Callable[[Tensor], None]) -> None:
        """Start.

        Args:
            local: [W * S], this rank's addends. Must not be written before `finish`
                returns.
            reduce: forms the sum, given the chunks of the other ranks, [W - 1, S].
        """
        world = self.comm.world
        self._received = self.scratch.take(
            (world - 1, local.numel() // world), local.dtype
        )
        self._work = self.comm.exchange(local, self._received, self.name)
        self._reduce = reduce
        if self.lane.runs_ahead:
            with self.lane.beside():
                self._form_sum()
            self._mark = self.lane.mark()

    def finish(self) -> None:
        """Have the sum when the current stream gets here, and give the chunks' memory
        back."""
        assert self._received is not None
        if self._mark is None:
            self._form_sum()
        else:
            self.lane.join(self._mark)
        self.scratch.give(self._received)
        self._received = self._reduce = self._mark = None

    def _form_sum(self) -> None:
        assert self._received is not None and self._reduce is not None
        self._work.wait()
        with torch.autograd.profiler.record_function(f"zerokern::reduce {self.name}"):
            self._reduce(self._received)
