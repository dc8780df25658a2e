"""Train an image classifier of transformers, a ViT or a ResNet, to tell the direction
of stripes.

    torchrun --nproc-per-node 2 examples/image.py --stage 3 --model resnet
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer

from zerokern import AdamW, Buckets

CLASSES, SIZE = 4, 32


def stripes(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Images of noisy stripes in one of four directions, and which."""
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    angle = (labels * math.pi / CLASSES)[:, None, None]
    phase = 6 * torch.rand(rows, 1, 1, generator=generator)
    x, y = torch.arange(float(SIZE)), torch.arange(float(SIZE))[:, None]
    wave = torch.sin(x * angle.cos() + y * angle.sin() + phase)
    noise = 0.3 * torch.randn(rows, 3, SIZE, SIZE, generator=generator)
    return wave[:, None] + noise, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="images per rank")
    parser.add_argument("--model", default="vit", choices=("vit", "resnet"))
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    units = None  # the children of ModuleLists, which are the ViT's layers
    if args.model == "vit":
        config = ViTConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=SIZE,
            patch_size=8,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = ViTForImageClassification(config).to(device)
    else:  # statistics of BatchNorm stay each rank's own
        config = ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32, 64],
            depths=[2, 2, 2],
            layer_type="basic",
            num_labels=CLASSES,
        )
        model = ResNetForImageClassification(config).to(device)
        units = lambda module: isinstance(module, ResNetBasicLayer)  # noqa: E731
    buckets = Buckets(units=units)
    optimizer = AdamW(
        model.parameters(), lr=args.lr, stage=args.stage, model=model, buckets=buckets
    )

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        pixels, labels = (x.to(device) for x in stripes(generator, args.batch))
        loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
