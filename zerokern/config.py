"""What a user may choose, as frozen values; and the one place where the environment is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

Backend = Literal["auto", "triton", "native", "torch"]


def backend() -> Backend:
    """Return `ZEROKERN_BACKEND`: which implementation of the kernels runs.

    "auto" (the default) takes Triton for tensors on a GPU and native code, compiled at the first use, on the CPU;
    "torch" is plain torch everywhere, and what "native" falls back to without a C compiler. All give the same bits.

    Raises:
        ValueError: the variable holds anything else.
    """
    value = os.environ.get("ZEROKERN_BACKEND", "auto")
    if value not in get_args(Backend):
        raise ValueError(
            f"ZEROKERN_BACKEND is {value!r}; it must be one of {', '.join(get_args(Backend))}: set or unset it"
        )
    return value  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How numbers are stored and sent.

    Raises:
        ValueError: a dtype is not a floating dtype that the kernels know.
    """

    wire: torch.dtype | None = None
    """dtype of gradients on the wire and in buckets. None: that of the parameter. Sums are formed in fp32."""

    def __post_init__(self) -> None:
        if self.wire not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"Precision(wire={self.wire}): must be None, torch.float32, torch.bfloat16 or torch.float16"
            )


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How parameters are cut into units of communication, and when these travel.

    Raises:
        ValueError: `bytes` is not positive.
    """

    bytes: int = 25 * 2**20
    """Size of a bucket of parameters in stages 1 and 2, in bytes. A larger parameter has a bucket of its own."""

    overlap: bool = True
    """Exchange a bucket as soon as its gradients are there; stage 3: gather the next unit ahead. Same bits."""

    units: Callable[[nn.Module], bool] | None = None
    """Stage 3: which modules are gathered as one. None: the children of every ModuleList; the rest is the root."""

    def __post_init__(self) -> None:
        if self.bytes <= 0:
            raise ValueError(f"Buckets(bytes={self.bytes}): must be positive; the default is 25 MiB")
