"""What `pytest bench/` times: each kernel of zerokern at a size, and what torch offers
for the same work.

A provider that cannot run on this device is a reason, not a gap: `Unavailable` says
which and why.
"""

from __future__ import annotations

from itertools import product

import torch

from zerokern import config, ops
from zerokern.kernels import native

from . import providers
from .recipes import RECIPES as STORAGE
from .recipes import Unavailable
from .shards import Step, random
from .timing import DEVICE, Case

SIZES = (
    [2**20, 2**22, 2**24] if DEVICE == "cpu" else [2**20, 2**22, 2**24, 2**26, 2**28]
)
SLOW = 2**20
"""The largest size for plain torch on storage formats, which takes 100 times as long as
any other provider."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES: tuple[config.Backend, ...] = ("triton", "native", "torch")
BACKENDS = {f"zerokern {name}": name for name in NAMES}
TORCH = {
    p.name: p
    for p in (*providers.PROVIDERS, *providers.FOREACH)
    if p.name.startswith("torch ")
}


def make(op: str, recipe: str, provider: str, numel: int) -> Case:
    """Build a case with its tensors.

    Raises:
        Unavailable: this provider cannot run here.
    """
    if provider == "zerokern triton" and DEVICE == "cpu":
        raise Unavailable(f"{provider} needs a CUDA device, and there is none")
    if provider == "zerokern native" and DEVICE == "cuda":
        raise Unavailable(
            f"{provider} is for the CPU; hide the GPUs (CUDA_VISIBLE_DEVICES=) to"
            " time it"
        )
    if provider == "zerokern native" and not native.available():
        raise Unavailable(f"{provider} needs a C compiler, and there is none")
    return MAKERS[op](recipe, provider, numel)


def every(op: str) -> list[tuple[str, str, int]]:
    """Return the (recipe, provider, elements) of an op."""
    if op != "update":
        return list(product(RECIPES[op], PROVIDERS[op], SIZES))
    found = []
    for recipe in STORAGE.values():
        others = [
            p.name
            for p in TORCH.values()
            if recipe.name in p.recipes and p.work == "update"
        ]
        for provider, numel in product([*BACKENDS, *others], SIZES):
            plain = recipe.name == "fp32" or provider != "zerokern torch"
            if plain or numel <= SLOW:
                found.append((recipe.name, provider, numel))
    return found


def _update(recipe: str, provider: str, numel: int) -> Case:
    chosen = STORAGE[recipe]
    if provider in BACKENDS:
        run = Step.of(chosen, numel, DEVICE, BACKENDS[provider]).update
    else:
        run, _ = providers.build(TORCH[provider], chosen, numel, DEVICE)
    return Case("update", recipe, provider, numel, chosen.update_bytes, run)


def _pack(recipe: str, provider: str, numel: int) -> Case:
    source, destination = (DTYPES[name] for name in recipe.split(" to "))
    sizes = [numel // 32 - 64, 64] * 32  # 32 matrices, each with a small vector
    sources = [random(DEVICE, size, source) for size in sizes]
    destinations = list(
        torch.empty(numel, dtype=destination, device=DEVICE).split(sizes)
    )

    def run() -> None:
        if provider == "torch _foreach_copy_":
            torch._foreach_copy_(destinations, sources)
        else:
            ops.pack_(destinations, sources)

    return Case(
        "pack", recipe, provider, numel, source.itemsize + destination.itemsize, run
    )


def _reduce(recipe: str, provider: str, numel: int) -> Case:
    world, wire = int(recipe.split()[0]), DTYPES[recipe.split()[3]]
    out = DTYPES[recipe.split()[-1]] if " to " in recipe else torch.float32
    own, received = (
        random(DEVICE, numel, wire),
        random(DEVICE, (world - 1) * numel, wire).view(world - 1, numel),
    )
    shard = torch.empty(numel, dtype=out, device=DEVICE)
    total = shard if out == torch.float32 else torch.empty(numel, device=DEVICE)
    partials = torch.empty(
        ops.partials_numel(numel), dtype=torch.float64, device=DEVICE
    )
    norm = torch.empty((), device=DEVICE)

    def run_torch() -> None:
        total.copy_(own)
        for chunk in received:
            total.add_(chunk)
        total.mul_(1 / world)
        torch.linalg.vector_norm(total, out=norm)
        if total is not shard:
            shard.copy_(total)

    def run() -> None:
        ops.reduce_(
            shard,
            own,
            received,
            partials,
            rank=0,
            scale=1 / world,
            backend=BACKENDS[provider],
        )

    moved = world * wire.itemsize + out.itemsize
    return Case(
        "reduce",
        recipe,
        provider,
        numel,
        moved,
        run if provider in BACKENDS else run_torch,
    )


def _cast(recipe: str, provider: str, numel: int) -> Case:
    source, destination = (DTYPES[name] for name in recipe.split(" to "))
    given, out = (
        random(DEVICE, numel, source),
        torch.empty(numel, dtype=destination, device=DEVICE),
    )

    def run() -> None:
        if provider == "torch copy_":
            out.copy_(given)
        else:
            ops.cast_(out, given)

    return Case(
        "cast", recipe, provider, numel, source.itemsize + destination.itemsize, run
    )


MAKERS = {"update": _update, "pack": _pack, "reduce": _reduce, "cast": _cast}
RECIPES = {
    "pack": ["fp32 to fp32", "fp32 to bf16", "bf16 to bf16"],
    "reduce": [
        "2 chunks of fp32",
        "4 chunks of fp32",
        "2 chunks of bf16",
        "4 chunks of bf16",
        "4 chunks of bf16 to bf16",
    ],
    "cast": ["fp32 to bf16", "bf16 to fp32"],
}
PROVIDERS = {
    "pack": ["zerokern", "torch _foreach_copy_"],
    "reduce": [*BACKENDS, "torch add_ mul_ norm"],
    "cast": ["zerokern", "torch copy_"],
}
