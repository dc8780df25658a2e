"""Handles: all numbers and names of a parameter, and the only way to look one up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class ParamHandle:
    """One parameter of one optimizer: its names and numbers everywhere."""

    param: nn.Parameter
    name: str
    """Of the module's, if a model was given; else "group.position"."""
    index: int
    """In the layout."""
    group: int
    """The param group; -1 for a frozen parameter of stage 3 that is in none."""
    position: int
    """Counted over all param groups, as in `state_dict()`; -1 if it is in none."""
    unit: str
    """Stage 3: the unit that gathers it. "" is the root unit."""
    bucket: int
    """In the layout; -1 if it has none: frozen, in stages 1 and 2."""
    slot: int
    """In the bucket."""
    column: int
    """In the scalar table; -1 for a frozen parameter."""


class ParamHandles:
    """The handles of one optimizer, in the order of the layout."""

    def __init__(
        self,
        layout: Layout,
        params: Sequence[nn.Parameter],
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Number the parameters.

        Args:
            layout: agreed on by all ranks.
            params: in the order of `layout.params`.
            places: (group, position) of each one.
        """
        slots: dict[int, tuple[int, int]] = {}
        columns: dict[int, int] = {}
        for bucket in layout.buckets:
            for number, slot in enumerate(bucket.slots):
                slots[slot.param] = bucket.index, number
                if bucket.trainable:
                    columns[slot.param] = len(columns)
        self._handles = [
            ParamHandle(
                param,
                spec.name,
                index,
                *places[index],
                spec.unit,
                *slots.get(index, (-1, -1)),
                columns.get(index, -1),
            )
            for index, (param, spec) in enumerate(
                zip(params, layout.params, strict=True)
            )
        ]
        # By id: a parameter compares by its elements, and one that is a placeholder
        # would have to be asked.
        self._by_id = {id(handle.param): handle for handle in self._handles}
        self.num_columns = len(columns)

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, index: int) -> ParamHandle:
        return self._handles[index]

    def __iter__(self) -> Iterator[ParamHandle]:
        return iter(self._handles)

    def find(self, param: nn.Parameter) -> ParamHandle | None:
        """Return the handle of a parameter, or None if this optimizer has not got
        it."""
        return self._by_id.get(id(param))
