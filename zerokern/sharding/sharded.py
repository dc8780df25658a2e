"""Stage 3: parameters are sharded, and whole only while a unit is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..transport import Transport
from .hooks import Handles, ModuleHook
from .initial import checksum_of
from .parameters import ParameterBucket
from .saved import SavedParameters
from .units import Unit, UnitState


class ShardedParameters:
    """All parameters of the optimizer, in units. When a unit is gathered and resharded,
    others decide."""

    def __init__(self, transport: Transport, units: Sequence[str]) -> None:
        """Make units without parameters.

        Args:
            transport: the optimizer's.
            units: their names, in the order of the model.
        """
        self._transport = transport
        self.saved = SavedParameters()
        """Those that autograd has saved for backward."""
        self.units = {
            name: Unit(name, index, transport, self.saved.gathered)
            for index, name in enumerate(units)
        }
        self.shows_all = False
        """Every parameter is whole, within `full`."""
        self.inside: list[str] = []
        """Units whose forwards are under way, outermost first; one may call itself."""
        self._handles = Handles()

    def add(self, parameters: ParameterBucket) -> None:
        """Take a bucket, whose parameters become placeholders."""
        self.units[parameters.layout.unit].add(parameters)

    def open(self, gone: Sequence[ParameterBucket]) -> None:
        """Before `replace`: have the parameters of buckets whole that are to go. All
        ranks do so."""
        self.recover()
        for unit in self._units_of(gone):
            unit.unshard()

    def replace(
        self, gone: Sequence[ParameterBucket], made: Sequence[ParameterBucket]
    ) -> None:
        """Take buckets made anew of parameters of others, or of further ones."""
        for unit in self._units_of(gone):
            unit.remove(gone)
            unit.reshard()
        for parameters in made:
            self.add(parameters)

    def _units_of(self, buckets: Sequence[ParameterBucket]) -> list[Unit]:
        names = {bucket.layout.unit for bucket in buckets}
        return [unit for name, unit in self.units.items() if name in names]

    def hook(self, model: nn.Module) -> None:
        """Refuse to read or load the model's state_dict while parameters are
        sharded."""
        refuse = ShardedParameters._refuse_state_dict
        hooks = ModuleHook(model, self, refuse, None).around_state_dict()
        self._handles.add(*hooks)

    def _refuse_state_dict(self, *_: Any) -> None:
        if not self.shows_all:
            raise RuntimeError(
                "the parameters are sharded (stage 3), so the model's state_dict cannot"
                " be read or loaded here; do it on all ranks inside `with"
                " optimizer.full_params():`"
            )

    def unit_names(self) -> set[str]:
        """Return the units that have parameters."""
        return set(self.units)

    def unit_titles(self) -> list[str]:
        """Return the names of the units, for messages."""
        return [unit.title for unit in self.units.values()]

    def gather_unit(self, index: int) -> None:
        """Take part in the gather of a unit, for the others' sake."""
        unit = list(self.units.values())[index]
        unit.unshard()
        unit.reshard()

    # ---------------------------------------------------------------- a step

    def prepare_step(self) -> None:
        """Clean up after a forward that never came to its end, such as after a
        KeyboardInterrupt, and refuse what no shard would learn of: sharded parameters
        can only be edited in `full`.

        Raises:
            RuntimeError: a parameter was moved or replaced; names it and the remedy.
        """
        self.recover()
        for unit in self.units.values():
            if unit.state is not UnitState.SHARDED:
                continue
            for bucket in unit.buckets:
                index = bucket.placeholders.find_replaced()
                if index is not None:
                    name = bucket.parameters.handles[index].name
                    raise RuntimeError(
                        f"parameter {name!r} was moved, cast or its .data was replaced"
                        " while it was sharded; edit it inside optimizer.full_params(),"
                        " or move the model before the optimizer is built"
                    )

    def prepare_update(self, parameters: ParameterBucket) -> None:
        """In backward, too, an update needs the shard only."""

    def updated(
        self, parameters: ParameterBucket, written: Sequence[nn.Parameter]
    ) -> None:
        """The shard of a bucket was updated. Nothing is sent: forward gathers. What
        autograd has saved of it is out of date."""
        if written:
            self.units[parameters.layout.unit].note_update()

    def recover(self) -> None:
        """Outside of forward and backward: reshard what was left whole."""
        if self.saved.pushed:
            self.saved.reset()
        self.inside.clear()
        for unit in self.units.values():
            if unit.state is not UnitState.SHARDED:
                unit.reshard()

    # --------------------------------------------------------------- what users ask for

    @contextmanager
    def full(self) -> Iterator[None]:
        """Make every parameter whole. Edits are kept, unless the body raised on any
        rank.

        Raises:
            RuntimeError: the body raised on another rank, the ranks edited differently,
                or a parameter was replaced.
        """
        if self.shows_all:
            yield
            return
        self.shows_all = True
        shown: list[Unit] = []
        error: Exception | None = None
        raised_on: list[int] = []
        odd: list[int] = []
        try:
            with ExitStack() as held:
                for unit in self.units.values():
                    self._show(unit, shown)
                    held.enter_context(unit.held())
                try:
                    yield
                except Exception as raised:
                    error = raised
                raised_on, odd = self._compare(error)
                if not raised_on and not odd:
                    for unit in self.units.values():
                        unit.keep_edits()
        finally:
            self.shows_all = False
            for unit in shown:
                unit.reshard(keeps_writes=True)
        if error is not None:
            raise error
        if raised_on:
            raise RuntimeError(
                f"the body of full_params raised on rank {raised_on[0]}, so edits were"
                " dropped on every rank"
            )
        if odd:
            raise RuntimeError(
                f"rank {odd[0]} has edited parameters inside full_params otherwise than"
                " rank 0, and each rank keeps a part of them only; edit them alike on"
                " all ranks, for example after a broadcast. Edits were dropped on every"
                " rank"
            )

    def _show(self, unit: Unit, shown: list[Unit]) -> None:
        """Have a unit whole, and note if it was not: one whose forward or backward is
        under way stays as it is afterwards."""
        if unit.state is UnitState.GATHERING:
            unit.reshard()
        if unit.state is UnitState.SHARDED:
            shown.append(unit)
            unit.unshard(own_storages=True)

    def _compare(self, error: Exception | None) -> tuple[list[int], list[int]]:
        """Return the ranks whose body raised, and those whose parameters are not those
        of rank 0."""
        buckets = [bucket for unit in self.units.values() for bucket in unit.buckets]
        written = any(bucket.is_written() for bucket in buckets)
        device = self._transport.device
        mine = torch.tensor([error is not None, written], device=device)
        words = self._transport.all_gather_words(mine.to(torch.int64))
        # any() first: a rehearsal answers it, and cannot know how much nonzero() would
        # return.
        if words[:, 0].any():
            return _places(words[:, 0]), []
        if not words[:, 1].any():
            return [], []
        # Also what torch does not know of, such as what a broadcast has written.
        mine = checksum_of([bucket.parameters for bucket in buckets])
        sums = self._transport.all_gather_words(mine).flatten()
        differs = sums != sums[0]
        return [], _places(differs) if differs.any() else []

    def memory(self) -> list[Tensor]:
        """Return what holds the parameters of this rank."""
        units = self.units.values()
        return [bucket.parameters.own for unit in units for bucket in unit.buckets]

    def detach(self) -> None:
        """Leave every parameter whole. All ranks must do so."""
        self._handles.remove()
        self.saved.reset()
        for unit in self.units.values():
            unit.unshard()
        self.shows_all = True


def _places(flags: Tensor) -> list[int]:
    places: list[int] = flags.nonzero().flatten().tolist()
    return places
