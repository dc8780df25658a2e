"""Is every kernel right on this device? Each against its twin in
`kernels/reference.py`, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from zerokern import config, ops

from .cases import DTYPES
from .recipes import Recipe
from .shards import Step, empty, fill

SHARDS = (64, 4096, 64 * 1023, 2**20 + 64)
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1e-38,
    1.0,
    65504.0,
    -65520.0,
    3.3895e38,
    3.4e38,
    math.inf,
    -math.inf,
    math.nan,
)
FLOATS = tuple(DTYPES.values())
MORE = (
    Recipe("master32 fp16", param=torch.float16, master="fp32", grad=torch.float16),
    Recipe("master32, fp32 gradient", master="fp32", grad=torch.float32),
    Recipe("fp32, bf16 gradient", param=torch.float32),
    Recipe("fp32+bf16", param=torch.float32, moments="bf16", grad=torch.float32),
    Recipe("fp32+8bit", param=torch.float32, moments="8bit", grad=torch.float32),
    Recipe("fp32 amsgrad", param=torch.float32, grad=torch.float32, amsgrad=True),
    Recipe("split24+bf16 amsgrad", master="split24", moments="bf16", amsgrad=True),
    Recipe("lion bf16+8bit", "lion", moments="8bit"),
    Recipe("lion split32+bf16", "lion", master="split32", moments="bf16"),
    Recipe(
        "sgd split24+8bit nesterov",
        "sgd",
        master="split24",
        moments="8bit",
        nesterov=True,
    ),
    Recipe("sgd bf16, no momentum", "sgd", moments=None),
)
"""Recipes that are checked but not timed: with the others, each format of every tensor,
each rule on 8-bit blocks."""

Check = Callable[[str, config.Backend], list[Tensor]]
"""From a device and a back end to what a kernel wrote there."""


def same(
    name: str, check: Check, device: str, backend: config.Backend = "triton"
) -> bool:
    """Run a check on a device and on the twin; say and return whether all bits are
    equal."""
    ours, twins = check(device, backend), check("cpu", "torch")
    equal = all(
        torch.equal(bits(a.cpu()), bits(b)) for a, b in zip(ours, twins, strict=True)
    )
    print(f"{'same bits' if equal else 'DIFFERS  '}  {name}", flush=True)
    return equal


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes; every NaN as one, since its payload is the
    hardware's."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), math.nan)
    return tensor.contiguous().view(torch.uint8)


def checks(
    recipes: Sequence[Recipe], shards: Sequence[int] = SHARDS
) -> Iterator[tuple[str, Check]]:
    """Yield a name and a check for every kernel at every size, the update in these
    recipes and in MORE."""
    for numel, recipe in itertools.product(shards, recipes):
        for l2, special in itertools.product((False, True), repeat=2):
            if not (l2 and recipe.rule == "lion"):
                name = (
                    f"update {recipe.name}"
                    f" {numel}{' l2' if l2 else ''}{' special' if special else ''}"
                )
                yield (
                    name,
                    partial(
                        _update, recipe=recipe, numel=numel, l2=l2, special=special
                    ),
                )
    few = shards[:2][-1]
    for recipe, special in itertools.product(MORE, (False, True)):
        name = f"update {recipe.name} {few}{' special' if special else ''}"
        yield (
            name,
            partial(_update, recipe=recipe, numel=few, l2=False, special=special),
        )
    for numel, (name, dtype) in itertools.product(shards, DTYPES.items()):
        for target_name, target in DTYPES.items():
            yield (
                f"cast {name} to {target_name} {numel}",
                partial(_cast, numel=numel, source=dtype, target=target),
            )
            yield (
                f"pack {name} to {target_name} {numel}",
                partial(_pack, numel=numel, source=dtype, target=target),
            )
        for world, out in itertools.product((1, 2, 4, 7), {torch.float32, dtype}):
            check = partial(_reduce, numel=numel, dtype=dtype, world=world, out=out)
            yield (
                f"reduce {world} x {name} to {str(out).removeprefix('torch.')} {numel}",
                check,
            )
    for rule in ("adam", "lion", "sgd"):
        yield f"scalars {rule}", partial(_scalars, rule=rule)


def numbers(numel: int, seed: int, special: bool = False) -> Tensor:
    """Return the same small fp32 numbers everywhere; with `special`, every seventh is a
    limit of some format."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-2
    if special:
        positions = torch.arange(seed % 7, numel, 7)
        values[positions] = torch.tensor(SPECIAL)[positions % len(SPECIAL)]
    return values


def moved(shard: ops.Shard, device: str) -> ops.Shard:
    """Return a shard on a device."""
    moments = (
        m
        and ops.Moment(
            m.values.to(device), None if m.scale is None else m.scale.to(device)
        )
        for m in shard.moments
    )
    return ops.Shard(
        shard.param.to(device),
        None if shard.master is None else shard.master.to(device),
        *moments,
    )


def _update(
    device: str,
    backend: config.Backend,
    recipe: Recipe,
    numel: int,
    l2: bool,
    special: bool,
) -> list[Tensor]:
    """Two steps of seven parameters; the second of them has no gradient."""
    shard = empty(recipe, numel, "cpu")
    weights, exp_avg, exp_avg_sq, grad = (
        numbers(numel, seed, special) for seed in range(1, 5)
    )
    fill(shard, weights, exp_avg, exp_avg_sq.square())
    step = Step.of(
        recipe,
        numel,
        device,
        backend,
        columns=7,
        shard=moved(shard, device),
        grad=grad.to(recipe.grad).to(device),
    )
    step.set(lr=1e-3, max_norm=0.5, loss_scale=2.0, decoupled=not l2)
    step.gathered[0, 1] &= ~2
    for _ in range(2):
        step.step()
    return step.tensors()


def _cast(
    device: str,
    backend: config.Backend,
    numel: int,
    source: torch.dtype,
    target: torch.dtype,
) -> list[Tensor]:
    out = torch.empty(numel, dtype=target, device=device)
    ops.cast_(
        out, numbers(numel, 0, special=True).to(source).to(device), backend=backend
    )
    return [out]


def _pack(
    device: str,
    backend: config.Backend,
    numel: int,
    source: torch.dtype,
    target: torch.dtype,
) -> list[Tensor]:
    sizes = [1, numel // 3, numel - 1 - numel // 3]  # starts off 16 bytes too
    results = []
    for scale in (1.0, 0.3):
        bucket = torch.zeros(numel, dtype=target, device=device)
        gradients = [numbers(size, size % 5).to(source).to(device) for size in sizes]
        ops.pack_(bucket.split(sizes), gradients, scale, backend=backend)
        results.append(bucket)
    return results


def _reduce(
    device: str,
    backend: config.Backend,
    numel: int,
    dtype: torch.dtype,
    world: int,
    out: torch.dtype,
) -> list[Tensor]:
    results = []
    for rank in sorted({0, world - 1}):
        own = numbers(numel, 5).to(dtype).to(device)
        received = (
            numbers((world - 1) * numel, 6).view(world - 1, numel).to(dtype).to(device)
        )
        shard = numbers(numel, 7).to(out).to(device)
        for accumulate in (False, True):
            partials = torch.zeros(
                ops.partials_numel(numel), dtype=torch.float64, device=device
            )
            ops.reduce_(
                shard,
                own,
                received,
                partials,
                rank=rank,
                scale=1 / world,
                accumulate=accumulate,
                backend=backend,
            )
            # The order of the fp64 sums is the kernel's own, so they may differ in
            # their last bits.
            squares = shard.double().square().sum()
            results += [
                shard.clone(),
                torch.isclose(partials.sum(), squares, rtol=1e-12, atol=0.0),
            ]
    return results


def _scalars(device: str, backend: config.Backend, rule: ops.Rule) -> list[Tensor]:
    """Three steps with clipping and loss scaling, the second of which a non-finite norm
    skips."""
    columns = 70
    table = torch.zeros(len(ops.TABLE), columns, device=device)
    keys = torch.zeros(columns, dtype=torch.int64, device=device)
    steps = torch.arange(columns, device=device)
    report = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=device)
    groups = [
        [1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, 1.0, 0.0],
        [2e-3, 0.8, 0.99, 1e-6, 0.2, -1.0, 0.0, 1.0],
    ]
    words = torch.tensor([[0xFFFF, 0x0F0F, 0], [0, 0xF0F0, 1]], dtype=torch.int64)
    results = []
    for square in (2.0, math.inf, 3.0):
        squares = (
            torch.tensor([square, 3.0], dtype=torch.float64)
            .view(torch.int64)
            .view(2, 1)
        )
        ops.scalars_(
            table,
            keys,
            steps,
            report,
            rule=rule,
            hyper=torch.tensor(groups, dtype=torch.float64, device=device),
            group_of_column=(torch.arange(columns) % 2).to(device),
            seeds=(torch.arange(columns) * 0x123456789ABC).to(device),
            gathered=torch.cat([squares, words], dim=1).to(device),
            limits=torch.tensor([1.0, 8.0], dtype=torch.float64, device=device),
            backend=backend,
        )
        results += [t.clone() for t in (table, keys, steps, report)]
    return results
