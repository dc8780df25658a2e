"""torch.compile of units: whole graphs, no recompilation, the bits of the uncompiled
run.

A unit is compiled in place or replaced, before the optimizer is built or after.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import ranks
import torch
from compiled import (
    HOW,
    WARM_UP,
    WHEN,
    WORLD,
    OwnModules,
    Recipe,
    Result,
    differing_values,
    import_compilers,
    in_place,
    quiet,
    stays_warm,
    train,
)
from marks import in_stages
from oracle import STAGES
from torch import nn

pytestmark = quiet

BACKENDS = ("eager", "aot_eager")


def bf16() -> nn.Module:
    """Return a model that has master weights."""
    return models.toy(blocks=2).bfloat16()


KINDS = {
    "toy": Recipe(),
    "bf16": Recipe(build=bf16),
    "checkpoint": Recipe(build=models.forked, checkpoint=False),
    "reentrant": Recipe(build=models.forked, checkpoint=True),
    "torch's own": Recipe(build=OwnModules),
    "ten blocks": Recipe(build=functools.partial(models.toy, blocks=10), steps=3),
    "late": Recipe(late=True),
}
"""What is trained. Ten are more than dynamo compiles of one function (its limit is 8):
units must share a graph."""


def way(kind: str) -> tuple[str, str]:
    """Return how and when a kind is compiled."""
    # Without hooks torch finds nothing to compile in a module of its own that is
    # compiled in place.
    return ("replaced", "before") if kind == "torch's own" else ("in place", "after")


Key = tuple[str, int, str, str, str]
"""Kind, stage, how, when, backend."""

HOOKED = tuple(kind for kind in KINDS if kind not in ("toy", "late"))
QUICK: list[Key] = [
    *(("toy", stage, "in place", "after", "aot_eager") for stage in STAGES),
    ("toy", 3, "in place", "before", "eager"),
    ("toy", 3, "replaced", "after", "eager"),
    ("toy", 3, "replaced", "before", "aot_eager"),
    *((kind, 3, *way(kind), "eager") for kind in HOOKED if kind != "reentrant"),
    ("late", 2, "in place", "after", "eager"),
]
EVERY: list[Key] = [
    *itertools.product(["toy"], STAGES, HOW, WHEN, BACKENDS),
    *(
        (kind, stage, *way(kind), backend)
        for kind in HOOKED
        for stage in STAGES
        for backend in BACKENDS
    ),
    *itertools.product(["late"], (1, 2), HOW, WHEN, BACKENDS),
]
SLOW = [key for key in EVERY if key not in QUICK]


def case_of(key: Key) -> Callable[[], Result]:
    """Return the training of a compiled model."""
    kind, stage, how, when, backend = key
    compiled = functools.partial(HOW[how], backend=backend, fullgraph=True)
    recipe = replace(KINDS[kind], compiled=compiled, when=when)
    return functools.partial(train, stage, recipe)


@functools.cache
def trained_together(keys: tuple[Key, ...]) -> ranks.Cases:
    """Train some cases, and the same uncompiled."""
    import_compilers()
    cases: dict[Any, Callable[[], Result]] = {}
    for kind, stage, *_ in keys:
        cases[kind, stage, "plain"] = functools.partial(train, stage, KINDS[kind])
    for key in keys:
        cases[key] = case_of(key)
    return ranks.run_cases(WORLD, cases)


def trained(key: Key) -> tuple[list[Result], list[Result]]:
    """Return what a case came to on each rank, and what it does uncompiled."""
    alike = [other for other in SLOW if other[:2] == key[:2]]
    cases = trained_together(tuple(QUICK if key in QUICK else alike))
    return cases[key], cases[(*key[:2], "plain")]


each_case = pytest.mark.parametrize(
    "key",
    [*QUICK, *(pytest.param(key, marks=pytest.mark.long) for key in SLOW)],
    ids=lambda key: "-".join(map(str, key)),
)


@each_case
def test_compiled_units_train_as_uncompiled_ones_bit_for_bit(key: Key) -> None:
    """Each unit is one whole graph, and hooks do not break it (pytorch#161153, pytorch
    PR#181924)."""
    for ours, plain in zip(*trained(key), strict=True):
        assert differing_values(ours, plain) == []
        assert ours["breaks"] == 0
        assert ours["log"] == plain["log"]
        assert not any(ours["buffers"])


@each_case
def test_nothing_is_compiled_after_the_warm_up(key: Key) -> None:
    """Gathered storage that comes and goes is no reason to compile again
    (pytorch#138813)."""
    for result in trained(key)[0]:
        assert len(result["graphs"]) > WARM_UP
        assert stays_warm(result["graphs"])


def test_all_units_share_one_graph() -> None:
    """Hooks of each unit's own do not make it a function of its own, so the depth of a
    model does not matter."""
    two, _ = trained(("toy", 3, "in place", "before", "eager"))
    ten, _ = trained(("ten blocks", 3, *way("ten blocks"), "eager"))
    for shallow, deep in zip(two, ten, strict=True):
        assert deep["graphs"][-1] == shallow["graphs"][-1] > 0


@pytest.mark.long
# Inductor imports what torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@in_stages
def test_inductor_agrees(stage: int) -> None:
    """Generated C++ fuses what torch does apart, so sums are close and not the same."""
    compiled = functools.partial(in_place, backend="inductor", fullgraph=True)
    plain = Recipe(steps=4)
    recipes = {"plain": plain}
    for when in WHEN:
        recipes[when] = replace(plain, compiled=compiled, when=when)
    results = ranks.run_cases(
        WORLD,
        {
            name: functools.partial(train, stage, recipe)
            for name, recipe in recipes.items()
        },
    )
    for when in WHEN:
        for ours, expected in zip(results[when], results["plain"], strict=True):
            for name, value in expected["values"].items():
                torch.testing.assert_close(
                    ours["values"][name], value, rtol=1e-4, atol=2e-5, msg=name
                )
            assert ours["breaks"] == 0
            assert stays_warm(ours["graphs"])
