"""Pairs of ranks that part ways, many at the same time, each in a group of its own: all
that they do is wait for each other."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import oracle
import ranks
import torch.distributed as dist
from wire import short_group

TIMEOUT_S = 2.0
PAIRS = 5
"""How many wait at the same time."""

NEVER_TOOK_PART = re.compile(
    r"(all_gather|reduce_scatter) of .+ did not complete: another rank never took part"
    r" in it"
)
"""What each rank is told of a collective that the other one of its pair left out."""

Item = TypeVar("Item")
Paired = Callable[[Item, int, Any], Any]
"""A function of an item, the rank in the pair (0 or 1) and the pair's group."""


def run_in_pairs(items: Sequence[Item], function: Paired[Item]) -> dict[Item, Any]:
    """Return what a function returns on both ranks of a pair, by item. While it runs,
    `oracle.rank()` is the rank in the pair."""
    batches = [items[i : i + PAIRS] for i in range(0, len(items), PAIRS)]
    cases = {
        number: functools.partial(_run_batch, batch, function)
        for number, batch in enumerate(batches)
    }
    done = ranks.run_cases(2 * PAIRS, cases)

    return {
        item: done[number][2 * pair : 2 * pair + 2]
        for number, batch in enumerate(batches)
        for pair, item in enumerate(batch)
    }


def _run_batch(batch: Sequence[Item], function: Paired[Item]) -> Any:
    """Run the item of this rank's pair."""
    pair, place = divmod(dist.get_rank(), 2)
    # Every rank has to take part in making every group.
    groups = [
        short_group(TIMEOUT_S, [2 * other, 2 * other + 1])
        for other in range(len(batch))
    ]
    if pair >= len(batch):
        return None

    with mock.patch.object(oracle, "rank", lambda: place):
        return function(batch[pair], place, groups[pair])
