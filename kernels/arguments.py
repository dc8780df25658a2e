"""Shared by host and kernels: constants, the scalar table, and the tensors of one
shard.

Letters: S elements of a shard (a multiple of BLOCK), R parameters (columns of the
         scalar table), G param groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Elements per entry of `block_column` and per block scale: slots start at multiples of
it, so a block never holds two parameters, and the blocks of a parameter are the same
however it is sharded."""

PARTIAL = 4096
"""Elements whose squares share one fp64 partial sum."""

CHUNK = 4 * PARTIAL
"""Elements per pass on the CPU: 64 KiB of fp32 stay in the L2 cache and below malloc's
mmap threshold."""

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "sign", "decoupled", "nesterov")
"""Columns of `hyper`, fp64 [G, 8]. sign is -1 to maximize; decoupled is 1 for decay of
the weight itself, 0 for L2 regularisation. For SGD, beta1 is the momentum and beta2 the
dampening."""

TABLE = (
    "coef",
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "step_size",
    "inv_sqrt_c2",
    "eps",
    "decay",
    "l2",
    "nesterov",
    "active",
)
"""Entries of the scalar table, fp32 [12, R]: what one parameter's update needs beside
its elements."""

STEP_BITS = 40
"""Bits of a step counter that the power by squaring looks at."""

Rule = Literal["adam", "lion", "sgd"]
"""The update rules. Adam and AdamW are one: they differ in the scalar table."""


class StorageFormat(NamedTuple):
    """How the elements of a master or of a moment are stored."""

    dtype: torch.dtype
    scaled: bool = False
    """Whether every block has a scale of one byte beside its elements."""

    @property
    def bytes(self) -> float:
        """Bytes per element, its share of a scale included."""
        return self.dtype.itemsize + (1 / BLOCK if self.scaled else 0.0)


MASTERS: Mapping[str, StorageFormat | None] = {
    "fp32": StorageFormat(torch.float32),
    "split32": StorageFormat(torch.int16),
    "split24": StorageFormat(torch.int8),
    "none": None,
}
"""Storage beside a 16-bit parameter, by the names that `Precision.master`
has."""

MOMENTS: Mapping[str, StorageFormat] = {
    "fp32": StorageFormat(torch.float32),
    "bf16": StorageFormat(torch.bfloat16),
    "8bit": StorageFormat(torch.uint8, scaled=True),
}
"""The formats of moments, by the names that `Precision.moments` has."""


class ColumnMap(NamedTuple):
    """Which part of which parameter each block of a shard is."""

    block_column: Tensor
    """int32 [S / BLOCK], on the shard's device: the column of each block."""

    origin: Tensor
    """int64 [R], on the shard's device: block b of the shard is block b +
    origin[column] of its parameter."""

    runs: tuple[tuple[int, int, int, int], ...]
    """The same on the host, for the CPU: (first block, end block, column, origin) of
    each stretch of one parameter."""


class Moment(NamedTuple):
    """One moment of a shard, as stored."""

    values: Tensor
    """fp32 or bf16 [S], or uint8 [S]: the codes of 8-bit blocks."""

    scale: Tensor | None = None
    """uint8 [S / BLOCK]: the biased exponent (E8M0) of each 8-bit block; None for the
    other formats."""


class Shard(NamedTuple):
    """Everything that one update of a shard reads and writes, but for the gradient."""

    param: Tensor
    """[S], this rank's slot of the gather buffer. fp32, bf16 or fp16."""

    master: Tensor | None
    """Makes a 16-bit parameter precise: fp32 [S], master weights of their own, which
    count where they round to the parameter, so where nobody else has written to it;
    int16 [S], the low half of a split fp32 master whose high half is the bf16
    parameter; int8 [S], the low byte of a 24-bit one; or None: an fp32 parameter is its
    own master, and a bf16 parameter is rounded stochastically."""

    first: Moment | None
    """First moment, or SGD's momentum buffer; None for SGD without momentum."""

    second: Moment | None = None
    """Second moment, of Adam. 8-bit blocks store its root."""

    largest: Moment | None = None
    """Largest second moment so far (amsgrad), fp32 or bf16."""

    @property
    def moments(self) -> tuple[Moment | None, Moment | None, Moment | None]:
        """First, second and largest."""
        return self.first, self.second, self.largest

    def tensors(self) -> list[Tensor]:
        """Return every tensor that an update writes."""
        found = [self.param]
        if self.master is not None:
            found.append(self.master)
        for moment in self.moments:
            if moment is not None:
                found.append(moment.values)
                if moment.scale is not None:
                    found.append(moment.scale)
        return found


def check_states(rule: Rule, shard: Shard) -> None:
    """Check that a shard has the states of its rule, each in a format that the kernels
    know.

    Raises:
        ValueError: it has other states.
        TypeError: a format that is not known.
    """
    first, second, largest = (moment is not None for moment in shard.moments)
    allowed = {
        "adam": ((True, True),),
        "lion": ((True, False),),
        "sgd": ((True, False), (False, False)),
    }
    if (first, second) not in allowed[rule] or (largest and rule != "adam"):
        raise ValueError(
            f"update_: {rule!r} was given (first, second, largest) ="
            f" {(first, second, largest)}"
        )
    _check_weights(shard)
    for moment in shard.moments:
        if moment is not None:
            _check_moment(moment, may_be_scaled=moment is not shard.largest)


def _check_weights(shard: Shard) -> None:
    param = shard.param.dtype
    master = None if shard.master is None else shard.master.dtype
    if master is None:
        known = param in (torch.float32, torch.bfloat16)
    elif master == torch.float32:
        known = param in (torch.bfloat16, torch.float16)
    else:
        known = param == torch.bfloat16 and master in (torch.int16, torch.int8)
    if not known:
        raise TypeError(
            f"update_: param {param} with master {master}; known are float32 alone, a"
            " 16-bit param with a float32 master, bfloat16 with int16 (split32), int8"
            " (split24) or no master"
        )


def _check_moment(moment: Moment, *, may_be_scaled: bool) -> None:
    dtype = moment.values.dtype
    if dtype not in {form.dtype for form in MOMENTS.values()}:
        raise TypeError(
            f"update_: moment {dtype} must be float32, bfloat16, or uint8 with scales"
        )
    found = None
    if moment.scale is not None:
        found = moment.scale.dtype, moment.scale.numel()
    needed = None
    if dtype == torch.uint8:
        needed = torch.uint8, moment.values.numel() // BLOCK
    if found != needed or (needed is not None and not may_be_scaled):
        raise TypeError(
            f"update_: moment {dtype} has scales {found}; it must have {needed}"
        )
