"""Stage 3: which modules form a unit, and a unit's parameters, whole or sharded."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..buffers import ParameterBucket, Scratch, storages_of
from ..comm import Comm, Work
from .absent import Absence
from .gradients import GradientBucket

ROOT = ""


def unit_modules(
    model: nn.Module, is_unit: Callable[[nn.Module], bool] | None
) -> dict[str, nn.Module]:
    """Return the modules that are gathered as one, by name; the root unit, "", is the
    model itself and comes first.

    Args:
        model: the module.
        is_unit: the user's choice; None: the children of every ModuleList. A module
            inside of a unit is no unit.
    """
    chosen: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            is_one = (
                isinstance(module, nn.ModuleList) if is_unit is None else is_unit(child)
            )
            if is_one and not isinstance(child, nn.ModuleList):
                chosen[path] = child
            else:
                visit(child, path)

    visit(model, ROOT)
    return {ROOT: model, **chosen}


def unit_of_params(
    model: nn.Module, is_unit: Callable[[nn.Module], bool] | None
) -> dict[int, str]:
    """Return the unit of each parameter, by id. One that several use, such as a tied
    weight, is the root's."""
    owners: dict[int, set[str]] = {}
    for name, module in unit_modules(model, is_unit).items():
        if name != ROOT:
            for param in module.parameters():
                owners.setdefault(id(param), set()).add(name)
    inside = {key: names.pop() for key, names in owners.items() if len(names) == 1}
    units = {
        id(module)
        for name, module in unit_modules(model, is_unit).items()
        if name != ROOT
    }
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
    """The parameters of one unit. Sharded ones keep their shapes, hold no memory and
    refuse to be read."""

    def __init__(
        self,
        name: str,
        index: int,
        parameters: Sequence[ParameterBucket],
        gradients: Sequence[GradientBucket],
        comm: Comm,
        scratch: Scratch,
    ) -> None:
        """Shard the unit.

        Args:
            name: path of its module; "" for the root.
            index: among the units.
            parameters: its buckets, trainable and frozen ones, emptied.
            gradients: of the trainable ones.
            comm: the group.
            scratch: the ledger of gathered memory.
        """
        self.name, self.title, self.parameters, self.gradients = (
            name,
            name or "root",
            list(parameters),
            list(gradients),
        )
        self.index, self.comm, self.scratch = index, comm, scratch
        self.state = State.SHARDED
        self.inputs_pending = 0
        """Inputs of the module whose gradients backward has still to form."""
        self.calls_pending = 0
        """Calls of the module that backward has still to come to."""
        self._visits, self._expected_visits = 0, 1
        """Calls of the module that this backward pass has come to; the most that any
        has. Under a reentrant checkpoint the forward does not tell how many there will
        be."""
        self.left_behind = False
        """Backward has come to all of its calls, and then to another unit: no more
        gradients will come."""
        self.held = 0
        """Methods under way that use the parameters beside any forward: nothing is
        released."""
        self._works: list[Work] = []
        self._shown: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        """Within full_params: each bucket's memory, and the parameters in it."""
        self._absences = [
            Absence(bucket.params, _Refusal(self)) for bucket in self.parameters
        ]
        for absence in self._absences:
            absence.begin()

    def start(self) -> None:
        """Start to gather, if that is not done."""
        if self.state is State.SHARDED:
            self.state = State.GATHERING
            self.comm.announce("gather", self.index)
            with torch.autograd.profiler.record_function(
                f"zerokern::gather {self.title}"
            ):
                for bucket in self.parameters:
                    self.scratch.allocate_storage(bucket.full)
                    bucket.full[bucket.bucket.shard(bucket.rank)].copy_(bucket.own)
                    self._works.append(self.comm.all_gather(bucket.full, self.title))

    def gather(self) -> None:
        """Have the parameters whole when the current stream gets here."""
        self.start()
        if self.state is State.GATHERING:
            for work in self._works:
                work.wait()
            self._works.clear()
            for bucket, absence in zip(self.parameters, self._absences, strict=True):
                absence.end(bucket.views)
            self.state = State.WHOLE

    def release(self) -> None:
        """Give the gathered memory back. Autograd's saved views stay valid: backward
        fills the same storage again."""
        if self.state is not State.SHARDED:
            self.gather()
            for bucket, absence in zip(self.parameters, self._absences, strict=True):
                absence.begin()
                self.scratch.free_storage(bucket.full)
            self.state = State.SHARDED

    def show(self) -> None:
        """Have the parameters whole in memory that is not emptied afterwards: users may
        keep what they see of it.

        A unit that is whole, since a forward or backward of it is under way, stays as
        it is.
        """
        if self.state is State.GATHERING:
            self.release()
        if self.state is State.SHARDED:
            self.comm.announce("gather", self.index)
            self.state = State.WHOLE
            for bucket, absence in zip(self.parameters, self._absences, strict=True):
                whole = self.scratch.take(bucket.full.numel(), bucket.full.dtype)
                self._shown.append((whole, storages_of(bucket.views_of(whole))))
                whole[bucket.bucket.shard(bucket.rank)].copy_(bucket.own)
                self.comm.all_gather(whole, self.title).wait()
                absence.end(self._shown[-1][1])

    def keep_edits(self, name_of: Sequence[str]) -> None:
        """After `show`: copy this rank's part back to its shard.

        Raises:
            RuntimeError: a parameter was replaced.
        """
        shown = self._shown or [
            (bucket.full, bucket.views) for bucket in self.parameters
        ]
        for bucket, (_, views) in zip(self.parameters, shown, strict=True):
            bucket.check_views(name_of, views)
        for bucket, (whole, _) in zip(self.parameters, shown, strict=True):
            bucket.own.copy_(whole[bucket.bucket.shard(bucket.rank)])
            if bucket.bucket.trainable:
                bucket.refresh_master()

    def hide(self) -> None:
        """End what `show` began."""
        for (whole, _), absence in zip(self._shown, self._absences, strict=False):
            absence.begin()
            self.scratch.lend(whole)
            self.state = State.SHARDED
        self._shown.clear()

    def visit(self, *, first: bool) -> None:
        """Backward has come to one of the calls, and perhaps does so for the first
        time."""
        self.calls_pending -= first
        self._visits += first

    @property
    def visited(self) -> bool:
        """Whether this backward pass has come to a call of the module before."""
        return self._visits > 0

    def leave(self) -> None:
        """Backward has come to another unit."""
        self.left_behind = (
            self.calls_pending <= 0 and self._visits >= self._expected_visits
        )

    def end_backward(self) -> None:
        """Forget the pass."""
        self._expected_visits, self._visits = (
            max(self._visits, self._expected_visits),
            0,
        )
        self.inputs_pending = self.calls_pending = 0
        self.left_behind = False

    def backward_done(self) -> bool:
        """Return whether no node of the unit's graph is left: all its parameters and
        inputs have their gradients."""
        return self.inputs_pending <= 0 and all(
            bucket.tally.complete() for bucket in self.gradients
        )

    def check_absent(self, name_of: Sequence[str]) -> None:
        """SHARDED: raise if a parameter was replaced or moved, which no shard would
        learn of.

        Raises:
            RuntimeError: names the parameter and the remedy.
        """
        if self.state is not State.SHARDED:
            return
        for bucket, absence in zip(self.parameters, self._absences, strict=True):
            for index, slot in enumerate(bucket.bucket.slots):
                if not absence.holds(index):
                    raise RuntimeError(
                        f"parameter {name_of[slot.param]!r} was moved, cast or its"
                        " .data was replaced while it was sharded; edit it inside"
                        " optimizer.full_params(), or move the model before the"
                        " optimizer is built"
                    )


class _Refusal:
    """Says why a parameter of a unit cannot be read now."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, param: nn.Parameter, reader: str) -> None:
        unit = self._unit()
        title = unit.title if unit else "a unit"
        raise RuntimeError(
            f"{reader} cannot read a parameter of shape {tuple(param.shape)} of unit"
            f" {title!r}: it is sharded (stage 3), and whole in the forward of its unit"
            " only. For another method than forward call"
            " optimizer.register_forward_method(module, name); to read, copy or edit"
            " weights enter optimizer.full_params() on all ranks; if another module's"
            " forward uses it, put both into one unit with Buckets(units=...)"
        )
