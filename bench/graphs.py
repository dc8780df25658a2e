"""CUDA graphs: a captured step, and whether its replays do what eager steps do when the
numbers behind them change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerokern import config

from .checks import bits
from .recipes import Recipe
from .shards import Step

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""From a function that only enqueues work to one that enqueues it again."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 1e-3, "weight_decay": 0.1, "loss_scale": 1.0},
    {"lr": 3e-3, "weight_decay": 0.0, "loss_scale": 1024.0},
    {"lr": 5e-4, "weight_decay": 0.3, "loss_scale": 0.5, "max_norm": 1e-3},
)
"""Of consecutive steps: all that a schedule, a scaler or a user may change between
replays."""


def cuda_graph(run: Callable[[], None]) -> Callable[[], None]:
    """Capture a function in a CUDA graph and return its replay. The function itself
    runs once, to be compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def replay_is_eager(
    recipe: Recipe,
    numel: int,
    device: str,
    capture: Capture = cuda_graph,
    backend: config.Backend = "triton",
) -> bool:
    """Replay a captured `scalars_` + `update_` under changing numbers; say and return
    if all bits are the eager ones.

    The last step is skipped, for a gradient norm that is not finite.
    """
    replayed = Step.of(recipe, numel, device, backend)
    replay = capture(replayed.step)
    eager = replayed.copy()  # after the capture, which has run the step once

    def both() -> bool:
        eager.step()
        replay()
        return all(
            torch.equal(bits(a), bits(b))
            for a, b in zip(replayed.tensors(), eager.tensors(), strict=True)
        )

    equal, before = True, eager.shard.param.clone()
    for setting in SETTINGS:
        for step in (replayed, eager):
            step.set(**setting)
        equal = both() and equal
    equal = equal and not torch.equal(before, eager.shard.param)
    for step in (replayed, eager):
        _norm(step.gathered).fill_(math.inf)
    skipped = [t.clone() for t in eager.shard.tensors()]
    equal = both() and equal
    equal = equal and all(
        torch.equal(bits(a), bits(b))
        for a, b in zip(skipped, eager.shard.tensors(), strict=True)
    )
    print(
        f"{'same bits' if equal else 'DIFFERS  '}  graph replay and eager,"
        f" {recipe.name} {numel}",
        flush=True,
    )
    return equal


def _norm(gathered: Tensor) -> Tensor:
    return gathered[0, :1].view(torch.float64)
