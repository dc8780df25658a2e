"""What host and kernels agree on: constants, the scalar table, and the tensors of one shard.

Letters: S elements of a shard (a multiple of BLOCK), R parameters (columns of the scalar table), G param groups.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

BLOCK = 64
"""Elements per entry of `block_row` and per block scale: slots start at multiples of it, so a block never holds two
parameters, and the blocks of a parameter are the same however it is sharded."""

PARTIAL = 4096
"""Elements whose squares share one fp64 partial sum."""

CHUNK = 4 * PARTIAL
"""Elements per pass on the CPU: 64 KiB of fp32 stay in the L2 cache and below malloc's mmap threshold."""

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "sign", "decoupled", "nesterov")
"""Columns of `hyper`, fp64 [G, 8]. sign is -1 to maximize; decoupled is 1 for decay of the weight itself, 0 for L2
regularisation. For SGD, beta1 is the momentum and beta2 the dampening."""

TABLE = (
    "coef", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "step_size", "inv_sqrt_c2",
    "eps", "decay", "l2", "nesterov", "active",
)  # fmt: skip
"""Rows of the scalar table, fp32 [12, R]: what one parameter's update needs beside its elements."""

STEP_BITS = 40
"""Bits of a step counter that the power by squaring looks at."""

Rule = Literal["adam", "lion", "sgd"]
"""The update rules. Adam and AdamW are one: they differ in the scalar table."""


class RowMap(NamedTuple):
    """Which part of which parameter each block of a shard is."""

    block_row: Tensor
    """int32 [S / BLOCK], on the shard's device: the row of each block."""

    origin: Tensor
    """int64 [R], on the shard's device: block b of the shard is block b + origin[row] of its parameter."""

    runs: tuple[tuple[int, int, int, int], ...]
    """The same on the host, for the CPU: (first block, end block, row, origin) of each stretch of one parameter."""


class Moment(NamedTuple):
    """One moment of a shard, as stored."""

    values: Tensor
    """fp32 or bf16 [S], or uint8 [S]: the codes of 8-bit blocks."""

    scale: Tensor | None = None
    """uint8 [S / BLOCK]: the biased exponent (E8M0) of each 8-bit block; None for the other formats."""


class Shard(NamedTuple):
    """Everything that one update of a shard reads and writes, but for the gradient."""

    param: Tensor
    """[S], this rank's slot of the gather buffer. fp32, bf16 or fp16."""

    master: Tensor | None
    """What makes a 16-bit parameter precise: fp32 [S], master weights of their own; int16 [S], the low half of a split
    fp32 master whose high half is the bf16 parameter; int8 [S], the low byte of a 24-bit one; or None: an fp32
    parameter is its own master, and a bf16 parameter is rounded stochastically."""

    exp_avg: Moment | None
    """First moment, or SGD's momentum buffer; None for SGD without momentum."""

    exp_avg_sq: Moment | None = None
    """Second moment, of Adam. 8-bit blocks store its root."""

    max_exp_avg_sq: Moment | None = None
    """Largest second moment so far (amsgrad), fp32 or bf16."""

    def tensors(self) -> list[Tensor]:
        """Return every tensor that an update writes."""
        moments = [moment for moment in self[2:] if moment is not None]
        return [t for t in (self.param, self.master, *(t for m in moments for t in m)) if t is not None]


def check_states(rule: Rule, shard: Shard) -> None:
    """Check that a shard has the states of its rule, each in a format that the kernels know.

    Raises:
        ValueError: it has other states.
        TypeError: a format that is not known.
    """
    has = shard.exp_avg is not None, shard.exp_avg_sq is not None, shard.max_exp_avg_sq is not None
    allowed = {"adam": ((True, True),), "lion": ((True, False),), "sgd": ((True, False), (False, False))}
    if has[:2] not in allowed[rule] or (has[2] and rule != "adam"):
        raise ValueError(f"update_: {rule!r} was given (exp_avg, exp_avg_sq, max_exp_avg_sq) = {has}")
    if shard.master is None:
        known = shard.param.dtype in (torch.float32, torch.bfloat16)
    elif shard.master.dtype in (torch.int16, torch.int8):
        known = shard.param.dtype == torch.bfloat16
    else:
        known = shard.master.dtype == torch.float32 and shard.param.dtype in (torch.bfloat16, torch.float16)
    if not known:
        master = None if shard.master is None else shard.master.dtype
        raise TypeError(
            f"update_: param {shard.param.dtype} with master {master}; known are float32 alone, a 16-bit param with a "
            "float32 master, bfloat16 with int16 (split32), int8 (split24) or no master"
        )
    for moment in shard[2:]:
        if moment is None:
            continue
        if moment.values.dtype not in (torch.float32, torch.bfloat16, torch.uint8):
            raise TypeError(f"update_: moment {moment.values.dtype} must be float32, bfloat16, or uint8 with scales")
        scales = None if moment.scale is None else (moment.scale.dtype, moment.scale.numel())
        needed = (torch.uint8, moment.values.numel() // BLOCK) if moment.values.dtype == torch.uint8 else None
        if scales != needed or (moment is shard.max_exp_avg_sq and needed is not None):
            raise TypeError(f"update_: moment {moment.values.dtype} has scales {scales}; it must have {needed}")
