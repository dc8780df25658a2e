"""Train a LoRA adapter of PEFT on a frozen GPT-2, and save it. In stage 3 the frozen
weights are sharded, too.

    torchrun --nproc-per-node 2 examples/lora.py --stage 3 --out adapter
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from zerokern import AdamW

VOCABULARY = 64


def sequences(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    """Rows in which few tokens are frequent."""
    return (VOCABULARY * torch.rand(rows, length, generator=generator) ** 8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank")
    parser.add_argument("--rank", type=int, default=4, help="of the adapter's matrices")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", default="adapter", help="folder of the adapter")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    adapter = LoraConfig(
        r=args.rank,
        lora_alpha=4 * args.rank,
        target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=True,
    )
    # Really: from_pretrained(...).
    model = get_peft_model(GPT2LMHeadModel(config), adapter).to(device)
    optimizer = AdamW(
        model.parameters(), lr=args.lr, weight_decay=0.0, stage=args.stage, model=model
    )
    if rank == 0:
        model.print_trainable_parameters()

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        tokens = sequences(generator, args.batch, 24).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}")

    with optimizer.full_params():  # all ranks enter, one writes
        if rank == 0:
            model.save_pretrained(args.out)
            print("wrote", args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
