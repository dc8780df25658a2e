"""Which modules have a parameter. It does not know; Python's collector knows all
modules."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import Tensor, nn


def is_held(params: Sequence[Tensor], kind: type[nn.Module]) -> bool:
    """Return whether a module of a kind, or of a subclass, has any of the parameters.
    Looks at every object that there is."""
    if not _holds(params, kind):
        return False
    gc.collect()  # one that nobody holds any more does no harm
    return _holds(params, kind)


def _holds(params: Sequence[Tensor], kind: type[nn.Module]) -> bool:
    ours = set(map(id, params))
    kinds = _with_subclasses(kind)
    modules = [known for known in gc.get_referrers(*kinds) if type(known) in kinds]
    return any(id(param) in ours for module in modules for param in module.parameters())


def _with_subclasses(kind: type[nn.Module]) -> set[type[nn.Module]]:
    kinds = {kind}
    for subclass in kind.__subclasses__():
        kinds |= _with_subclasses(subclass)
    return kinds
