"""ZeRO-2: ZeRO-1 whose gradients are sharded too."""

from __future__ import annotations

from .zero1 import Zero1


class Zero2(Zero1):
    """Every backward reduces each bucket into this rank's shard; the bucket's memory
    goes back at once.

    Accumulating A micro-batches therefore sends A x P + P elements, or 2P with the
    first A - 1 under `no_sync`, where gradients stay at full size until they are
    reduced.
    """

    gradients_resident = False
