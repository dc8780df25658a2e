"""Stages 1 and 2: updated parameters on their way to all ranks, and where they are
waited for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

from torch import nn

from ..buffers import ParameterBucket
from ..comm import Work
from .absent import Absence
from .hooks import ModuleHook


class Arriving:
    """Waits for the gathers of a step: at its end, or, bucket by bucket, where a
    parameter is first read after it.

    In the second case parameters are absent meanwhile, so whoever reads one, in
    whatever order, has to wait for it, and nobody can see a half of it.
    """

    def __init__(self, buckets: Sequence[ParameterBucket], *, in_forward: bool) -> None:
        """Prepare.

        Args:
            buckets: whose parameters travel.
            in_forward: wait where they are first read.
        """
        self.in_forward = in_forward
        self._works: dict[int, Work] = {}
        """By index of the bucket, in order of launch."""
        self._buckets = {parameters.bucket.index: parameters for parameters in buckets}
        this = weakref.ref(self)
        self._absences: dict[int, Absence] = {}
        if in_forward:
            for index, parameters in self._buckets.items():

                def bring(param: nn.Parameter, reader: str, index: int = index) -> None:
                    arriving = this()
                    assert arriving is not None
                    arriving._wait(index)

                self._absences[index] = Absence(parameters.params, bring)
        self._index_of = {
            id(param): index
            for index, known in self._buckets.items()
            for param in known.params
        }

    def __del__(self) -> None:
        # Whoever drops the optimizer keeps the model; and transfers that nobody waits
        # for would block the group.
        with suppress(Exception):  # the interpreter may be on its way out
            self.wait_all()

    def start(self, parameters: ParameterBucket, work: Work) -> None:
        """Take note of a gather that was launched."""
        index = parameters.bucket.index
        if work.pending:
            self._works[index] = work
            if self.in_forward:
                self._absences[index].begin()

    def end_step(self) -> None:
        """At the end of a step: wait, unless that is for the next forward."""
        if not self.in_forward:
            self.wait_all()

    def wait(self, parameters: ParameterBucket) -> None:
        """Have a bucket whole when the current stream gets here."""
        self._wait(parameters.bucket.index)

    def wait_all(self) -> None:
        """Have every parameter whole when the current stream gets here."""
        for index in list(self._works):
            self._wait(index)

    def hook(self, modules: Sequence[nn.Module]) -> list[ModuleHook]:
        """Wait for all parameters of a module before its forward, too: compiled code
        would not notice an absent one."""
        hooks = []
        for module in modules:
            indices = sorted(
                {
                    self._index_of[id(p)]
                    for p in module.parameters()
                    if id(p) in self._index_of
                }
            )
            hooks.append(
                ModuleHook(
                    module, self, Arriving._before_forward, indices
                ).before_forward()
            )
        return hooks

    def _before_forward(
        self, indices: Sequence[int], module: nn.Module, args: object, kwargs: object
    ) -> None:
        for index in indices:
            self._wait(index)

    def _wait(self, index: int) -> None:
        work = self._works.get(index)
        if work is not None:
            work.wait()
            del self._works[index]
            if self.in_forward:
                self._absences[index].end(self._buckets[index].views)
