"""The command line of `zerokern plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config import Buckets, Precision
from . import quantities

T = TypeVar("T")

RECIPES = {
    "fp32": Precision(),
    "split32": Precision(master="split32", moments="bf16", gradients=torch.bfloat16),
    "8bit": Precision(master="split32", moments="8bit", gradients=torch.bfloat16),
}
"""Formats of optimizer state by the name that the command line has for them;
docs/design.md lists all."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def _quantity(parse: Callable[[str], T]) -> Callable[[str], T]:
    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


COUNT = _quantity(quantities.count)
SIZE = _quantity(quantities.size)
BANDWIDTH = _quantity(quantities.bandwidth)
RATE = _quantity(quantities.rate)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add every argument of `plan` to its parser, in groups."""
    _add_model(parser.add_argument_group("the model").add_argument)
    _add_machine(parser.add_argument_group("the machine").add_argument)
    _add_run(parser.add_argument_group("the run").add_argument)
    _add_answer(parser.add_argument_group("the answer").add_argument)


def _add_model(add: Callable[..., Any]) -> None:
    add(
        "model", nargs="?", help="package.module:factory, or a Hugging Face config.json"
    )
    add(
        "--params",
        type=COUNT,
        help="instead of a model: a decoder of so many parameters, such as 7e9",
    )
    add("--layers", type=COUNT, default=32, help="of that decoder (default 32)")
    add(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of the parameters (default bf16)",
    )


def _add_machine(add: Callable[..., Any]) -> None:
    add("--gpus", type=COUNT, default=8, metavar="N", help="ranks (default 8)")
    add(
        "--gpu-memory",
        type=SIZE,
        default=80 * 2**30,
        metavar="80GiB",
        help="of one GPU",
    )
    add(
        "--reserve",
        type=SIZE,
        default=2 * 2**30,
        metavar="2GiB",
        help="of it, for driver, allocator and NCCL",
    )
    add("--per-node", type=COUNT, metavar="N", help="GPUs of a node (default 8)")
    add(
        "--intra",
        type=BANDWIDTH,
        metavar="450GB/s",
        help="within a node, per GPU, one direction",
    )
    add(
        "--inter",
        type=BANDWIDTH,
        metavar="400Gb/s",
        help="between nodes, per GPU, one direction",
    )
    add(
        "--compute",
        type=RATE,
        metavar="400e12",
        help="FLOP/s that matrix products reach",
    )
    add(
        "--peak",
        type=RATE,
        metavar="989e12",
        help="FLOP/s that the maker promises, for utilisation",
    )
    add(
        "--calibrate",
        action="store_true",
        help=(
            "measure the rates of this machine, or under torchrun of all, into"
            " --machine"
        ),
    )
    add(
        "--machine",
        type=Path,
        metavar="FILE",
        help="rates that --calibrate has written",
    )


def _add_run(add: Callable[..., Any]) -> None:
    add(
        "--batch",
        type=COUNT,
        default=1,
        help="samples of a rank's micro-batch (default 1)",
    )
    add(
        "--sequence", type=COUNT, default=2048, help="tokens of a sample (default 2048)"
    )
    add(
        "--accumulate",
        type=COUNT,
        default=1,
        help="micro-batches of a step (default 1)",
    )
    add("--stage", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    add(
        "--recipe",
        nargs="+",
        choices=RECIPES,
        default=["fp32", "8bit"],
        help="formats of the optimizer state",
    )
    add(
        "--checkpointing",
        action="store_true",
        help="recompute activations; else only tried if nothing fits",
    )
    add(
        "--bucket",
        type=SIZE,
        default=Buckets().bytes,
        metavar="25MiB",
        help="stages 1 and 2",
    )


def _add_answer(add: Callable[..., Any]) -> None:
    add(
        "--json",
        action="store_true",
        help="everything, the log of collectives included, as JSON",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw throughput against GPUs, and memory",
    )
