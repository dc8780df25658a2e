"""A shard of more than 2^31 elements: offsets and counts that are 32 bits wide
somewhere show here.

Users of other optimizers reported all of these: illegal accesses, counts that overflow,
kernels that do nothing and say nothing, wrong norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerokern import config, ops
from zerokern.kernels import reference

from .checks import bits
from .recipes import RECIPES
from .shards import Step

RECIPE = RECIPES["bf16+8bit"]
NUMEL = 2**31 + 2**20
SENTINELS = (0, 2**31 - 1, 2**31, NUMEL - 1)
GUARD = 4096
"""Elements behind each tensor that nothing may touch."""

PATTERN = 7
PIECE = 2**26
BYTES_PER_ELEMENT = 7.0
SAMPLES = 256


class Guarded:
    """Tensors with a guard behind each."""

    def __init__(self, device: str) -> None:
        """Guard nothing yet."""
        self.device = device
        self.behind: list[Tensor] = []

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros, and remember what lies behind them."""
        whole = torch.zeros(numel + GUARD, dtype=dtype, device=self.device)
        self.behind.append(whole[numel:].fill_(PATTERN))
        return whole[:numel]

    def untouched(self) -> bool:
        """Return whether every guard is as it was."""
        return all(bool((guard == PATTERN).all()) for guard in self.behind)


def faults(
    device: str,
    numel: int = NUMEL,
    sentinels: tuple[int, ...] = SENTINELS,
    backend: config.Backend = "triton",
) -> list[str]:
    """Take one step of a single parameter of `numel` elements; return what is wrong
    with it."""
    guarded = Guarded(device)
    step, blocks = (
        _set_up(guarded, numel, sentinels, backend),
        _sample(numel, sentinels),
    )
    squares = sum(
        float(piece.double().square().sum()) for piece in step.grad.split(PIECE)
    )
    expected, grad = _gathered(step.shard, blocks), _blocks_of(step.grad, blocks)
    before = step.shard.param[list(sentinels)].tolist()
    step.clipped_step()
    columns = ops.ColumnMap(
        torch.zeros(len(blocks), dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        tuple(
            (place, place + 1, 0, block - place) for place, block in enumerate(blocks)
        ),
    )
    reference.update_(
        expected,
        grad,
        rule=RECIPE.rule,
        table=step.table.cpu(),
        keys=step.keys.cpu(),
        columns=columns,
    )
    found = []
    if not abs(float(step.partials.sum()) / squares - 1) < 1e-9:
        found.append(
            f"the sum of squares is {float(step.partials.sum())}, not {squares}"
        )
    after = step.shard.param[list(sentinels)].tolist()
    still = [
        at for at, old, new in zip(sentinels, before, after, strict=True) if old == new
    ]
    if still:
        found.append(f"elements {still} did not change")
    actual = _gathered(step.shard, blocks)
    if not all(
        torch.equal(bits(a), bits(b))
        for a, b in zip(actual.tensors(), expected.tensors(), strict=True)
    ):
        found.append(
            "blocks around the sentinels, or a sample of the others, differ from"
            " the reference"
        )
    if unwritten := _unwritten(step):
        found.append(f"{unwritten} elements were not written")
    if not guarded.untouched():
        found.append("something was written behind the last element")
    return found


def _set_up(
    guarded: Guarded, numel: int, sentinels: tuple[int, ...], backend: config.Backend
) -> Step:
    """Return a first step: moments are zero, so every element whose gradient is not
    zero moves by the learning rate."""
    scales = numel // ops.BLOCK
    moments = [
        ops.Moment(guarded(numel, torch.uint8), guarded(scales, torch.uint8).fill_(127))
        for _ in range(2)
    ]
    shard = ops.Shard(guarded(numel, RECIPE.param), None, *moments)
    grad = guarded(numel, RECIPE.grad)
    generator = torch.Generator(guarded.device).manual_seed(0)
    for param, gradient in zip(
        shard.param.split(PIECE), grad.split(PIECE), strict=True
    ):
        param.normal_(std=2e-2, generator=generator)
        gradient.normal_(generator=generator)
    grad[list(sentinels)] = 1.0
    step = Step.of(
        RECIPE, numel, guarded.device, backend, columns=1, shard=shard, grad=grad
    )
    step.steps.zero_()
    step.set(lr=0.1)
    return step


def _sample(numel: int, sentinels: tuple[int, ...]) -> list[int]:
    """Return the blocks that are compared: those of the sentinels, and others at even
    distances."""
    blocks = numel // ops.BLOCK
    return sorted(
        {at // ops.BLOCK for at in sentinels}
        | {blocks * i // SAMPLES for i in range(SAMPLES)}
    )


def _blocks_of(tensor: Tensor, blocks: list[int], size: int = ops.BLOCK) -> Tensor:
    """Return copies of some blocks on the CPU. Sliced one by one, so that no indexing
    kernel of torch is trusted."""
    return torch.cat(
        [tensor[block * size : (block + 1) * size].cpu() for block in blocks]
    )


def _gathered(shard: ops.Shard, blocks: list[int]) -> ops.Shard:
    moments = [
        (
            None
            if m is None or m.scale is None
            else ops.Moment(
                _blocks_of(m.values, blocks), _blocks_of(m.scale, blocks, 1)
            )
        )
        for m in shard.moments
    ]
    return ops.Shard(_blocks_of(shard.param, blocks), None, *moments)


def _unwritten(step: Step) -> int:
    """Count elements that have a gradient but no second moment: its code is 0 only
    where the moment is."""
    assert step.shard.second is not None
    pieces = zip(
        step.shard.second.values.split(PIECE), step.grad.split(PIECE), strict=True
    )
    return sum(int(((codes == 0) & (grad != 0)).sum()) for codes, grad in pieces)
