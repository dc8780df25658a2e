"""Which optimizer a parameter belongs to. A newer one takes it over."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary


class Owner(Protocol):
    """An optimizer."""

    def let_go(self) -> None:
        """Leave the parameters to a newer optimizer."""


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""A weak reference to the optimizer of each parameter."""


def release(params: Sequence[nn.Parameter]) -> None:
    """Have the optimizers of these parameters let go of all that they have."""
    owners: dict[int, Owner] = {}
    for param in params:
        known = _owners.get(param)
        owner = None if known is None else known()
        if owner is not None:
            owners[id(owner)] = owner
    for owner in owners.values():
        owner.let_go()


def claim(params: Sequence[nn.Parameter], owner: Owner) -> None:
    """Note that parameters belong to an optimizer."""
    reference = weakref.ref(owner)
    for param in params:
        _owners[param] = reference
