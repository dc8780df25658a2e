"""Where gradients are: those of a parameter, and those of a bucket."""

from __future__ import annotations

import enum


class BucketState(enum.Enum):
    """Where a bucket's gradients are.

    LOCAL -> REDUCING -> REDUCED, and back to LOCAL when the next gradient comes. From
    REDUCED to ZEROED when all are zeroed, to UPDATED when they were used in backward.
    """

    LOCAL = enum.auto()
    """This rank's gradients accumulate in `local`."""
    REDUCING = enum.auto()
    """`local` is being exchanged; nobody touches it."""
    REDUCED = enum.auto()
    """`shard` has the mean over the ranks; `local` is gone, or stale where resident."""
    ZEROED = enum.auto()
    """REDUCED, and zeroed since: `shard` has what nobody wants."""
    UPDATED = enum.auto()
    """update_in_backward: the update was made, `shard` is gone. No gradient may come
    before the step ends."""


class SlotState(enum.Enum):
    """Where the parts of a parameter's gradient are."""

    EMPTY = enum.auto()
    LOCAL = enum.auto()
    """This rank's part is in the bucket."""
    REDUCED = enum.auto()
    """The mean over the ranks is in the shard."""
    BOTH = enum.auto()
    """The mean of earlier backwards is in the shard, this rank's part of later ones in
    the bucket. In a world of one the two are the same."""


HAS_LOCAL = (SlotState.LOCAL, SlotState.BOTH)
HAS_REDUCED = (SlotState.REDUCED, SlotState.BOTH)


class Seen(enum.Enum):
    """A look at p.grad: is it what was left in it?"""

    KEPT = enum.auto()
    """As it was left."""
    WRITTEN = enum.auto()
    """The same tensor, but somebody has written to it: a placeholder was zeroed."""
    REPLACED = enum.auto()
    """A tensor of somebody else's."""
    GONE = enum.auto()
    """None."""


OURS = (Seen.KEPT, Seen.WRITTEN)
