"""Deep supervision: a loss for each unit, one backward each, in any order, so that one
pass reads units which another one's prefetch is fetching."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from oracle import Run
from registry import script
from torch import Tensor
from units import Stack, Unit, batch, seeded, squares

UNITS = 4


class Kept(Unit):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


def _supervised(run: Run, order: Sequence[int], at_once: int) -> None:
    """Have a backward for `at_once` losses, again and again."""
    model: Any = run.model
    for step in range(3):
        run.optimizer.zero_grad()
        for rank in run.each():
            model(batch(step, rank))
            losses = [squares(model.units[number].kept) for number in order]
            for first in range(0, len(losses), at_once):
                loss = sum(losses[first : first + at_once])
                run.part(loss).backward(retain_graph=True)
        run.step()


ORDERS = {
    "the last one first": ((3, 2, 1, 0), 1),
    "the first one first": ((0, 1, 2, 3), 1),
    "from both ends": ((3, 0, 2, 1), 1),
    "two at a time": ((3, 0, 2, 1), 2),
    "the last one twice": ((3, 3, 0), 1),
}
for _name, (_order, _at_once) in ORDERS.items():
    script(
        f"a loss for each unit: {_name}",
        build=seeded(lambda: Stack(Kept, UNITS)),
        eps=1e-3,
    )(functools.partial(_supervised, order=_order, at_once=_at_once))
