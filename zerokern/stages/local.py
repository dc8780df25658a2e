"""This rank's own gradients of one bucket, in one flat tensor, before they are
reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..buffers import ParameterBucket, Scratch
from .tally import Traces


class LocalGradients:
    """Storage, and what of it holds a gradient."""

    def __init__(
        self,
        parameters: ParameterBucket,
        scratch: Scratch,
        names: Sequence[str],
        wire: torch.dtype,
        *,
        resident: bool,
    ) -> None:
        """Set up storage.

        Args:
            parameters: whose gradients these are.
            scratch: where the tensor comes from, unless it is resident.
            names: of the parameters, by slot.
            wire: its dtype.
            resident: it lives forever.
        """
        self.parameters, self.bucket, self.params = (
            parameters,
            parameters.bucket,
            parameters.params,
        )
        self.scratch, self.wire, self.resident = scratch, wire, resident
        # One launch for the whole bucket.
        self.pack_at_once = scratch.device.type == "cuda"
        self.local: Tensor | None = None
        self.views: list[Tensor] = []
        if resident:
            self._open(
                torch.zeros(self.bucket.numel, dtype=wire, device=scratch.device)
            )
        self.traces = Traces(self.params, names)
        self.filled = [False] * len(self.params)
        """Slots of `local` that hold a gradient."""
        self._waiting: dict[int, Tensor] = {}

    def pack(self) -> None:
        """Copy gradients that wait into the bucket."""
        if self._waiting:
            ops.pack_(
                [self.views[index] for index in self._waiting],
                list(self._waiting.values()),
            )
            self._waiting.clear()
            self.traces.forget_all_writes()

    def is_wanted(self, index: int) -> bool:
        """Return whether p.grad is as we left it."""
        grad = self.params[index].grad
        return (
            grad is not None
            and self._is_ours(index, grad)
            and self.traces.is_untouched(index)
        )

    def _is_ours(self, index: int, grad: Tensor) -> bool:
        return self.traces.is_placeholder(index) or (
            bool(self.views) and grad is self.views[index]
        )

    def _ensure_local(self) -> Tensor:
        return (
            self._open(self.scratch.take(self.bucket.numel, self.wire))
            if self.local is None
            else self.local
        )

    def _open(self, local: Tensor) -> Tensor:
        self.local = local
        # .data: each view has a version counter of its own.
        self.views = [view.data for view in self.parameters.views_of(local)]
        for start, end in self.bucket.padding:
            local[start:end].zero_()  # it takes part in sums
        return local

    def _close(self) -> None:
        if self.local is not None:
            self.scratch.give(self.local)
        self.local, self.views = None, []
