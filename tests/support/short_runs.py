"""Short runs of small models, and what can be compared of them."""

from __future__ import annotations

from typing import Any

import models
from oracle import Run, rank, world
from torch import Tensor, nn

Named = dict[str, Tensor]


def _two_blocks() -> nn.Module:
    return models.toy(blocks=2)


def short(stage: int | None, of: int, **options: Any) -> Run:
    """Return a run of a small model."""
    return Run(stage, of, build=_two_blocks, **options)


def loss_of_share(model: nn.Module, step: int) -> Tensor:
    """Return the loss of this rank's share of a batch."""
    tokens, targets = models.batch(step)
    own = models.share(tokens, rank(), world())
    wanted = models.share(targets, rank(), world())
    return models.loss_of(model, own, wanted)


def distance_moved(before: Named, after: Named) -> float:
    """Return the norm of the difference of all parameters."""
    moves = [before[name] - after[name] for name in before]
    return float(nn.utils.get_total_norm(moves))
