"""Who is told how far the reduction of gradients is."""

from __future__ import annotations

from typing import Protocol

from .gradients import GradientBucket


class Schedule(Protocol):
    """Gathers parameters in backward, and says which buckets are ready; without it, a
    bucket is when it is complete."""

    def gradients_complete(self, bucket: GradientBucket) -> None:
        """A bucket's gradients have all come."""

    def end_backward(self) -> None:
        """A backward pass has ended, or failed."""


class Updates(Protocol):
    """Updates parameters in backward."""

    def reduced(self, bucket: GradientBucket) -> None:
        """A bucket was reduced for the last time before its update, in launch order."""

    def end_backward(self) -> None:
        """A backward pass has ended, or failed."""
