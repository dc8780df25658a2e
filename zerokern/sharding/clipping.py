"""Clipping of reduced gradients, as torch's functions do it to p.grad.

A bound on the total norm costs no pass: the update multiplies by the coefficient. It
is multiplied at once where something else needs the gradients as they are then: in a
world of one, where p.grad can be read, before another backward adds to them, and for
norms that the update does not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transport import Transport
from .gradients import GradientBucket

Bound = float | Tensor
"""A number, or a 0-d tensor."""


def coefficient(norm: Tensor, max_norm: Bound) -> Tensor:
    """Return what torch multiplies gradients of a total norm with."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def tighter(bound: Bound | None, other: Bound | None) -> Bound | None:
    """Return the smaller one of two bounds; None is none."""
    if bound is None or other is None:
        return other if bound is None else bound
    if isinstance(bound, Tensor) or isinstance(other, Tensor):
        return torch.minimum(_tensor_of(bound, other), _tensor_of(other, bound))
    return min(bound, other)


def _tensor_of(bound: Bound, like: Bound) -> Tensor:
    if isinstance(bound, Tensor):
        return bound.double()
    assert isinstance(like, Tensor)
    return torch.full(
        (),
        bound,
        dtype=torch.float64,
        device=like.device,
    )


class Clipping:
    """The clipping of one step's gradients, on one rank."""

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        transport: Transport,
    ) -> None:
        self.is_used = False
        """Anything was clipped in this step."""
        self.is_stale = False
        """Gradients of the last step, if still wanted, are to be multiplied."""
        self.bound: Bound | None = None
        """Largest total norm that the coming update has to keep; None: any."""
        self.norm: Tensor | None = None
        """fp64, 0-d: the total norm before any of it was multiplied."""
        self.multiplied: Tensor | None = None
        """fp64, 0-d: what was multiplied in this step."""
        self._buckets = buckets
        self._transport = transport
        self._factor = torch.ones((), dtype=torch.float64, device=transport.device)
        """fp64, 0-d: the coefficient of `bound`."""
        self._is_pending = False
        """Gradients were not multiplied with it yet."""

    def left(self, norm: Tensor) -> Tensor:
        """Return what the bounds so far leave of a norm of the reduced gradients."""
        return norm * self._factor if self._is_pending else norm

    def tighten(
        self,
        norm: Tensor,
        max_norm: Bound,
    ) -> None:
        """Bound the total norm of the coming update.

        Args:
            norm: fp64, 0-d, of the reduced gradients.
            max_norm: applies beside earlier ones.
        """
        self.is_used = True
        self.bound = tighter(self.bound, max_norm)
        assert self.bound is not None
        self._factor.copy_(coefficient(norm, self.bound))
        self._is_pending = True
        if self._transport.groups.alone:
            self.multiply(norm)

    def multiply(self, norm: Tensor | None = None) -> None:
        """Multiply the reduced gradients by the coefficient now, if there is one."""
        is_pending, self._is_pending, self.bound = self._is_pending, False, None
        if not is_pending:
            return
        self.scale(self._factor)
        if self.is_stale:
            self.forget()  # it was reported with its own step
            return
        if self.norm is None:
            self.norm = norm
        before = self.multiplied
        factor = self._factor.clone()
        self.multiplied = factor if before is None else before * factor

    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients."""
        self._refuse_in_join()
        for bucket in self._buckets:
            bucket.change(lambda gradient: gradient.mul_(factor))

    def clamp(self, limit: Bound) -> None:
        """Clamp each element of the reduced gradients to [-limit, limit]."""
        self._refuse_in_join()
        for bucket in self._buckets:
            bucket.change(
                lambda gradient: gradient.clamp_(-limit, limit)  # type: ignore[arg-type]
            )

    def _refuse_in_join(self) -> None:
        if self._transport.announcements.are_heard:
            raise RuntimeError(
                "inside join(), gradients can be clipped by clip_grad_norm_ with"
                " norm_type=2 only, after the last backward of a step: ranks that have"
                " run out of batches would not clip theirs"
            )

    def end_step(self) -> None:
        """The update was made. Gradients that nobody zeroes stay clipped, as in
        torch."""
        self.norm = self.multiplied = self.bound = None
        self.is_used = self.is_stale = self._is_pending

    def forget(self) -> None:
        """The gradients are gone."""
        self.is_used = self.is_stale = self._is_pending = False
        self.bound = self.norm = self.multiplied = None

    def total(self, norm_type: float) -> Tensor:
        """Return the total norm of the reduced gradients over all ranks: fp64, 0-d.

        Args:
            norm_type: positive, or infinity.
        """
        device = self._transport.device
        parts = [torch.zeros((), dtype=torch.float64, device=device)]
        for bucket in self._buckets:
            if bucket.shard.numel():
                shard = bucket.shard
                parts.append(
                    torch.linalg.vector_norm(shard, norm_type, dtype=torch.float64)
                )
        mine = torch.linalg.vector_norm(torch.stack(parts), norm_type)
        words = self._transport.all_gather_words(mine.view(1).view(torch.int64))
        of_ranks = words.flatten().view(torch.float64)
        norm: Tensor = torch.linalg.vector_norm(of_ranks, norm_type)
        return norm
