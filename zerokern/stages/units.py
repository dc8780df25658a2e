"""Stage 3: which modules form a unit, and a unit's parameters, whole or sharded."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..buffers import ParameterBucket, Scratch
from ..comm import Comm, Work
from .gradients import GradientBucket

ROOT = ""


def unit_modules(model: nn.Module, is_unit: Callable[[nn.Module], bool] | None) -> dict[str, nn.Module]:
    """Return the modules that are gathered as one, by name; the root unit, "", is the model itself and comes first.

    Args:
        model: the module.
        is_unit: the user's choice; None: the children of every ModuleList. A module inside of a unit is no unit.
    """
    chosen: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            is_one = isinstance(module, nn.ModuleList) if is_unit is None else is_unit(child)
            if is_one and not isinstance(child, nn.ModuleList):
                chosen[path] = child
            else:
                visit(child, path)

    visit(model, ROOT)
    return {ROOT: model, **chosen}


def unit_of_params(model: nn.Module, is_unit: Callable[[nn.Module], bool] | None) -> dict[int, str]:
    """Return the unit of each parameter, by id. One that several use, such as a tied weight, is the root's."""
    owners: dict[int, set[str]] = {}
    for name, module in unit_modules(model, is_unit).items():
        if name != ROOT:
            for param in module.parameters():
                owners.setdefault(id(param), set()).add(name)
    inside = {key: names.pop() for key, names in owners.items() if len(names) == 1}
    units = {id(module) for name, module in unit_modules(model, is_unit).items() if name != ROOT}
    for param in _outside(model, units):
        inside.pop(id(param), None)
    return inside


def _outside(module: nn.Module, units: set[int]) -> list[nn.Parameter]:
    if id(module) in units:
        return []
    params = list(module.parameters(recurse=False))
    for child in module.children():
        params += _outside(child, units)
    return params


class State(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    WHOLE = enum.auto()


class Unit:
    """The parameters of one unit. While they are sharded, they keep their shapes, hold no memory and read as NaN."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[ParameterBucket],
        gradients: Sequence[GradientBucket],
        comm: Comm,
        scratch: Scratch,
    ) -> None:
        """Shard the unit.

        Args:
            name: path of its module; "" for the root.
            parameters: its buckets, trainable and frozen ones, whole.
            gradients: of the trainable ones.
            comm: the group.
            scratch: the ledger of gathered memory.
        """
        self.name, self.parameters, self.gradients = name, list(parameters), list(gradients)
        self.comm, self.scratch = comm, scratch
        self.state = State.SHARDED
        self.inputs_pending = 0
        """Inputs of the module whose gradients backward has still to form."""
        self.calls_pending = 0
        """Calls of the module that backward has still to come to."""
        self.left_behind = False
        """Backward has come to all of its calls, and then to another unit: no more gradients will come."""
        self._works: list[Work] = []
        self._absent = [[_absent(p) for p in bucket.params] for bucket in self.parameters]
        for bucket in self.parameters:
            bucket.full.untyped_storage().resize_(0)
        self._point(self._absent)

    def start(self) -> None:
        """Start to gather, if that is not done."""
        if self.state is State.SHARDED:
            self.state = State.GATHERING
            for bucket in self.parameters:
                self.scratch.allocate_storage(bucket.full)
                bucket.full[bucket.bucket.shard(bucket.rank)].copy_(bucket.own)
                self._works.append(self.comm.all_gather(bucket.full, self.name or "root"))

    def gather(self) -> None:
        """Have the parameters whole when the current stream gets here."""
        self.start()
        if self.state is State.GATHERING:
            for work in self._works:
                work.wait()
            self._works.clear()
            self._point([bucket.views for bucket in self.parameters])
            self.state = State.WHOLE

    def release(self) -> None:
        """Give the gathered memory back. Autograd's saved views stay valid: backward fills the same storage again."""
        if self.state is not State.SHARDED:
            self.gather()
            self._point(self._absent)
            for bucket in self.parameters:
                self.scratch.free_storage(bucket.full)
            self.state = State.SHARDED

    def keep_edits(self) -> None:
        """WHOLE: copy this rank's part back to its shard."""
        for bucket in self.parameters:
            bucket.own.copy_(bucket.full[bucket.bucket.shard(bucket.rank)])
            if bucket.bucket.trainable:
                bucket.refresh_master()

    def end_backward(self) -> None:
        """Forget the pass."""
        self.inputs_pending = self.calls_pending = 0
        self.left_behind = False

    def backward_done(self) -> bool:
        """Return whether no node of the unit's graph is left: all its parameters and inputs have their gradients."""
        return self.inputs_pending <= 0 and all(bucket.complete() for bucket in self.gradients)

    def _point(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        for bucket, chosen in zip(self.parameters, tensors, strict=True):
            for param, tensor in zip(bucket.params, chosen, strict=True):
                param.data = tensor


def _absent(param: nn.Parameter) -> torch.Tensor:
    value = math.nan if param.is_floating_point() else 0
    return torch.full((), value, dtype=param.dtype, device=param.device).expand(param.shape)
