"""What the microbenchmarks time: each kernel of zerokern at a size, and what torch offers for the same work.

A provider that cannot run on this device is a reason, not a gap: `Unavailable` says which and why.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from zerokern import config, ops
from zerokern.kernels import native

from .timing import DEVICE, Case

SIZES = [2**20, 2**22, 2**24] if DEVICE == "cpu" else [2**20, 2**22, 2**24, 2**26, 2**28]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
NAMES: tuple[config.Backend, ...] = ("triton", "native", "torch")
BACKENDS = {f"zerokern {name}": name for name in NAMES}


class Unavailable(Exception):
    """A provider does not run on this device."""


def make(op: str, recipe: str, provider: str, numel: int) -> Case:
    """Build a case with its tensors.

    Raises:
        Unavailable: this provider cannot run here.
    """
    if provider == "zerokern triton" and DEVICE == "cpu":
        raise Unavailable(f"{provider} needs a CUDA device, and there is none")
    if provider == "zerokern native" and DEVICE == "cuda":
        raise Unavailable(f"{provider} is for the CPU; hide the GPUs (CUDA_VISIBLE_DEVICES=) to time it")
    if provider == "zerokern native" and not native.available():
        raise Unavailable(f"{provider} needs a C compiler, and there is none")
    return MAKERS[op](recipe, provider, numel)


def every(op: str) -> list[tuple[str, str, int]]:
    """Return the (recipe, provider, elements) of an op."""
    return list(product(RECIPES[op], PROVIDERS[op], SIZES))


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Return normal numbers on the device, the same at every call."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


# ---------------------------------------------------------------------- adamw


def table(rows: int, device: str = DEVICE, step: int = 10) -> Tensor:
    """Return a scalar table with the same hyper-parameters for every parameter."""
    columns = {
        "coef": 1.0, "beta1": BETAS[0], "one_minus_beta1": 1 - BETAS[0],
        "beta2": BETAS[1], "one_minus_beta2": 1 - BETAS[1],
        "step_size": LR / (1 - BETAS[0] ** step), "inv_sqrt_c2": (1 - BETAS[1] ** step) ** -0.5, "eps": EPS,
        "decay": 1 - LR * DECAY, "l2": 0.0, "active": 1.0,
    }  # fmt: skip
    return torch.tensor([[columns[name]] * rows for name in ops.TABLE], dtype=torch.float32, device=device)


def row_map(numel: int, rows: int, device: str = DEVICE) -> ops.RowMap:
    """Return a shard of `rows` parameters of equal size."""
    blocks = numel // ops.BLOCK
    cuts = [blocks * row // rows for row in range(rows + 1)]
    runs = tuple((cuts[row], cuts[row + 1], row) for row in range(rows) if cuts[row] < cuts[row + 1])
    block_row = torch.zeros(blocks, dtype=torch.int32)
    for first, end, row in runs:
        block_row[first:end] = row
    return ops.RowMap(block_row.to(device), runs)


def _adamw(recipe: str, provider: str, numel: int) -> Case:
    low = DTYPES[recipe.partition(" ")[0]]
    weights, grad = random(numel, scale=0.02), random(numel, scale=1e-3)
    make_update = _zerokern_update if provider in BACKENDS else _torch_update
    run = make_update(provider, weights, grad, low)
    # Read weights, gradient and moments, write weights and moments, in fp32; and in 16 bits write the parameter too.
    extra = 0 if low == torch.float32 else low.itemsize
    return Case("adamw", recipe, provider, numel, 28 + extra, (16 + extra) * numel, run)


def _zerokern_update(provider: str, weights: Tensor, grad: Tensor, low: torch.dtype) -> Callable[[], None]:
    param = weights if low == torch.float32 else weights.to(low)
    master = None if low == torch.float32 else weights
    exp_avg, exp_avg_sq = torch.zeros_like(weights), torch.zeros_like(weights)
    rows = row_map(weights.numel(), 32)
    scalars = table(32)
    backend = BACKENDS[provider]

    def run() -> None:
        ops.adamw_(param, master, exp_avg, exp_avg_sq, grad, table=scalars, rows=rows, backend=backend)

    return run


def _torch_update(provider: str, weights: Tensor, grad: Tensor, low: torch.dtype) -> Callable[[], None]:
    master = nn.Parameter(weights)
    master.grad = grad
    optimizer = torch.optim.AdamW([master], LR, BETAS, EPS, DECAY, **{provider.removeprefix("torch "): True})
    if low == torch.float32:
        return optimizer.step
    param = weights.to(low)

    def run() -> None:
        optimizer.step()
        param.copy_(master.detach())

    return run


# ---------------------------------------------------------------------- pack, reduce, cast


def _pack(recipe: str, provider: str, numel: int) -> Case:
    source, destination = (DTYPES[name] for name in recipe.split(" to "))
    sizes = [numel // 32 - 64, 64] * 32  # 32 matrices, each with a small vector
    sources = [random(size, dtype=source) for size in sizes]
    destinations = list(torch.empty(numel, dtype=destination, device=DEVICE).split(sizes))

    def run() -> None:
        if provider == "torch _foreach_copy_":
            torch._foreach_copy_(destinations, sources)
        else:
            ops.pack_(destinations, sources)

    moved = source.itemsize + destination.itemsize
    return Case("pack", recipe, provider, numel, moved, numel * moved, run)


def _reduce(recipe: str, provider: str, numel: int) -> Case:
    world, wire = int(recipe.split()[0]), DTYPES[recipe.split()[-1]]
    own, received = random(numel, dtype=wire), random(world - 1, numel, dtype=wire)
    shard = torch.empty(numel, device=DEVICE)
    partials = torch.empty(ops.partials_numel(numel), dtype=torch.float64, device=DEVICE)
    norm = torch.empty((), device=DEVICE)

    def run_torch() -> None:
        shard.copy_(own)
        for chunk in received:
            shard.add_(chunk)
        shard.mul_(1 / world)
        torch.linalg.vector_norm(shard, out=norm)

    def run() -> None:
        ops.reduce_(shard, own, received, partials, rank=0, scale=1 / world, backend=BACKENDS[provider])

    moved = world * wire.itemsize + 4
    return Case("reduce", recipe, provider, numel, moved, numel * moved, run if provider in BACKENDS else run_torch)


def _cast(recipe: str, provider: str, numel: int) -> Case:
    source, destination = (DTYPES[name] for name in recipe.split(" to "))
    given, out = random(numel, dtype=source), torch.empty(numel, dtype=destination, device=DEVICE)

    def run() -> None:
        if provider == "torch copy_":
            out.copy_(given)
        else:
            ops.cast_(out, given)

    return Case("cast", recipe, provider, numel, source.itemsize + destination.itemsize, given.nbytes + out.nbytes, run)


MAKERS = {"adamw": _adamw, "pack": _pack, "reduce": _reduce, "cast": _cast}
RECIPES = {
    "adamw": ["fp32", "bf16 + fp32 master"],
    "pack": ["fp32 to fp32", "fp32 to bf16", "bf16 to bf16"],
    "reduce": ["2 chunks of fp32", "4 chunks of fp32", "2 chunks of bf16", "4 chunks of bf16"],
    "cast": ["fp32 to bf16", "bf16 to fp32"],
}
PROVIDERS = {
    "adamw": [*BACKENDS, "torch fused", "torch foreach"],
    "pack": ["zerokern", "torch _foreach_copy_"],
    "reduce": [*BACKENDS, "torch add_ mul_ norm"],
    "cast": ["zerokern", "torch copy_"],
}
