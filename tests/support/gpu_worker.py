"""One rank of `test_gpu.py`: trains on gradients of small integers and writes what
became of the weights.

    torchrun --nproc-per-node 2 tests/support/gpu_worker.py --device cuda --out FOLDER

Integer gradients are exact on every device and in every order of addition, so all
devices must give the same bits.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import models
import torch
import torch.distributed as dist
from torch import Tensor

import zerokern

WAYS = {
    "by hand": None,
    "overlap": zerokern.Buckets(bytes=4096),
    "in backward": zerokern.Buckets(bytes=4096, update_in_backward=True),
    "in forward": zerokern.Buckets(bytes=4096, gather_in_forward=True),
}
"""By hand: gradients are assigned. Else backward forms them, bucket by bucket, while
others travel."""
CASES = [
    (dtype, stage, way)
    for dtype in ("float32", "bfloat16", "float16")
    for stage in (1, 2, 3)
    for way in WAYS
]
STEPS = 3
SHAPES = [(37, 17), (1000,), (33, 17), (), (5, 5, 5), (64,)]


def main() -> None:
    """Run every case and save a dict of weights by case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device(
            "cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        )
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    torch.save(
        {case: train(*case, device) for case in CASES},
        options.out / f"rank{dist.get_rank()}.pt",
    )
    dist.destroy_process_group()


def train(dtype: str, stage: int, way: str, device: torch.device) -> list[Tensor]:
    """Return the weights after some steps, during which a host synchronisation is an
    error on a GPU."""
    torch.manual_seed(0)
    model = models.Weighted(SHAPES, getattr(torch, dtype)).to(device)
    optimizer = zerokern.AdamW(
        model.parameters(), lr=1e-2, stage=stage, model=model, buckets=WAYS[way]
    )
    for step in range(STEPS):
        gradients = [
            integers(shape, 7 * step + 3 * dist.get_rank()).to(device)
            for shape in SHAPES
        ]
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        if way == "by hand":
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param.grad = gradient.to(param.dtype)
        else:
            model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    with optimizer.full_params():
        return [p.detach().cpu().clone() for p in model.parameters()]


def integers(shape: tuple[int, ...], start: int) -> Tensor:
    """Return a gradient of small integers."""
    return (
        (torch.arange(math.prod(shape), dtype=torch.float32) + start)
        .remainder(5)
        .sub(2)
        .view(shape)
    )


if __name__ == "__main__":
    main()
