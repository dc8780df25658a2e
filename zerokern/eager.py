"""Functions that torch.compile must not look into: they move memory and talk to other
ranks, and have no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """Run a function as it is, also when compiled code comes to it. A decorator."""
    reason = (
        "zerokern gathers, reduces or updates here; compile each unit, not what is"
        " around it"
    )
    disabled: Function = torch.compiler.disable(function, reason=reason)
    return disabled
