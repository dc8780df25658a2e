"""Train a causal language model of transformers (Llama) on counting sequences, its
parameters sharded.

    torchrun --nproc-per-node 2 examples/causal_lm.py --stage 3 --checkpoint
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from zerokern import AdamW

VOCABULARY = 64


def sequences(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    """Rows that count upwards, each by a step of its own."""
    start = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    return (start + stride * torch.arange(length)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--checkpoint", action="store_true", help="recompute layers in backward"
    )
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_attention_heads=4,
        num_hidden_layers=args.layers,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(device)
    if args.checkpoint:
        model.gradient_checkpointing_enable()
    optimizer = AdamW(
        model.parameters(), lr=args.lr, stage=args.stage, model=model, max_grad_norm=1.0
    )

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        tokens = sequences(generator, args.batch, 32).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(
                f"step {step:4d}  norm {optimizer.metrics()['grad_norm']:.3f}  loss"
                f" {loss.item():.4f}"
            )

    # Ranks take part in generation until the last one has finished.
    model.eval()
    prompt = sequences(torch.Generator().manual_seed(100 + rank), 1, 8).to(device)
    tokens = model.generate(
        prompt, max_new_tokens=8 + 4 * rank, do_sample=False, synced_gpus=True
    )
    if rank == 0:
        print("generated", tokens[0].tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
