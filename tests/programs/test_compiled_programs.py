"""torch.compile around units: a whole model, the optimizer's step, and one function
that holds both.

In stage 3 parameters come and go between units, so there is no one graph around them: a
compiled model works, in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from compiled import (
    HOW,
    STEPS,
    WORLD,
    OwnModules,
    Recipe,
    Result,
    compiling_until_warm,
    differing_values,
    forget,
    graphs_so_far,
    import_compilers,
    quiet,
    stays_warm,
    train,
    two_blocks,
)
from marks import in_stages
from oracle import STAGES, Run, differing, rank, world

pytestmark = [quiet, pytest.mark.slow]

PLAIN = Recipe()

MODELS = [
    *((stage, "in place", "before", "eager") for stage in (1, 2)),
    (3, "in place", "before", "aot_eager"),
    (3, "replaced", "after", "eager"),
]
"""How models are compiled: stage, how, when, backend."""

STEPS_AND_RATES = {
    "plain": PLAIN,
    "constant": Recipe(schedule=False),
    "plain, tensor lr": Recipe(tensor_lr=True),
    "step": Recipe(compiled_step=True),
    "step, tensor lr": Recipe(compiled_step=True, tensor_lr=True),
}


def refusal(recipe: Recipe) -> str:
    """Return what dynamo says of a recipe in stage 3."""
    try:
        train(3, recipe)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return "it was compiled"


def one_graph(how: str) -> Callable[..., Any]:
    return functools.partial(HOW[how], backend="eager", fullgraph=True)


REFUSED = {
    "a model": Recipe(compiled=one_graph("in place"), when="after", root=True),
    "a module of torch's own, after its hooks": Recipe(
        build=OwnModules, compiled=one_graph("replaced"), when="after"
    ),
}


def whole_step(stage: int, compiled: bool) -> Result:
    """Train with a compiled function that holds forward, backward, clipping and
    step."""
    forget()
    run = Run(stage, world(), build=two_blocks)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = models.loss_of(run.model, tokens, targets)
        loss.backward()
        run.optimizer.clip_grad_norm_(0.1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach()

    call = torch.compile(step, backend="eager") if compiled else step
    graphs = []
    for number in range(STEPS):
        mine = (models.share(t, rank(), world()) for t in models.batch(number))
        with compiling_until_warm(number):
            run.seen.append(call(*mine))
        run.note_buffers()
        graphs.append(graphs_so_far())
    result = run.result()
    return {
        "values": {**result["params"], **result["state"]},
        "seen": result["seen"],
        "graphs": graphs,
        "buffers": result["buffers"],
    }


@functools.cache
def done() -> ranks.Cases:
    """Train with a compiled model, a compiled step, and both in one function."""
    import_compilers()
    cases: dict[Any, Callable[[], Any]] = {}
    for name, recipe in REFUSED.items():
        cases[name] = functools.partial(refusal, recipe)
    for stage in STAGES:
        for name, recipe in STEPS_AND_RATES.items():
            cases[stage, name] = functools.partial(train, stage, recipe)
        for compiled in (True, False):
            cases[stage, "whole step", compiled] = functools.partial(
                whole_step, stage, compiled
            )
    for stage, how, when, backend in MODELS:
        compile_ = functools.partial(HOW[how], backend=backend, fullgraph=stage != 3)
        recipe = Recipe(compiled=compile_, when=when, root=True)
        cases[stage, how, when, backend] = functools.partial(train, stage, recipe)
    return ranks.run_cases(WORLD, cases)


@pytest.mark.parametrize("key", MODELS, ids=lambda key: "-".join(map(str, key)))
def test_a_compiled_model_trains_as_an_uncompiled_one(key: Any) -> None:
    """One graph in stages 1 and 2. In stage 3 the units are graphs, and what is between
    them."""
    stage = key[0]
    for ours, plain in zip(done()[key], done()[stage, "plain"], strict=True):
        assert differing_values(ours, plain) == []
        assert (ours["breaks"] == 0) == (stage != 3)
        assert stays_warm(ours["graphs"])
        assert not any(ours["buffers"])


@pytest.mark.parametrize("name", REFUSED)
def test_one_graph_around_the_hooks_of_sharded_units_is_refused_by_name(
    name: str,
) -> None:
    """The limit of stage 3; the error says what to compile instead."""
    for message in done()[name]:
        assert "reason: zerokern" in message
        assert "compile each unit" in message


@in_stages
@pytest.mark.parametrize("lr", ["", ", tensor lr"])
def test_a_compiled_step_follows_the_learning_rate(lr: str, stage: int) -> None:
    """Also where the rate is a tensor that is written in place."""
    ways = (done()[stage, way] for way in ("step" + lr, "plain" + lr, "constant"))
    for ours, plain, constant in zip(*ways, strict=True):
        assert differing_values(ours, plain) == []
        assert differing(ours["values"], constant["values"]) != []
        assert stays_warm(ours["graphs"])


@in_stages
def test_a_compiled_function_may_hold_the_whole_step(stage: int) -> None:
    """Backward runs inside of it, and dynamo looks at every frame that it enters there:
    at our hooks, too."""
    compiled = done()[stage, "whole step", True]
    uncompiled = done()[stage, "whole step", False]
    for ours, plain in zip(compiled, uncompiled, strict=True):
        assert differing_values(ours, plain) == []
        assert ours["graphs"][-1] > 0
        assert stays_warm(ours["graphs"])
        assert not any(ours["buffers"])
