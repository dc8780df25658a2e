"""How often stage 3 gathers: each unit once for its forward and once for its backward,
whatever a script does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import ranks
from scripts import SCRIPTS
from scripts.containers import MODELS
from scripts.nested_checkpoints import KINDS

at_several = pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))


def gathers(result: Any, step: int) -> Counter[str]:
    """Return how often each unit was gathered in a step; not what was asked for by the
    script, such as its whole parameters."""
    return Counter(
        call.unit
        for call in result["log"]
        if call.op == "all_gather" and call.step == step and call.phase != "step"
    )


@at_several
@pytest.mark.parametrize(
    "name",
    ["zero_grad_sets_to_none", "checkpoint_reentrant", "checkpoint_not_reentrant"],
)
def test_each_unit_is_gathered_twice_per_step(name: str, at: int) -> None:
    """A checkpoint's recomputation shares the gather for backward."""
    for result in SCRIPTS.played(name, 3, at):
        units = ["blocks.0", "blocks.1", "blocks.2", "root"]
        assert gathers(result, 2) == dict.fromkeys(units, 2)


def test_a_world_of_one_gathers_nothing() -> None:
    (result,) = SCRIPTS.played("zero_grad_sets_to_none", 3, 1)
    assert not gathers(result, 2)


@at_several
@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
def test_checkpointing_adds_no_gathers(stage: int, at: int) -> None:
    plain = SCRIPTS.played("zero_grad_sets_to_none", stage, at)
    checkpointed = SCRIPTS.played("checkpoint_reentrant", stage, at)
    for one, other in zip(plain, checkpointed, strict=True):
        assert [call[:6] for call in one["log"]] == [call[:6] for call in other["log"]]


@at_several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["nested", "checkpoint outside", "checkpoint inside", "checkpoint both"]
)
def test_recomputation_gathers_nothing_again(
    name: str,
    kind: str,
    at: int,
) -> None:
    """Also inside of a checkpointed parent."""
    for result in SCRIPTS.played(f"{name}, {kind}", 3, at):
        found = gathers(result, 2)
        assert len(found) >= 3
        assert set(found.values()) == {2}


@at_several
def test_a_wrong_guess_costs_gathers_only(at: int) -> None:
    """A unit that was gathered ahead in vain costs one gather, in each direction."""
    for result in SCRIPTS.played("routing_alternates", 3, at):
        for step in range(2, 8):
            found = gathers(result, step)
            assert found["root"] == found["blocks.2"] == 2
            assert all(count <= 4 for count in found.values())


SEVERAL_CALLS = ("sequentials walked and called", "sequentials walked in turns")
"""Models that come back to a unit after it was left: it is gathered again, as a unit is
that is called twice."""


@at_several
@pytest.mark.parametrize("name", [n for n in MODELS if n not in SEVERAL_CALLS])
def test_units_that_are_walked_through_are_gathered_twice(name: str, at: int) -> None:
    """As those that are called, and from the first step on; what nobody calls is no
    unit."""
    for result in SCRIPTS.played(f"units: {name}", 3, at):
        for step in range(3):
            found = gathers(result, step)
            assert found and set(found.values()) == {2}


@at_several
def test_units_that_are_called_and_walked_by_turns_are_gathered_twice(at: int) -> None:
    for result in SCRIPTS.played("units_called_and_walked_by_turns", 3, at):
        for step in range(4):
            units = ["layers.0", "layers.1", "layers.2", "root"]
            assert gathers(result, step) == dict.fromkeys(units, 2)


@at_several
def test_units_in_containers(at: int) -> None:
    """Children of a container in a list, down to what has a forward; parameters that
    lie in no module with a forward are the root's."""
    for name, units in {
        "dicts": ["layers.0.mix", "layers.0.norm"],
        "parameter lists": [],
        "lists": ["layers.0.0", "layers.0.1"],
        "modules without forward": ["layers.0.up", "layers.0.down"],
        "nested containers": [
            "layers.0.units.0",
            "layers.0.units.1",
            "layers.0.walked",
        ],
        "sequentials of sequentials": ["layers.0"],
    }.items():
        for result in SCRIPTS.played(f"units: {name}", 3, at):
            found = gathers(result, 1)
            assert {u for u in found if u.startswith("layers.0")} == set(units), name
            assert "root" in found
