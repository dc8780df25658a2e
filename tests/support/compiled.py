"""Training with torch.compile, and what dynamo made of it: graphs, breaks, and no
compilation after the warm-up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import models
import pytest
import torch
import torch._dynamo
from oracle import Run, differing, world
from torch import nn
from torch._dynamo.utils import counters

import zerokern

quiet = pytest.mark.filterwarnings(
    # dynamo looks at .grad of whatever it traces
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    # a reentrant checkpoint says so of an evaluation
    "ignore:None of the inputs have requires_grad",
)
"""What a module of tests marks itself with."""

WORLD = 2
WARM_UP, STEPS = 2, 7

Compile = Callable[[nn.Module], nn.Module]
Result = dict[str, Any]


def replaced(module: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(module, **options)  # type: ignore[return-value]


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(**options)
    return module


HOW: dict[str, Callable[..., nn.Module]] = {
    "replaced": replaced,
    "in place": in_place,
}
WHEN = ("before", "after")


@functools.cache
def import_compilers() -> None:
    """Import here what ranks would import each for itself: they are forked from this
    process."""
    compiled = torch.compile(torch.sin, backend="aot_eager")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()


def two_blocks() -> nn.Module:
    return models.toy(blocks=2)


class OwnModules(nn.Module):
    """Units whose forward is torch's own, which dynamo enters in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(17, 17), nn.GELU(), nn.LayerNorm(17))
            for _ in range(2)
        )
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---------------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and what of it is compiled."""

    build: Callable[[], nn.Module] = two_blocks
    compiled: Compile | None = None
    """Compiles a module; None: nothing is compiled."""
    when: str = "before"
    """Whether modules are compiled before or after the optimizer is built."""
    root: bool = False
    """Compile the model and not its blocks."""
    compiled_step: bool = False
    """Compile `optimizer.step` too."""
    tensor_lr: bool = False
    """The learning rate is a tensor, written in place."""
    schedule: bool = True
    """False: the learning rate stays."""
    checkpoint: bool | None = None
    """Recompute blocks in backward, as of `models.Forked`."""
    late: bool = False
    """Parameters are gathered while the next forward runs."""
    steps: int = STEPS

    def compile(self, model: nn.Module) -> nn.Module:
        """Return the model, with what is to be compiled compiled."""
        if self.compiled is None:
            return model
        if self.root:
            return self.compiled(model)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = self.compiled(block)
        return model

    def run(self, stage: int) -> Run:
        """Return the model and its optimizer, ready to train."""
        torch.manual_seed(0)
        model = self.build()
        if self.when == "before":
            model = self.compile(model)
        options: dict[str, Any] = {}
        if self.late:
            options["adam"] = functools.partial(zerokern.AdamW, model=model)
            options["buckets"] = zerokern.Buckets(gather_in_forward=True)
        lr = torch.tensor(1e-2) if self.tensor_lr else 1e-2
        run = Run(stage, world(), build=lambda: model, lr=lr, **options)
        run.model.checkpoint = self.checkpoint
        if self.when == "after":
            run.model = self.compile(run.model)
        if self.compiled_step:
            run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")
        return run


def train(stage: int, recipe: Recipe) -> Result:
    """Train with accumulation, evaluation between steps and a learning rate that
    changes."""
    forget()
    run = recipe.run(stage)
    graphs = []
    for step in range(recipe.steps):
        lr = 1e-2 / (1 + step) if recipe.schedule else 1e-2
        with compiling_until_warm(step):
            train_step(run, step, lr)
        graphs.append(graphs_so_far())
    result = run.result()
    return {
        "values": {
            without_wrapper(name): value
            for name, value in {**result["params"], **result["state"]}.items()
        },
        "seen": result["seen"],
        "buffers": result["buffers"],
        "graphs": graphs,
        "breaks": sum(counters["graph_break"].values()),
        "log": [call[:6] for call in result["log"]],
    }


def train_step(run: Run, step: int, lr: float) -> None:
    """Accumulate two backwards, evaluate, update."""
    for group in run.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    run.optimizer.zero_grad()
    with run.no_sync():
        run.backward(10 * step)
    run.backward(10 * step + 1)
    run.evaluate(10 * step + 2)
    run.step()


def without_wrapper(name: str) -> str:
    """Return a parameter's name in the model that was not compiled."""
    return name.replace("_orig_mod.", "")


# ---------------------------------------------------------------------- what dynamo did


def forget() -> None:
    """Drop what was compiled and counted."""
    torch._dynamo.reset()
    counters.clear()


def compiling_until_warm(step: int) -> Any:
    """Return a context in which it is an error to compile again after the warm-up."""
    return torch._dynamo.config.patch(error_on_recompile=step >= WARM_UP)


def graphs_so_far() -> int:
    """Return how many graphs were compiled."""
    return counters["stats"]["unique_graphs"]


def stays_warm(graphs: Sequence[int]) -> bool:
    """Return whether nothing was compiled after the warm-up."""
    return len(set(graphs[WARM_UP - 1 :])) == 1


def differing_values(ours: Result, plain: Result) -> list[str]:
    """Return which parameters, states and losses differ."""
    return differing(
        {**ours["values"], **ours["seen"]}, {**plain["values"], **plain["seen"]}
    )
