"""What can be seen of an optimizer at work: gradients, norms, bytes, collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .buffers import Memory
from .comm import Call
from .layout import Piece
from .stages.gradients import GradientBucket, State
from .stages.zero1 import Zero1
from .stateful import StatefulOptimizer


class ObservableOptimizer(StatefulOptimizer):
    """The methods that look and change nothing."""

    _last_scale: float | Tensor
    """What the last step divided the gradients by."""

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
        with torch.no_grad():
            zero = self._coordinator()
            found = _find_gradient(zero, param)
            if found is None:
                return None
            bucket, index, _ = found
            whole = zero.scratch.take(bucket.bucket.numel, bucket.shard.dtype)
            whole[bucket.bucket.shard(zero.comm.rank)].copy_(bucket.shard)
            zero.comm.all_gather(whole, f"gradient {bucket.exchange.name}").wait()
            gradient = bucket.parameters.views_of(whole)[index].to(
                torch.float32, copy=True
            )
            zero.scratch.give(whole)
            return gradient

    def local_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return this rank's part of what `full_grad` returns. Nothing is gathered, but
        all ranks must call it.

        Args:
            param: one that this optimizer trains.

        Returns:
            1-d view of the shard, perhaps empty, in the dtype of `Precision.gradients`:
                the elements, in memory order,
            that `range` in `state_dict()` says. None if no rank has used the parameter.

        Raises:
            ValueError: as for `full_grad`.
        """
        with torch.no_grad():
            found = _find_gradient(self._coordinator(), param)
            if found is None:
                return None
            bucket, _, piece = found
            return bucket.shard[piece.start : piece.start + piece.numel]

    def metrics(self) -> dict[str, float]:
        """Return what the last step was like, as plain numbers for a log. The host
        waits for the device here.

        Returns:
            step: steps so far. grad_norm: before clipping. clip_coefficient: what the
                gradients were multiplied with.
            skipped_steps: so far. loss_scale: of this step. bytes_sent: by this rank
                since the step before, all
            collectives. wait_ms: spent waiting for the wire, by the host on a CPU, by
                the stream on a GPU.
        """
        zero = self._coordinator()
        norm, coefficient, skipped = zero.scalars.report.tolist()
        return {
            "step": zero.comm.step,
            "grad_norm": norm,
            "clip_coefficient": coefficient,
            "skipped_steps": int(skipped),
            "loss_scale": float(self._last_scale),
            "bytes_sent": zero.comm.sent_in_step,
            "wait_ms": zero.comm.waits_in_step.milliseconds(),
        }

    def memory(self) -> Memory:
        """Return the bytes of model state that this rank holds, by role."""
        zero = self._coordinator()
        tables = [
            *zero.scalars.tables(),
            *(t for rows in zero.row_maps for t in (rows.block_column, rows.origin)),
        ]
        moments = [
            t
            for p in zero.parameters
            for moment in p.shard.moments
            if moment is not None
            for t in moment
        ]
        waiting = [
            g.local
            for g in zero.gradients
            if g.local is not None and g.state is State.LOCAL and not g.resident
        ]
        resident = [g.local for g in zero.gradients if g.resident]
        return Memory(
            parameters=_bytes_of(
                [p.own if zero.parameters_sharded else p.full for p in zero.parameters]
            ),
            gradients=_bytes_of(
                [*(g.shard for g in zero.gradients), *waiting, *resident]
            ),
            master=_bytes_of([p.shard.master for p in zero.parameters]),
            moments=_bytes_of(moments),
            buffers=zero.scratch.live_bytes - _bytes_of(waiting),
            tables=_bytes_of(tables),
        )

    def comm_log(self, *, clear: bool = False) -> tuple[Call, ...]:
        """Return this rank's collectives, oldest first; the last 65,536 of them.

        Args:
            clear: forget them afterwards.
        """
        calls = tuple(self._coordinator().comm.log)
        if clear:
            self._coordinator().comm.log.clear()
        return calls

    @property
    def grad_norm(self) -> Tensor:
        """Total gradient norm of the last step, before clipping: an fp64 0-d tensor on
        the device."""
        return self._coordinator().scalars.report[0]

    @property
    def skipped_steps(self) -> Tensor:
        """Steps skipped for non-finite gradients so far: an fp64 0-d tensor on the
        device."""
        return self._coordinator().scalars.report[2]


def _bytes_of(tensors: Sequence[Tensor | None]) -> int:
    """Return the bytes of distinct storages."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _find_gradient(
    zero: Zero1, param: nn.Parameter
) -> tuple[GradientBucket, int, Piece] | None:
    """Settle all gradients; return the bucket, the slot and this rank's piece of one,
    or None if no rank has it."""
    where = [
        (bucket, i)
        for bucket in zero.gradients
        for i, known in enumerate(bucket.params)
        if known is param
    ]
    if not where:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not one that this optimizer"
            " trains"
        )
    zero.refuse_passing("reading a gradient")
    zero.settle_gradients()
    bucket, index = where[0]
    slot = bucket.bucket.slots[index]
    if not zero.scalars.was_used(zero.row_of[slot.param]):
        return None
    pieces = (
        piece
        for piece in bucket.bucket.pieces(zero.comm.rank)
        if piece.param == slot.param
    )
    return bucket, index, next(pieces, Piece(slot.param, 0, 0, 0))
