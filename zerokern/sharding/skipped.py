"""Steps that are skipped for gradients that are not finite: said once, in the log."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..groups import Group
from ..pretend import is_fake
from .gradients import GradientBucket

LOG = logging.getLogger("zerokern")

SKIPPED = 2
"""Where the report of a step has the number of steps skipped so far."""


class SkippedSteps:
    """Watches the report of an updater without waiting for the device: on a CPU its
    memory is read, of a GPU the last copy that has come."""

    def __init__(self, report: Tensor) -> None:
        self.said = False
        self.is_remote = report.is_cuda
        self.counts: Any = (0.0, 0.0, 0.0)
        """The report as this host knows it."""
        self._seen = 0.0
        self.watch(report)

    def watch(self, report: Tensor) -> None:
        """Watch another report."""
        self._report = self._host = report
        if is_fake(report):
            return
        if self.is_remote:
            self._host = torch.zeros(
                report.shape, dtype=report.dtype, device="cpu", pin_memory=True
            )
        doubles = ctypes.c_double * report.numel()
        self.counts = doubles.from_address(self._host.data_ptr())

    def look(
        self,
        step: int,
        buckets: Sequence[GradientBucket],
        group: Group,
        *,
        scaled: bool,
    ) -> None:
        """Say if a step was skipped, unless it was said before.

        Args:
            step: the number of this one.
            buckets: the gradients, as they still are.
            group: of the ranks; the first one speaks, and who has the elements.
            scaled: a loss scaler looks for its scale by skipping steps.
        """
        if self.is_remote and not torch.cuda.is_current_stream_capturing():
            self._host.copy_(self._report, non_blocking=True)
        seen, self._seen = self._seen, self.counts[SKIPPED]
        if scaled or self._seen <= seen:
            return
        name = _find(buckets)
        if name is None and group.rank != 0:
            return
        self.said = True
        whose = f"the gradient of {name!r}" if name else "a gradient on another rank"
        LOG.warning(
            "step %d was skipped on all ranks: %s is not finite. Nothing was changed."
            " Further ones are counted in optimizer.skipped_steps, and not said",
            step,
            whose,
        )


def _find(buckets: Sequence[GradientBucket]) -> str | None:
    """Return the name of a parameter of whose gradient this rank has an element that is
    not finite."""
    for bucket in buckets:
        for handle in bucket.parameters.handles:
            piece = bucket.parameters.piece_of(handle)
            part = bucket.shard[piece.start : piece.start + piece.numel]
            finite = part.isfinite().all().to("cpu")
            if not ctypes.c_bool.from_address(finite.data_ptr()).value:
                return handle.name
    return None
