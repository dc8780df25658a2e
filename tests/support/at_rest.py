"""Between iterations nothing may be left of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerokern.sharding.units import UnitState


def assert_at_rest(optimizer: Any) -> None:
    """Nothing is under way, gathered or half done: not only is the ledger empty, so are
    all states."""
    coordinator = optimizer.coordinator
    assert optimizer.memory().buffers == 0
    assert coordinator.reducer.is_at_rest()
    for unit in getattr(coordinator.parameters, "units", {}).values():
        assert unit.state is UnitState.SHARDED, unit.name
        assert [bucket.whole for bucket in unit.buckets] == [None] * len(unit.buckets)
    assert coordinator.is_at_rest()


def same_on_all_ranks(logs: Sequence[Sequence[Any]]) -> bool:
    """Return whether ranks issued the same collectives in the same order."""
    calls = [[call[:4] for call in log] for log in logs]
    return all(other == calls[0] for other in calls)
