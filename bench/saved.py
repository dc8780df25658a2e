"""What it costs that stage 3 looks at every tensor which autograd saves for backward.

    python -m bench.saved

A unit's forward and backward run with our hooks on saved tensors and without them, in
turns: on a fake process group, with tensors of 64 elements, so that the host's work is
all there is. The difference of the medians, over the number of saved tensors, is what
one costs from forward to backward.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerokern

LENGTH = 400
"""Tensors that a forward saves."""
WARMUP = 20
ROUNDS = 400


class Activations(nn.Module):
    """A chain of sines: each saves its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        x = x + self.weight
        for _ in range(LENGTH):
            x = x.sin()
        return x


class Parameters(nn.Module):
    """A chain of products with frozen parameters: each saves its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.ones(64), requires_grad=False) for _ in range(LENGTH)
        )
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        x = x + self.weight
        for weight in self.frozen:
            x = x * weight
        return x


def seconds(run: Callable[[], None]) -> float:
    """Return the CPU time that a call takes."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(kind: type[nn.Module]) -> tuple[float, float]:
    """Return microseconds of a forward and backward with hooks and without."""
    model = nn.Module()
    model.units = nn.ModuleList([kind()])
    (unit,) = model.units
    optimizer = zerokern.SGD(model.parameters(), lr=0.0, stage=3, model=model)
    x = torch.ones(64)

    def step(*, hooks: bool) -> float:
        off = nullcontext() if hooks else disable_saved_tensors_hooks("measured")

        def run() -> None:
            with off:
                output = unit(x)
            output.sum().backward()

        took = seconds(run)
        optimizer.step()
        optimizer.zero_grad()
        return took

    times: dict[bool, list[float]] = {True: [], False: []}
    for index in range(WARMUP + ROUNDS):
        for hooks in (True, False):
            took = step(hooks=hooks)
            if index >= WARMUP:
                times[hooks].append(1e6 * took)
    return statistics.median(times[True]), statistics.median(times[False])


def main() -> None:
    """Measure both kinds of saved tensors."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for kind in (Activations, Parameters):
        with_hooks, without = measure(kind)
        cost = (with_hooks - without) / LENGTH
        print(
            f"{kind.__name__.lower()}: {LENGTH} saved tensors, {with_hooks:.0f} us with"
            f" hooks, {without:.0f} us without: {cost:.2f} us each"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
