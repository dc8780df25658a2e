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
        owner = _owner_of(param)
        if owner is not None:
            owners[id(owner)] = owner
    for owner in owners.values():
        owner.let_go()


def lent(frozen: Sequence[nn.Parameter], ours: Sequence[nn.Parameter]) -> set[int]:
    """Return, by id, the frozen parameters that another optimizer has and goes on
    having: it is not one whose parameters are taken over with `ours`."""
    taken_over = {id(owner) for owner in map(_owner_of, ours)}
    lent = set()
    for param in frozen:
        owner = _owner_of(param)
        if owner is not None and id(owner) not in taken_over:
            lent.add(id(param))
    return lent


def _owner_of(param: nn.Parameter) -> Owner | None:
    known = _owners.get(param)
    return None if known is None else known()


def claim(params: Sequence[nn.Parameter], owner: Owner) -> None:
    """Note that parameters belong to an optimizer."""
    reference = weakref.ref(owner)
    for param in params:
        _owners[param] = reference
