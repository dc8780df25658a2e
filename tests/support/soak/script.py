"""Random scripts: what happens in each step of a soak."""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULTS = ("forward", "loss", "backward", "recompute")
PLACES = ("0", "0.up", "0.norm", "1", "1.down", "2")
"""Modules in which users' code fails. Every rank runs all of these."""
ORDERS = ((0, 1), (0, 1), (1, 0), (0, 1, 0))
USES = ("both", "both", "left", "right")


@dataclass(frozen=True)
class Micro:
    """One forward and backward."""

    batch: int
    no_sync: bool
    uses: tuple[str, ...]
    """Branches of the fork, by rank."""
    order: tuple[int, ...]
    checkpoint: bool | None
    infinite_on: int | None
    """The rank whose gradients are not finite."""
    evaluate: bool
    """Evaluate afterwards."""
    read: bool
    """Read all parameters afterwards."""


@dataclass(frozen=True)
class Step:
    """What happens between two calls of zero_grad."""

    micros: tuple[Micro, ...]
    fault: tuple[str, str] | None
    """What fails in the last micro-batch, and where. Then there is no update."""
    lr: float
    clip: float | None
    set_to_none: bool
    zeroed_by_model: bool
    reload: bool
    """Load the optimizer's own state afterwards."""


def script(seed: int, steps: int, ranks: int) -> list[Step]:
    """Return random steps, the same for the same arguments."""
    chance = random.Random(seed)
    return [_step(chance, number, ranks) for number in range(steps)]


def _step(chance: random.Random, number: int, ranks: int) -> Step:
    fault = None
    if chance.random() < 0.15:
        fault = chance.choice(FAULTS), chance.choice(PLACES)
    count = chance.choice((1, 1, 2, 3))
    infinite = chance.randrange(count) if chance.random() < 0.06 else None
    micros = [
        _micro(chance, 10 * number + i, ranks, infinite=i == infinite)
        for i in range(count)
    ]
    if fault is not None and fault[0] == "recompute" and micros[-1].checkpoint is None:
        fault = ("backward", fault[1])
    return Step(
        micros=tuple(micros),
        fault=fault,
        lr=chance.choice((1e-3, 3e-3, 1e-2)),
        clip=chance.choice((None, None, 0.3, 100.0)),
        set_to_none=chance.random() < 0.7,
        zeroed_by_model=chance.random() < 0.2,
        reload=chance.random() < 0.05,
    )


def _micro(chance: random.Random, batch: int, ranks: int, *, infinite: bool) -> Micro:
    checkpoint = chance.choice((None, None, False, True))
    # A reentrant checkpoint brings the gradients of two calls apart, and the first time
    # the engine cannot know that.
    order = chance.choice(ORDERS[:3] if checkpoint else ORDERS)
    return Micro(
        batch=batch,
        no_sync=chance.random() < 0.3,
        uses=tuple(chance.choice(USES) for _ in range(ranks)),
        order=order,
        checkpoint=checkpoint,
        infinite_on=chance.randrange(ranks) if infinite else None,
        evaluate=chance.random() < 0.15,
        read=chance.random() < 0.1,
    )
