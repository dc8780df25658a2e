"""Uneven numbers of batches: ranks that have run out take part in what the others still
do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..transport import Transport
from .reducer import Reducer

EVENTS = ("idle", "reduce", "gather", "norm", "step", "gradient")
"""Announced by a rank before it does so."""
INDICES = 2**32


class Units(Protocol):
    """Parameters that are gathered unit by unit."""

    def unit_titles(self) -> list[str]:
        """Return the names of the units."""

    def gather_unit(self, index: int) -> None:
        """Take part in the gather of one."""


class Steps(Protocol):
    """The rest of a step, when all gradients are reduced."""

    def gather_norm(self) -> None:
        """Exchange the small vector."""

    def step(self) -> None:
        """Update."""

    def forget_gradients(self) -> None:
        """Set every p.grad to None."""

    def gather_gradient(self, index: int) -> Any:
        """Take part in the gather of a parameter's gradient."""


class Join:
    """Before each collective, ranks tell each other what it is; those without batches
    then do the same, with nothing.

    As in torch's Join, the mean stays one over all ranks: a rank that has run out
    contributes zeros. What it still holds of gradients that no step has used is
    contributed once.
    """

    def __init__(
        self,
        transport: Transport,
        groups: Sequence[MutableMapping[str, Any]],
        reducer: Reducer,
        units: Units,
        steps: Steps,
    ) -> None:
        """Use the parts of a coordinator.

        Args:
            transport: which tells what is about to happen.
            groups: torch's param groups.
            reducer, units, steps: what a rank without batches takes part in.
        """
        self._transport = transport
        self._groups = groups
        self._reducer = reducer
        self._units = units
        self._steps = steps
        self._active: list[bool] = []
        """Ranks that announced something last."""

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Run the body, then follow the ranks whose body has not ended.

        Raises:
            RuntimeError: two ranks are about to do different things; on all ranks.
        """
        self._transport.announcements.listen(self)
        try:
            yield
            self._transport.announcements.listen(None)
            while (event := self._hear("idle", 0))[0] != "idle":
                self._follow(*event)
        finally:
            self._transport.announcements.listen(None)

    def about_to(self, event: str, index: int) -> None:
        """Tell the others what this rank does next."""
        self._hear(event, index)

    def agree(
        self, max_norm: float | Tensor | None, loss_scale: Tensor | None
    ) -> tuple[float, Tensor]:
        """Give ranks that have run out the hyper-parameters of the first rank that has
        not: numbers in their param groups are replaced.

        Args:
            max_norm, loss_scale: of the step to be made.

        Returns:
            The same largest norm and loss scale on all ranks.
        """
        device = self._transport.device
        largest = math.inf if max_norm is None else float(max_norm)
        scale = 1.0 if loss_scale is None else float(loss_scale)
        numbers = [largest, scale, *_numbers(self._groups)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        words = self._transport.all_gather_words(mine.view(torch.int64))
        of_ranks = words.view(torch.float64)
        values = of_ranks[self._active.index(True)].tolist()
        if not self._active[self._transport.groups.agrees.rank]:
            _replace(self._groups, values[2:])
        return values[0], torch.tensor(values[1], dtype=torch.float32, device=device)

    def _hear(self, event: str, index: int) -> tuple[str, int]:
        """Say what comes next here, and return what comes next on the ranks that have
        batches."""
        word = EVENTS.index(event) * INDICES + index
        mine = torch.tensor([word], device=self._transport.device)
        words = self._transport.all_gather_words(mine).flatten().tolist()
        self._active = [bool(said) for said in words]
        heard = sorted({said for said in words if said})
        if len(heard) > 1:
            of_ranks = [f"rank {r}: {self._describe(w)}" for r, w in enumerate(words)]
            raise RuntimeError(
                f"inside join() the ranks part ways ({'; '.join(of_ranks)}): as long as"
                " a rank has batches it must run the same steps and, in stage 3, the"
                " same units as the others"
            )
        kind, index = divmod(heard[0] if heard else 0, INDICES)
        return EVENTS[kind], index

    def _describe(self, word: int) -> str:
        kind, index = divmod(word, INDICES)
        names: dict[str, list[str]] = {
            "reduce": self._reducer.titles(),
            "gather": self._units.unit_titles(),
        }
        title = names.get(EVENTS[kind], [])[index : index + 1]
        return " ".join([EVENTS[kind], *title])

    def _follow(self, event: str, index: int) -> None:
        with torch.no_grad():
            if event == "reduce":
                self._reducer.launch_next()
            elif event == "gather":
                self._units.gather_unit(index)
            elif event == "norm":
                self._steps.gather_norm()
            elif event == "step":
                self._steps.step()
                self._steps.forget_gradients()
            elif event == "gradient":
                self._steps.gather_gradient(index)


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return every number of param groups, in a fixed order."""
    return [
        float(x) for group in groups for key in _keys(group) for x in _parts(group[key])
    ]


def _keys(group: Mapping[str, Any]) -> list[str]:
    return sorted(
        key
        for key in group
        if key != "params" and all(_is_number(x) for x in _parts(group[key]))
    )


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _replace(
    groups: Sequence[MutableMapping[str, Any]], values: Sequence[float]
) -> None:
    """Write numbers back to where `_numbers` has read them."""
    left = iter(values)
    for group in groups:
        for key in _keys(group):
            old = group[key]
            new = [next(left) for _ in _parts(old)]
            if isinstance(old, Tensor):
                old.fill_(new[0])
            elif isinstance(old, list | tuple):
                group[key] = type(old)(new)
            else:
                group[key] = type(old)(new[0])
