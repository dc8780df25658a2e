"""A user's training script, run as one rank of a world that is not there."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from ..comm_log import Call
from ..memory import Memory
from ..sharded_optimizer import ShardedOptimizer
from .ledger import Peak
from .rehearsal import Rehearsal, Trace


@dataclass(frozen=True)
class Outcome:
    """The work of a script, until it ended or had made its steps."""

    rank: int
    world: int
    steps: int
    params: int
    """That the optimizers train."""
    memory: Sequence[Memory]
    """Of each optimizer of zerokern, between steps."""
    calls: Sequence[Sequence[Call]]
    """Of each such optimizer."""
    peak: Peak
    live: int
    """Bytes at the end."""
    timeline: Sequence[tuple[str, int]]
    """(phase, live bytes), in order."""
    trace: Trace
    """Of the last step."""


class _Enough(BaseException):
    """Ends the script. Not an Exception, which the script might catch."""


def dryrun(
    script: Path,
    arguments: Sequence[str],
    *,
    world: int,
    rank: int = 0,
    per_node: int = 8,
    steps: int = 2,
) -> Outcome:
    """Run a script until it has made some optimizer steps.

    It finds the environment that torchrun would give it, and `init_process_group` gives
    it a fake group. A device "cuda" is fake, too. Values that it reads are made up:
    numbers are 1, conditions hold, lists are of zeros.

    Args:
        script: its file.
        arguments: its command line.
        world: ranks.
        rank: which one.
        per_node: ranks of a node, for LOCAL_RANK.
        steps: optimizer steps after which it is stopped.

    Raises:
        ValueError: there is no such file, or the script trains nothing.
    """
    if not script.is_file():
        raise ValueError(
            f"{script} is not a file; give the training script, and its arguments"
            " after it"
        )
    with Rehearsal(world, rank) as rehearsal:
        steps_of = _Steps(rehearsal, steps)
        hook = register_optimizer_step_post_hook(steps_of)
        try:
            with _as_rank(script, arguments, world, rank, per_node):
                runpy.run_path(str(script), run_name="__main__")
        except _Enough:
            pass
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise ValueError(
                    f"{script} ended with exit status {exit_.code}; see what it has"
                    " printed"
                ) from exit_
        finally:
            hook.remove()
        if not steps_of.optimizers:
            raise ValueError(
                f"{script} ended without an optimizer step; give the arguments with"
                " which it trains"
            )
        return _outcome(rehearsal, steps_of)


class _Steps:
    """Counts the optimizers' steps, and ends the script when there were enough."""

    def __init__(self, rehearsal: Rehearsal, wanted: int) -> None:
        self.optimizers: list[Optimizer] = []
        self.done = 0
        """Steps of the first optimizer."""
        self._rehearsal = rehearsal
        self._wanted = wanted

    def __call__(
        self,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ) -> None:
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self.done += optimizer is self.optimizers[0]
        if self.done == self._wanted and optimizer is self.optimizers[-1]:
            raise _Enough
        self._rehearsal.record()


def _outcome(rehearsal: Rehearsal, steps: _Steps) -> Outcome:
    groups = [group for o in steps.optimizers for group in o.param_groups]
    ours = [o for o in steps.optimizers if isinstance(o, ShardedOptimizer)]
    ledger = rehearsal.ledger
    return Outcome(
        rank=rehearsal.rank,
        world=rehearsal.world,
        steps=steps.done,
        params=sum(param.numel() for group in groups for param in group["params"]),
        memory=[optimizer.memory() for optimizer in ours],
        calls=[optimizer.comm_log() for optimizer in ours],
        peak=ledger.peak,
        live=ledger.live,
        timeline=ledger.timeline,
        trace=rehearsal.record(),
    )


@contextmanager
def _as_rank(
    script: Path, arguments: Sequence[str], world: int, rank: int, per_node: int
) -> Iterator[None]:
    local = min(per_node, world)
    environment = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    patch = mock.patch.object
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.dict(os.environ, {k: str(v) for k, v in environment.items()}))
        enter(patch(sys, "argv", [str(script), *arguments]))
        enter(patch(sys, "path", [str(script.parent), *sys.path]))
        for name in ("init_process_group", "destroy_process_group"):
            enter(patch(dist, name, _constant(None)))
        for name, stand_in in _CUDA.items():
            enter(patch(torch.cuda, name, stand_in))
        for name, method in _METHODS.items():
            enter(patch(Tensor, name, method))
        enter(patch(torch, "autocast", _autocast(torch.autocast)))
        enter(_OnCpu())
        yield


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_CUDA: Mapping[str, Callable[..., Any]] = {
    "set_device": _constant(None),
    "synchronize": _constant(None),
    "empty_cache": _constant(None),
    "current_device": _constant(0),
    "memory_allocated": _constant(0),
    "max_memory_allocated": _constant(0),
    "reset_peak_memory_stats": _constant(None),
    "manual_seed": _constant(None),
    "manual_seed_all": _constant(None),
}
"""Functions of torch.cuda that a training script calls."""


def _tolist(tensor: Tensor) -> Any:
    zero = 0.0 if tensor.is_floating_point() else 0

    def nested(shape: Sequence[int]) -> Any:
        if not shape:
            return zero
        return [nested(shape[1:]) for _ in range(shape[0])]

    return nested(tensor.shape)


def _numpy(tensor: Tensor, **kwargs: Any) -> Any:
    import numpy

    return numpy.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


_METHODS = {
    "tolist": _tolist,
    "numpy": _numpy,
    "cuda": lambda tensor, *args, **kwargs: tensor,
}


def _autocast(original: Any) -> Any:
    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu", *args, **kwargs)

    return autocast


class _OnCpu(TorchFunctionMode):
    """Takes every device for the CPU: the tensors are fake, and whoever rehearses may
    have no GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*(_on_cpu(value) for value in args), **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value
