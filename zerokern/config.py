"""What a user may choose, as frozen values; and the one place where the environment is
read."""

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

    "auto" (the default) takes Triton for tensors on a GPU and native code, compiled at
    the first use, on the CPU; "torch" is plain torch everywhere, and what "native"
    falls back to without a C compiler. All give the same bits.

    Raises:
        ValueError: the variable holds anything else.
    """
    value = os.environ.get("ZEROKERN_BACKEND", "auto")
    if value not in get_args(Backend):
        raise ValueError(
            f"ZEROKERN_BACKEND is {value!r}; it must be one of"
            f" {', '.join(get_args(Backend))}: set or unset it"
        )
    return value  # type: ignore[return-value]


def check_steps() -> int:
    """Return `ZEROKERN_CHECK`: how many steps of a script are compared with plain
    torch, after which it ends; 0, the default, is none.

    Raises:
        ValueError: the variable holds anything but a number.
    """
    value = os.environ.get("ZEROKERN_CHECK", "") or "0"
    if not value.isdecimal():
        raise ValueError(
            f"ZEROKERN_CHECK is {value!r}; it must be how many steps to compare with"
            " plain torch, such as 3: set or unset it"
        )
    return int(value)


def rank_of_process() -> int:
    """Return `RANK`, which torchrun sets; 0 without it."""
    return int(os.environ.get("RANK", "0"))


Master = Literal["fp32", "split32", "split24", "none"]
Moments = Literal["fp32", "bf16", "8bit"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How numbers are stored and sent. Every combination is one pass of one kernel;
    docs/design.md has their bytes.

    Example::

        AdamW(model.parameters(), precision=Precision(master="split32", moments="8bit"))

    Raises:
        ValueError: a value that is none of those below.
    """

    master: Master = "fp32"
    """How 16-bit parameters stay precise; fp32 parameters need nothing.

    "fp32": an fp32 copy, 4 bytes. "split32": the 16 bits that a bf16 parameter lacks to
    fp32, 2 bytes. "split24": 8 of them, 1 byte, rounded stochastically. "none":
    nothing; a bf16 parameter itself is rounded stochastically."""

    moments: Moments = "fp32"
    """The moments of every parameter. "fp32": 4 bytes each. "bf16": 2, rounded
    stochastically, so that small changes are not lost. "8bit": 8-bit floats in blocks
    of 64 with a power-of-two scale, rounded stochastically: 1.02 bytes."""

    wire: torch.dtype | None = None
    """dtype of gradients on the wire and in buckets. None: that of the parameter. Sums
    are formed in fp32."""

    gradients: torch.dtype = torch.float32
    """dtype of the reduced gradients, which a rank holds for its shard."""

    seed: int = 0
    """The seed of stochastic rounding, beside step, parameter and element.
    torch's generators are not used."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("master", self.master, get_args(Master)),
            ("moments", self.moments, get_args(Moments)),
            ("wire", self.wire, (None, *FLOATS)),
            ("gradients", self.gradients, FLOATS),
        ):
            if value not in allowed:
                raise ValueError(
                    f"Precision({name}={value!r}): must be one of"
                    f" {', '.join(repr(choice) for choice in allowed)}"
                )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"Precision(seed={self.seed!r}): must be an integer")


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How parameters are cut into units of communication, and when these travel.

    Raises:
        ValueError: `bytes` is not positive.
    """

    bytes: int = 25 * 2**20
    """Size of a bucket of parameters in stages 1 and 2, in bytes. A larger parameter
    has a bucket of its own."""

    overlap: bool = True
    """Exchange a bucket as soon as its gradients are there; stage 3: gather the next
    unit ahead. Same bits."""

    update_in_backward: bool = False
    """Update a bucket as soon as its gradients are reduced: they take the memory of a
    bucket or two, and the update is hidden behind backward. Every backward outside of
    `no_sync` is the last of its step. Excludes what needs all gradients before the
    first update: clipping, loss scaling, and skipping steps that are not finite."""

    gather_in_forward: bool = False
    """Stages 1 and 2: let the gathers of a step run on while the next forward computes,
    and wait for a bucket where one of its parameters is first read. With
    `torch.compile`, pass `model` too: compiled code cannot wait, units can."""

    units: Callable[[nn.Module], bool] | None = None
    """Stage 3: which modules are gathered as one. None: the children of every
    ModuleList; the rest is the root."""

    def __post_init__(self) -> None:
        if self.bytes <= 0:
            raise ValueError(
                f"Buckets(bytes={self.bytes}): must be positive; the default is 25 MiB"
            )
