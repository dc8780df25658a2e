"""Stage 3: which modules form a unit, and a unit's parameters, whole or sharded."""

from __future__ import annotations

import enum
import inspect
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..pretend import address
from ..transport import Gather, Transport
from . import transforms
from .handles import ParamHandle
from .parameters import ParameterBucket, storages_of
from .placeholders import Placeholders

ROOT = ""
VERSION = operator.attrgetter("_version")

IsUnit = Callable[[nn.Module], bool]


def unit_modules(model: nn.Module, is_unit: IsUnit | None) -> dict[str, nn.Module]:
    """Return the modules that are gathered as one, by name; the root unit, "", is the
    model itself and comes first.

    Args:
        model: the module.
        is_unit: the user's choice; None: the children of every ModuleList. A module
            inside of a unit is no unit.
    """
    in_list = isinstance(model, nn.ModuleList)
    return {ROOT: model, **dict(_units_in(model, ROOT, is_unit, in_list))}


def _units_in(
    module: nn.Module, name: str, is_unit: IsUnit | None, in_list: bool
) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        is_one = in_list if is_unit is None else is_unit(child)
        # What has no forward is only ever walked through.
        if is_one and _has_forward(child):
            yield path, child
        else:
            is_list = isinstance(child, nn.ModuleList)
            is_list |= in_list and not _has_forward(child)
            yield from _units_in(child, path, is_unit, is_list)


def _has_forward(module: nn.Module) -> bool:
    return _forward_of(module) is not nn.Module.forward


def _forward_of(module: nn.Module) -> object:
    # Statically: a scripted module does not tell. A compiled one has its own.
    return inspect.getattr_static(module, "forward", None)


def unit_of_params(model: nn.Module, is_unit: IsUnit | None) -> dict[int, str]:
    """Return the unit of each parameter, by id. One that several use, such as a tied
    weight, is the root's."""
    owners: dict[int, set[str]] = {}
    modules = unit_modules(model, is_unit)
    del modules[ROOT]
    for name, module in modules.items():
        for param in module.parameters():
            owners.setdefault(id(param), set()).add(name)
    units = {key: names.pop() for key, names in owners.items() if len(names) == 1}
    for param in _outside(model, {id(module) for module in modules.values()}):
        units.pop(id(param), None)
    return units


def _outside(module: nn.Module, units: set[int]) -> list[nn.Parameter]:
    if id(module) in units:
        return []
    params = list(module.parameters(recurse=False))
    for child in module.children():
        params += _outside(child, units)
    return params


def called_beside(
    modules: Mapping[str, nn.Module], used: Collection[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that may be called without the forward of their unit, and its
    name: those of the root that have parameters, and what a Sequential is made of,
    which many loops walk through.

    Args:
        modules: of every unit, the model first.
        used: the units that have parameters.
    """
    inside = {id(modules[ROOT])}
    for name, unit in modules.items():
        if name == ROOT:
            continue
        inside |= {id(module) for module in unit.modules()}
        if name in used:
            yield from ((name, module) for module in _walked_through(unit))
    if ROOT not in used:
        return
    for module in modules[ROOT].modules():
        has_own = next(module.parameters(recurse=False), None) is not None
        is_hookable = not isinstance(module, torch.jit.ScriptModule)
        if has_own and is_hookable and id(module) not in inside:
            yield ROOT, module


def _walked_through(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a Sequential, and of Sequentials in it."""
    if _forward_of(module) is nn.Sequential.forward:
        for part in module.children():
            yield part
            yield from _walked_through(part)


class UnitState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    """Their gather is under way; they are placeholders still."""
    WHOLE = enum.auto()


class UnitBucket:
    """A bucket of a unit: the gather of its parameters, and these while they are
    whole."""

    def __init__(
        self,
        parameters: ParameterBucket,
        unit: Unit,
        transport: Transport,
    ) -> None:
        self.parameters = parameters
        self.gather = Gather(transport, parameters.layout, unit.title, "forward")
        self.placeholders = Placeholders(parameters.params, unit)
        # A graph from before, which has saved them, refuses its backward in torch's
        # words: what it would read is gone.
        torch.autograd.graph.increment_version(parameters.params)
        self.placeholders.substitute()
        self.whole: Tensor | None = None
        """[W * S], the gathered parameters."""
        self.views: list[Tensor] = []
        """Each of them."""
        self.itself = weakref.ref(self)
        self._versions: list[int] = []
        """Torch's counts of writes to the parameters, when they were restored."""

    def restore(self, whole: Tensor, views: list[Tensor]) -> None:
        """Give the parameters their values."""
        self.whole = whole
        self.views = views
        self.placeholders.restore(views)
        self._versions = list(map(VERSION, self.parameters.params))

    def is_written(self) -> bool:
        """Return whether torch knows of a write to a parameter since they were
        restored."""
        return list(map(VERSION, self.parameters.params)) != self._versions

    def substitute(self) -> ParamHandle | None:
        """Make the parameters placeholders again, and let the memory go. Return one
        that was written to since it was restored, if there is any."""
        written = None
        versions = list(map(VERSION, self.parameters.params))
        if versions != self._versions:
            changed = map(operator.ne, versions, self._versions)
            written = self.parameters.handles[list(changed).index(True)]
        self.whole = None
        self.views = []
        self.placeholders.substitute()
        self.gather.free()
        return written


Gathered = dict[int, tuple["weakref.ref[Unit]", "weakref.ref[UnitBucket]"]]
"""Units that are whole, by the storage that their parameters lie in."""


class Unit:
    """The parameters of one unit. Sharded ones keep their shapes, hold no memory and
    refuse to be read."""

    def __init__(
        self,
        name: str,
        index: int,
        transport: Transport,
        gathered: Gathered,
    ) -> None:
        """Make a unit without parameters.

        Args:
            name: path of its module; "" for the root.
            index: among the units.
            transport: the optimizer's.
            gathered: where the unit is entered while it is whole.
        """
        self.name = name
        self.title = name or "root"
        self.index = index
        self.state = UnitState.SHARDED
        self.buckets: list[UnitBucket] = []
        self.updates = 0
        """Updates of its parameters since it was made."""
        self.itself = weakref.ref(self)
        """For whoever must not keep its shards alive, such as a graph."""
        self._transport = transport
        self._gathered = gathered
        self._holders = 0

    def add(self, parameters: ParameterBucket) -> None:
        """SHARDED: shard a bucket of parameters, trainable or frozen ones."""
        self.buckets.append(UnitBucket(parameters, self, self._transport))

    def remove(self, gone: Sequence[ParameterBucket]) -> None:
        """WHOLE: let go of some buckets, whose parameters stay whole."""
        left = []
        for bucket in self.buckets:
            if bucket.parameters in gone:
                assert bucket.whole is not None
                del self._gathered[bucket.whole.untyped_storage()._cdata]
                bucket.gather.free()
            else:
                left.append(bucket)
        self.buckets = left

    def start(self) -> None:
        """SHARDED: start to gather."""
        announcements = self._transport.announcements
        if announcements.are_heard:
            announcements.announce("gather", self.index)
        self.state = UnitState.GATHERING
        name = f"zerokern::gather {self.title}"
        with torch.autograd.profiler.record_function(name):
            for bucket in self.buckets:
                bucket.gather.start(bucket.parameters.own)

    def unshard(self, *, own_storages: bool = False) -> None:
        """Have the parameters whole when the current stream gets here.

        Args:
            own_storages: users may save what they see: each has a storage of its own.
        """
        if self.state is UnitState.WHOLE:
            return
        if transforms.innermost() is not None:
            with transforms.outside():
                self.unshard(own_storages=own_storages)
            return
        if self.state is UnitState.SHARDED:
            self.start()
        for bucket in self.buckets:
            whole = bucket.gather.wait()
            views = []
            for place in bucket.parameters.places:
                views.append(whole.as_strided(*place))
            if own_storages:
                views = storages_of(views)
            bucket.restore(whole, views)
            storage = whole.untyped_storage()._cdata
            self._gathered[storage] = self.itself, bucket.itself
        self.state = UnitState.WHOLE

    def reshard(self, *, keeps_writes: bool = False) -> None:
        """Give the gathered memory back, unless somebody holds the unit.

        Args:
            keeps_writes: what was written to the parameters is in the shard.

        Raises:
            RuntimeError: a parameter was written to, which no shard would learn of;
                names it. The memory is given back.
        """
        if self.state is UnitState.SHARDED or self._holders:
            return
        if transforms.innermost() is not None:
            return
        written = None
        gathering, self.state = self.state is UnitState.GATHERING, UnitState.SHARDED
        for bucket in self.buckets:
            if gathering:
                bucket.gather.free()
                continue
            assert bucket.whole is not None
            del self._gathered[bucket.whole.untyped_storage()._cdata]
            written = bucket.substitute() or written
        if written is not None and not keeps_writes:
            raise RuntimeError(
                f"parameter {written.name!r} was written to in a forward or backward of"
                f" unit {self.title!r} (stage 3), where it is a copy that is thrown"
                " away, as by nn.Embedding(max_norm=...); write to weights inside"
                " optimizer.full_params(), on all ranks, or use stage 2"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the parameters whole inside, whatever forwards are called."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1

    def note_update(self) -> None:
        """The shard of a bucket was updated."""
        self.updates += 1

    def keep_edits(self) -> None:
        """WHOLE: copy this rank's part of the parameters back to its shard.

        Raises:
            RuntimeError: a parameter was replaced.
        """
        for bucket in self.buckets:
            self._check_views(bucket)
        for bucket in self.buckets:
            parameters = bucket.parameters
            assert bucket.whole is not None
            part = bucket.whole[parameters.layout.shard(parameters.rank)]
            parameters.own.copy_(part)
            if parameters.layout.trainable:
                parameters.refresh_master()

    def _check_views(self, bucket: UnitBucket) -> None:
        handles = bucket.parameters.handles
        for handle, view in zip(handles, bucket.views, strict=True):
            param = handle.param
            if address(param) != address(view) or param.dtype != view.dtype:
                raise RuntimeError(
                    f"parameter {handle.name!r} no longer lives in the optimizer's flat"
                    " buffer: it was moved, cast or its .data was replaced. Move and"
                    " cast the model before the optimizer is built, or build a new"
                    " optimizer"
                )

    def provide(self, param: nn.Parameter, reader: str) -> None:
        """Refuse to be read.

        Raises:
            RuntimeError: always; names the unit and the remedy.
        """
        raise RuntimeError(
            f"{reader} cannot read a parameter of shape {tuple(param.shape)} of unit"
            f" {self.title!r}: it is sharded (stage 3), and whole in the forward of its"
            " unit only. For another method than forward call"
            " optimizer.register_forward_method(module, name); to read, copy or edit"
            " weights enter optimizer.full_params() on all ranks; if another module's"
            " forward uses it, put both into one unit with Buckets(units=...)"
        )
