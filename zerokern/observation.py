"""Views of an optimizer at work: gradients, norms, bytes, collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .comm_log import Call
from .memory import Memory, bytes_of
from .sharding.clipping import coefficient, tighter
from .sharding.coordinator import Coordinator
from .sharding.gradient_states import BucketState
from .sharding.gradients import GradientBucket
from .sharding.handles import ParamHandle

P = ParamSpec("P")
Result = TypeVar("Result")


class Observed(Protocol):
    """An optimizer."""

    def observation(self, *, collective: bool) -> Observation:
        """Return what looks at it."""


def observed(
    method: Callable[Concatenate[Observation, P], Result], *, collective: bool = False
) -> Callable[Concatenate[Any, P], Result]:
    """Return a method of an optimizer that is one of its observation.

    Args:
        method: of `Observation`.
        collective: all ranks must call it.
    """

    @functools.wraps(method)
    @torch.no_grad()
    def look(optimizer: Observed, /, *args: P.args, **options: P.kwargs) -> Result:
        observation = optimizer.observation(collective=collective)
        return method(observation, *args, **options)

    return look


class Observation:
    """Looks at one coordinator, and changes nothing."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, averaged over the ranks, as a new tensor. All
        ranks must call it.

        What is not reduced yet is reduced now; training goes on with the same result.
        Before the step, since after it a gradient still stands for the next one, as in
        torch, until it is zeroed.

        Args:
            param: one that this optimizer trains.

        Returns:
            fp32, in the parameter's shape, before clipping and with any loss scale in
                it; None if no rank has used it.

        Raises:
            ValueError: the parameter is of another optimizer, or updates are made in
                backward.
        """
        found = self._find(param)
        if found is None:
            return None
        _, handle = found
        coordinator = self._coordinator
        announcements = coordinator.transport.announcements
        if announcements.are_heard:
            announcements.announce("gradient", handle.index)
        return coordinator.gather_gradient(handle.index)

    def local_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return this rank's part of what `full_grad` returns, under the same
        conditions. Nothing is gathered, but all ranks must call it.

        Returns:
            1-d view of the shard, perhaps empty, in the dtype of `Precision.gradients`:
                the elements, in memory order, that `range` in `state_dict()` says. None
                if no rank has used the parameter.
        """
        found = self._find(param)
        if found is None:
            return None
        bucket, handle = found
        piece = bucket.parameters.piece_of(handle)
        return bucket.shard[piece.start : piece.start + piece.numel]

    def gradients_to_use(
        self,
        max_norm: float | None,
        loss_scale: Tensor | None,
    ) -> dict[int, Tensor | None]:
        """Return what the coming update works with: gradients averaged, unscaled and
        clipped, by the id of the parameter. All ranks must call it.

        Args:
            max_norm, loss_scale: as of `Coordinator.step`.

        Returns:
            fp32, whole; None of a parameter that no rank has used. Empty if updates are
                made in backward.
        """
        coordinator = self._coordinator
        if coordinator.updates_in_backward:
            return {}
        coordinator.synchronize()
        bound = tighter(max_norm, coordinator.clipping.bound)
        norm = coordinator.updater.norm(loss_scale)
        factor = torch.ones_like(norm) if bound is None else coefficient(norm, bound)
        if loss_scale is not None:
            factor = factor / loss_scale.to(norm.device, torch.float64)
        found: dict[int, Tensor | None] = {}
        for handle in coordinator.handles:
            if handle.column >= 0 and handle.group >= 0:
                gradient = self.full_grad(handle.param)
                used = None if gradient is None else gradient * factor
                found[id(handle.param)] = used if used is None else used.float()
        return found

    def _find(self, param: nn.Parameter) -> tuple[GradientBucket, ParamHandle] | None:
        """Synchronize all gradients. Return the bucket of one and its handle, or None
        if no rank has it."""
        coordinator = self._coordinator
        handle = coordinator.handles.find(param)
        if handle is None or handle.column < 0:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not one that this"
                " optimizer trains"
            )
        coordinator.refuse_in_backward("reading a gradient")
        coordinator.synchronize()
        if not coordinator.updater.was_used(handle.column):
            return None
        return coordinator.gradients_of(handle), handle

    def metrics(self) -> dict[str, float]:
        """Return what the last step was like, as plain numbers for a log. The host
        waits for the device here.

        Returns:
            step: steps so far. grad_norm: before clipping. clip_coefficient: what the
                gradients were multiplied with. skipped_steps: so far. loss_scale: of
                this step. bytes_sent: by this rank since the step before, all
                collectives. wait_ms: spent waiting for collectives, by the host on a
                CPU, by the stream on a GPU.
        """
        transport = self._coordinator.transport
        norm, coefficient, skipped = self._coordinator.updater.report.tolist()
        scale = self._coordinator.loss_scale
        return {
            "step": transport.step,
            "grad_norm": norm,
            "clip_coefficient": coefficient,
            "skipped_steps": int(skipped),
            "loss_scale": 1.0 if scale is None else float(scale),
            "bytes_sent": transport.sent_in_step,
            "wait_ms": transport.wait_ms_in_step(),
        }

    def memory(self) -> Memory:
        """Return the bytes of model state that this rank holds, by role."""
        coordinator = self._coordinator
        buckets = coordinator.buckets
        gradients = coordinator.gradients
        moments = []
        for bucket in buckets:
            for moment in bucket.shard.moments:
                moments += [] if moment is None else list(moment)
        waiting = [
            gradient.local
            for gradient in gradients
            if gradient.state is BucketState.LOCAL and not gradient.is_resident
        ]
        resident = [gradient.local for gradient in gradients if gradient.is_resident]
        shards = [gradient.shard for gradient in gradients]
        return Memory(
            parameters=bytes_of(coordinator.parameters.memory()),
            gradients=bytes_of([*shards, *waiting, *resident]),
            master=bytes_of(bucket.shard.master for bucket in buckets),
            moments=bytes_of(moments),
            buffers=coordinator.transport.live_bytes - bytes_of(waiting),
            tables=bytes_of(coordinator.updater.tables()),
        )

    def comm_log(self, *, clear: bool = False) -> tuple[Call, ...]:
        """Return this rank's collectives, oldest first; the last 65,536 of them.

        Args:
            clear: forget them afterwards.
        """
        log = self._coordinator.transport.log
        calls = tuple(log)
        if clear:
            log.clear()
        return calls

    def grad_norm(self) -> Tensor:
        """Total gradient norm of the last step, before clipping: fp64, 0-d."""
        return self._coordinator.updater.report[0]

    def skipped_steps(self) -> Tensor:
        """Steps skipped for non-finite gradients so far: fp64, 0-d."""
        return self._coordinator.updater.report[2]
