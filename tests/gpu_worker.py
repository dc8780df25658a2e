"""One rank of `test_gpu.py`: trains on gradients of small integers and writes what became of the weights.

    torchrun --nproc-per-node 2 tests/gpu_worker.py --device cuda --out FOLDER

Integer gradients are exact on every device and in every order of addition, so all devices must give the same bits.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import models
import torch
import torch.distributed as dist
from torch import Tensor

import zerokern

CASES = [(dtype, stage) for dtype in ("float32", "bfloat16", "float16") for stage in (1, 2, 3)]
STEPS = 3


def main() -> None:
    """Run every case and save a dict of weights by case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    torch.save({case: train(*case, device) for case in CASES}, options.out / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


def train(dtype: str, stage: int, device: torch.device) -> list[Tensor]:
    """Return the weights after some clipped steps, during which a host synchronisation is an error on a GPU."""
    model = models.toy().to(device, getattr(torch, dtype))
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-2, stage=stage, model=model, max_grad_norm=100.0)
    weights = [torch.ones_like(p) for p in model.parameters()]
    for step in range(STEPS):
        for param, weight in zip(model.parameters(), weights, strict=True):
            values = torch.arange(param.numel(), dtype=torch.float32) + 7 * step + 3 * dist.get_rank()
            param.grad = (values.remainder(5) - 2).view(param.shape).to(weight)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    with optimizer.full_params():
        return [p.detach().cpu().clone() for p in model.parameters()]


if __name__ == "__main__":
    main()
