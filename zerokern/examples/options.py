"""The options of the job, checked before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from zerokern import Precision
from zerokern.config import Master, Moments

from .gpt import Shape
from .text import Text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices. Each is a flag of the same name."""

    world: int | None = None
    """Ranks to start. None: one for each GPU, or two on the CPU. torchrun decides if it
    started the job."""
    stages: tuple[int, ...] = (1, 2, 3)
    """ZeRO stages to run after plain AdamW."""
    steps: int = 400
    """Optimizer steps of each run."""
    batch: int = 16
    """Sequences in the global batch. The ranks divide it."""
    lr: float = 2e-3
    """Peak learning rate, after a warm-up of a tenth of the steps and before a cosine
    decay to a tenth."""
    dtype: str = "fp32"
    """fp32, or bf16."""
    master: Master = "fp32"
    """How bf16 weights stay precise in the sharded runs: see zerokern.Precision."""
    moments: Moments = "fp32"
    """How the sharded runs store the moments: see zerokern.Precision."""
    device: str = "auto"
    """cpu (gloo), cuda (NCCL), or auto: cuda if there is a GPU."""
    seed: int = 0
    """Of the weights, the batches and the sample."""
    text: Path | None = None
    """A file to learn from. None: the Python language reference."""
    out: Path = Path("build/demo")
    """Folder of results.json, table.md and plot.png."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return DTYPES[self.dtype]

    @property
    def precision(self) -> Precision:
        """The formats of the sharded runs; plain AdamW keeps everything in fp32."""
        return Precision(master=self.master, moments=self.moments)

    @property
    def on_gpu(self) -> bool:
        """Whether the job runs on GPUs."""
        return self.device == "cuda" or (
            self.device == "auto" and torch.cuda.is_available()
        )

    @property
    def ranks(self) -> int:
        """How many ranks to start on this machine."""
        if self.world is not None:
            return self.world
        return max(1, torch.cuda.device_count()) if self.on_gpu else 2

    def check(self, world: int, local_ranks: int) -> None:
        """Refuse what cannot run with `world` ranks, `local_ranks` of them on this
        machine.

        Raises:
            ValueError: says the value, the rule and the remedy.
        """
        if self.steps < 1 or self.batch < 1 or world < 1:
            raise ValueError(
                f"--steps {self.steps}, --batch {self.batch} and --world {world} must"
                " all be at least 1"
            )
        if self.batch % world:
            raise ValueError(
                f"--batch {self.batch} cannot be divided over {world} ranks: give a"
                f" multiple of {world}"
            )
        if self.on_gpu and local_ranks > torch.cuda.device_count():
            raise ValueError(
                f"{local_ranks} ranks need as many GPUs and {torch.cuda.device_count()}"
                " are here: lower --world or use --device cpu"
            )
        self.read_text()

    def read_text(self) -> Text:
        """Return the text to learn from.

        Raises:
            ValueError: it cannot be read or is too short.
        """
        return Text.read(self.text, window=Shape().context + 1)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m zerokern.examples.train",
        description=(
            "Train a byte-level GPT with plain AdamW and with ZeRO-1, 2 and 3, and"
            " compare."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_training(parser.add_argument)
    _add_place(parser.add_argument)
    chosen = vars(parser.parse_args(arguments))
    return Options(**{**chosen, "stages": tuple(chosen["stages"])})


DEFAULT = Options()


def _add_training(add: Callable[..., Any]) -> None:
    add(
        "--stages",
        type=int,
        nargs="*",
        choices=(1, 2, 3),
        default=DEFAULT.stages,
        help="ZeRO stages to run",
    )
    add("--steps", type=int, default=DEFAULT.steps, help="optimizer steps of each run")
    add(
        "--batch", type=int, default=DEFAULT.batch, help="sequences in the global batch"
    )
    add("--lr", type=float, default=DEFAULT.lr, help="peak learning rate")
    add("--dtype", choices=tuple(DTYPES), default=DEFAULT.dtype, help="of the weights")
    add(
        "--master",
        choices=get_args(Master),
        default=DEFAULT.master,
        help="what keeps bf16 weights precise",
    )
    add(
        "--moments",
        choices=get_args(Moments),
        default=DEFAULT.moments,
        help="how the sharded runs store moments",
    )
    add("--seed", type=int, default=DEFAULT.seed, help="of weights, batches and sample")


def _add_place(add: Callable[..., Any]) -> None:
    add(
        "--world",
        type=int,
        help=(
            "ranks to start; default: one for each GPU, or 2 on the CPU; torchrun"
            " overrules it"
        ),
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=DEFAULT.device,
        help="cpu uses gloo, cuda NCCL",
    )
    add(
        "--text",
        type=Path,
        help="file to learn from; default: the Python language reference",
    )
    add(
        "--out",
        type=Path,
        default=DEFAULT.out,
        help="folder of results.json, table.md and plot.png",
    )
