"""Does it train as well? The demo's GPT under every recipe of AdamW, on several seeds,
in one process.

    python -m bench.quality [--seeds 3] [--steps 250] [--recipes fp32,split24+8bit]
        [--out bench/results/quality.jsonl]

Weights of 16-bit recipes are bf16 and so are their gradients; activations are fp32, ten
times as fast on a CPU, and the optimizer is the only difference. Rows hold the
validation loss; the table says how far each recipe's mean is from fp32's, beside the
spread over seeds. Exits 1 if a recipe is worse than fp32 by more than twice its
standard error (of the paired differences), and by more than a hundredth of a nat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import zerokern
from zerokern.examples.gpt import GPT, Shape
from zerokern.examples.options import Options
from zerokern.examples.trainer import MAX_NORM, VALIDATION_WINDOWS, schedule

from . import machine
from .recipes import Recipe, select

TOLERANCE = 0.01
"""Nats. Two seeds of one recipe differ by more."""
ADAMW = "fp32,master32,split32,split32+bf16,split32+8bit,split24+8bit,bf16+8bit"


def train(recipe: Recipe, seed: int, steps: int) -> dict[str, Any]:
    """Return the row of one run."""
    torch.set_num_threads(1)
    options = Options(steps=steps, seed=seed)
    text = options.read_text()
    torch.manual_seed(seed)
    model = GPT(Shape()).to(recipe.param)
    numel = sum(p.numel() for p in model.parameters())
    precision = zerokern.Precision(
        master=recipe.master or "none",
        moments=recipe.moments,
        gradients=recipe.grad,
        seed=seed,
    )
    optimizer = zerokern.AdamW(
        model.parameters(),
        lr=options.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        max_grad_norm=MAX_NORM,
        precision=precision,
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule(step, steps)
        loss = loss_in_fp32(model, text.batch(step, size=options.batch, seed=seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        validation = loss_in_fp32(
            model, text.validation_windows(VALIDATION_WINDOWS)
        ).item()
    memory = optimizer.memory()
    return {
        **machine.describe(),
        "recipe": recipe.name,
        "seed": seed,
        "steps": steps,
        "validation_loss": validation,
        "state_bytes_per_parameter": (
            (memory.parameters + memory.master + memory.moments) / numel
        ),
        "update_bytes_per_parameter": recipe.update_bytes,
    }


class Loss(torch.nn.Module):
    """The model's loss as a forward, so that it can be called with other weights."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return self.model.loss(batch)


def loss_in_fp32(model: GPT, batch: Tensor) -> Tensor:
    """Return the loss with weights widened to fp32; gradients arrive in the weights'
    dtype."""
    wide = {f"model.{name}": p.float() for name, p in model.named_parameters()}
    return functional_call(Loss(model), wide, (batch,))


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the lines of a table, and the recipes that train worse than fp32."""
    losses = {
        name: [r["validation_loss"] for r in rows if r["recipe"] == name]
        for name in {r["recipe"] for r in rows}
    }
    lines = [
        "| recipe | bytes held | bytes moved per update | validation loss, mean"
        " (spread) | minus fp32's |"
    ]
    lines += ["| --- " * 5 + "|"]
    worse = []
    for name in dict.fromkeys(row["recipe"] for row in rows):
        row = next(r for r in rows if r["recipe"] == name)
        apart = [
            loss - base for loss, base in zip(losses[name], losses["fp32"], strict=True)
        ]
        mean, spread = statistics.mean(losses[name]), statistics.pstdev(losses[name])
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        if statistics.mean(apart) > max(TOLERANCE, 2 * error):
            worse.append(name)
        lines.append(
            f"| {name} | {row['state_bytes_per_parameter']:.2f} |"
            f" {row['update_bytes_per_parameter']:.2f} | {mean:.4f} ({spread:.4f}) |"
            f" {statistics.mean(apart):+.4f} +- {error:.4f} |"
        )
    return lines, worse


def main() -> int:
    """Run as asked on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument(
        "--recipes", default=ADAMW, help="comma-separated; fp32 is always among them"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--out", type=Path, default=machine.ROOT / "bench" / "results" / "quality.jsonl"
    )
    options = parser.parse_args()
    recipes = select(",".join(dict.fromkeys(["fp32", *options.recipes.split(",")])))
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(train, recipe, seed, options.steps)
            for recipe in recipes
            for seed in range(options.seeds)
        ]
        rows = []
        for run in runs:
            rows.append(run.result())
            print(
                f"{rows[-1]['recipe']}, seed {rows[-1]['seed']}:"
                f" {rows[-1]['validation_loss']:.4f}",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines, worse = table(rows)
    print("\n".join(lines))
    if worse:
        print(
            f"worse than fp32 by more than noise: {', '.join(worse)}", file=sys.stderr
        )
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
