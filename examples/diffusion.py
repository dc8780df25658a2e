"""Train a small U-Net to remove noise from images: skip connections and no ModuleList.

torchrun --nproc-per-node 2 examples/diffusion.py --stage 3
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from zerokern import AdamW, Buckets


class Block(nn.Module):
    """Two convolutions; the time is added between them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.time = nn.Linear(1, outputs)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.conv1(x) + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm(x)))


class UNet(nn.Module):
    """Two levels down, two up; each way up sees the way down of its size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1 = Block(3, width)
        self.down2 = Block(width, 2 * width)
        self.middle = Block(2 * width, 2 * width)
        self.up2 = Block(4 * width, width)
        self.up1 = Block(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        a = self.down1(x, time)
        b = self.down2(F.avg_pool2d(a, 2), time)
        x = F.interpolate(self.middle(F.avg_pool2d(b, 2), time), scale_factor=2.0)
        x = F.interpolate(self.up2(torch.cat([x, b], 1), time), scale_factor=2.0)
        return self.out(self.up1(torch.cat([x, a], 1), time))


def images(generator: torch.Generator, rows: int) -> Tensor:
    """Waves of random phase."""
    phase = 6 * torch.rand(rows, 3, 1, 1, generator=generator)
    return torch.sin(torch.arange(16.0) + torch.arange(16.0)[:, None] / 2 + phase)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="images per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = UNet(16).to(device)
    buckets = Buckets(units=lambda module: isinstance(module, Block))
    sharding = {"stage": args.stage, "model": model, "buckets": buckets}
    optimizer = AdamW(model.parameters(), lr=args.lr, **sharding)

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        clean = images(generator, args.batch)
        time = torch.rand(args.batch, 1, generator=generator)
        noise = torch.randn(clean.shape, generator=generator)
        clean, time, noise = (x.to(device) for x in (clean, time, noise))
        velocity = noise - clean
        mixed = clean + velocity * time[:, :, None, None]
        loss = F.mse_loss(model(mixed, time), velocity)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
