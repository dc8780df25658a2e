"""Views of an optimizer at work: gradients, norms, bytes, collectives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .comm_log import Call
from .memory import Memory, bytes_of
from .sharding.coordinator import Coordinator
from .sharding.gradients import BucketState, GradientBucket
from .sharding.handles import ParamHandle
from .transport import Gather


class Observation:
    """Looks at one coordinator, and changes nothing."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """See `ShardedOptimizer.full_grad`."""
        found = self._find(param)
        if found is None:
            return None
        bucket, handle = found
        title = f"gradient {bucket.transfer.title}"
        gather = Gather(self._coordinator.transport, bucket.layout, title, "step")
        gather.start(bucket.shard)
        view = bucket.parameters.views_of(gather.wait())[handle.slot]
        gradient = view.to(torch.float32, copy=True)
        gather.free()
        return gradient

    def local_grad(self, param: nn.Parameter) -> Tensor | None:
        """See `ShardedOptimizer.local_grad`."""
        found = self._find(param)
        if found is None:
            return None
        bucket, handle = found
        piece = bucket.parameters.piece_of(handle)
        return bucket.shard[piece.start : piece.start + piece.numel]

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
        for bucket in coordinator.gradients:
            if bucket.layout.index == handle.bucket:
                return bucket, handle
        raise AssertionError("every trainable parameter has a bucket")

    def metrics(self, loss_scale: float | Tensor | None) -> dict[str, float]:
        """See `ShardedOptimizer.metrics`.

        Args:
            loss_scale: what the last step divided the gradients by.
        """
        transport = self._coordinator.transport
        norm, coefficient, skipped = self._coordinator.updater.report.tolist()
        return {
            "step": transport.step,
            "grad_norm": norm,
            "clip_coefficient": coefficient,
            "skipped_steps": int(skipped),
            "loss_scale": 1.0 if loss_scale is None else float(loss_scale),
            "bytes_sent": transport.sent_in_step,
            "wait_ms": transport.wait_ms_in_step(),
        }

    def memory(self) -> Memory:
        """See `ShardedOptimizer.memory`."""
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

    def comm_log(self, *, clear: bool) -> tuple[Call, ...]:
        """See `ShardedOptimizer.comm_log`."""
        log = self._coordinator.transport.log
        calls = tuple(log)
        if clear:
            log.clear()
        return calls

    def grad_norm(self) -> Tensor:
        """Return the total gradient norm of the last step, before clipping: an fp64 0-d
        tensor on the device."""
        return self._coordinator.updater.report[0]

    def skipped_steps(self) -> Tensor:
        """Return the steps skipped for non-finite gradients so far: an fp64 0-d tensor
        on the device."""
        return self._coordinator.updater.report[2]
