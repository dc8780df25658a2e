"""Train a mixture of experts of transformers (Mixtral): which experts have gradients
differs by step and rank.

    torchrun --nproc-per-node 2 examples/moe.py --stage 3
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from zerokern import AdamW

VOCABULARY = 64


def sequences(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    """Rows that count upwards or downwards."""
    start = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    stride = 1 - 2 * torch.randint(2, (rows, 1), generator=generator)
    return (start + stride * torch.arange(length)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_local_experts=args.experts,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    model = MixtralForCausalLM(config).to(device)
    optimizer = AdamW(
        model.parameters(), lr=args.lr, stage=args.stage, model=model, max_grad_norm=1.0
    )

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        tokens = sequences(generator, args.batch, 24).to(device)
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            chosen = output.router_logits[-1].topk(2).indices.unique().numel()
            print(
                f"step {step:4d}  experts in use {chosen} of {args.experts}  loss"
                f" {output.loss.item():.4f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
