"""torch.compile around our hooks: whole graphs per unit, no recompilation, the bits of
the uncompiled run (I1 to I5).

What is compiled is a unit: in place or replaced, before the optimizer is built or
after. Around units there is no one graph in stage 3, where parameters come and go
between them: a compiled model works, in pieces.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import STAGES, Run, differing, world
from torch import nn
from torch._dynamo.utils import counters

import zerokern

pytestmark = pytest.mark.filterwarnings(
    # dynamo looks at .grad of whatever it traces
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    # a reentrant checkpoint says so of an evaluation
    "ignore:None of the inputs have requires_grad",
)
WORLD = 2
WARM_UP, STEPS = 2, 7
Compile = Callable[[nn.Module], nn.Module]
Result = dict[str, Any]


def _replaced(module: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(module, **options)  # type: ignore[return-value]


def _in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(**options)
    return module


HOW: dict[str, Callable[..., nn.Module]] = {
    "replaced": _replaced,
    "in place": _in_place,
}
WHEN = ("before", "after")
BACKENDS = ("eager", "aot_eager")


def compile_units(model: nn.Module, compiled: Compile) -> None:
    """Compile each block on its own."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(block)


def train(
    stage: int,
    *,
    build: Callable[[], nn.Module] = models.toy,
    compiled: Compile | None = None,
    when: str = "before",
    root: bool = False,
    compiled_step: bool = False,
    tensor_lr: bool = False,
    schedule: bool = True,
    checkpoint: bool | None = None,
    late: bool = False,
    steps: int = STEPS,
    **options: Any,
) -> Result:
    """Train with accumulation, evaluation between steps and a learning rate that
    changes.

    Args:
        stage: of the optimizer.
        build: makes the model.
        compiled: compiles a module; None: nothing is compiled.
        when: compile before or after the optimizer is built.
        root: compile the model and not its blocks.
        compiled_step: compile `optimizer.step` too.
        tensor_lr: the learning rate is a tensor, written in place.
        schedule: False: the learning rate stays.
        checkpoint: recompute blocks in backward, as of `models.Forked`.
        late: parameters are gathered while the next forward runs.
        steps: of training.
        options: of the optimizer.
    """
    torch._dynamo.reset()
    counters.clear()

    def change(model: nn.Module) -> nn.Module:
        if compiled is None:
            return model
        if root:
            return compiled(model)
        compile_units(model, compiled)
        return model

    torch.manual_seed(0)
    model = change(build()) if when == "before" else build()
    if late:
        options["adam"] = functools.partial(zerokern.AdamW, model=model)
        options["buckets"] = zerokern.Buckets(gather_in_forward=True)
    run = Run(
        stage,
        world(),
        build=lambda: model,
        lr=torch.tensor(1e-2) if tensor_lr else 1e-2,
        **options,
    )
    run.model.checkpoint = checkpoint
    if when == "after":
        run.model = change(run.model)
    if compiled_step:
        run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")
    graphs = []
    for step in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=step >= WARM_UP):
            _one_step(run, step, 1e-2 / (1 + step) if schedule else 1e-2)
        graphs.append(counters["stats"]["unique_graphs"])
    result = run.result()
    return {
        "values": {
            _plain(name): value
            for name, value in {**result["params"], **result["state"]}.items()
        },
        "seen": result["seen"],
        "buffers": result["buffers"],
        "graphs": graphs,
        "breaks": sum(counters["graph_break"].values()),
        "log": [call[:6] for call in result["log"]],
    }


def _one_step(run: Run, step: int, lr: float) -> None:
    for group in run.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    run.optimizer.zero_grad()
    with run.no_sync():
        run.backward(10 * step)
    run.backward(10 * step + 1)
    run.evaluate(10 * step + 2)
    run.step()


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def same_values(ours: Result, plain: Result) -> list[str]:
    """Return which parameters, states and losses differ."""
    return differing(
        {**ours["values"], **ours["seen"]}, {**plain["values"], **plain["seen"]}
    )


def bf16() -> nn.Module:
    """Return a model that has master weights."""
    return models.toy(blocks=2).bfloat16()


class OwnModules(nn.Module):
    """Units whose forward is torch's own, which dynamo enters in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(17, 17), nn.GELU(), nn.LayerNorm(17))
            for _ in range(2)
        )
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


KINDS: dict[str, dict[str, Any]] = {
    "toy": {"build": functools.partial(models.toy, blocks=2)},
    "bf16": {"build": bf16},
    "checkpoint": {"build": models.forked, "checkpoint": False},
    "reentrant": {"build": models.forked, "checkpoint": True},
    "torch's own": {"build": OwnModules},
    "ten blocks": {"build": functools.partial(models.toy, blocks=10), "steps": 3},
    "late": {"build": functools.partial(models.toy, blocks=2), "late": True},
}
"""What is trained. Ten are more than dynamo compiles of one function (its limit is 8):
units must share a graph."""


def _way(kind: str) -> tuple[str, str]:
    # Without hooks torch finds nothing to compile in a module of its own that is
    # compiled in place.
    return ("replaced", "before") if kind == "torch's own" else ("in place", "after")


HOOKED = tuple(kind for kind in KINDS if kind not in ("toy", "late"))
QUICK = [
    *(("toy", stage, "in place", "after", "aot_eager") for stage in STAGES),
    ("toy", 3, "in place", "before", "eager"),
    ("toy", 3, "replaced", "after", "eager"),
    ("toy", 3, "replaced", "before", "aot_eager"),
    *((kind, 3, *_way(kind), "eager") for kind in HOOKED if kind != "reentrant"),
    ("late", 2, "in place", "after", "eager"),
]
EVERY = [
    *itertools.product(["toy"], STAGES, HOW, WHEN, BACKENDS),
    *(
        (kind, stage, *_way(kind), backend)
        for kind in HOOKED
        for stage in STAGES
        for backend in BACKENDS
    ),
    *itertools.product(["late"], (1, 2), HOW, WHEN, BACKENDS),
]
SLOW = [key for key in EVERY if key not in QUICK]


def _unit_case(key: Any) -> Callable[[], Result]:
    kind, stage, how, when, backend = key
    compiled = functools.partial(HOW[how], backend=backend, fullgraph=True)
    return functools.partial(train, stage, compiled=compiled, when=when, **KINDS[kind])


@functools.cache
def _warm() -> None:
    """Import here what ranks would import each for itself: they are forked from this
    process."""
    torch.compile(torch.sin, backend="aot_eager")(
        torch.ones(2, requires_grad=True)
    ).sum().backward()


@functools.cache
def units(keys: tuple[Any, ...]) -> ranks.Cases:
    """Train some cases, and the same uncompiled."""
    _warm()
    plain = {
        (*key[:2], "plain"): functools.partial(train, key[1], **KINDS[key[0]])
        for key in keys
    }
    return ranks.run_cases(WORLD, {**plain, **{key: _unit_case(key) for key in keys}})


def unit(key: Any) -> tuple[list[Result], list[Result]]:
    """Return what a case came to on each rank, and what it does uncompiled."""
    cases = units(
        tuple(QUICK if key in QUICK else [k for k in SLOW if k[:2] == key[:2]])
    )
    return cases[key], cases[(*key[:2], "plain")]


of_units = pytest.mark.parametrize(
    "key",
    [*QUICK, *(pytest.param(key, marks=pytest.mark.long) for key in SLOW)],
    ids=lambda key: "-".join(map(str, key)),
)


@of_units
def test_compiled_units_train_as_uncompiled_ones_bit_for_bit(key: Any) -> None:
    """I1 (pytorch#161153), I4 (pytorch PR#181924): each unit is one whole graph, and
    hooks do not break it."""
    for ours, plain in zip(*unit(key), strict=True):
        assert same_values(ours, plain) == []
        assert ours["breaks"] == 0
        assert ours["log"] == plain["log"]
        assert not any(ours["buffers"])


@of_units
def test_nothing_is_compiled_after_the_warm_up(key: Any) -> None:
    """I3 (pytorch#138813): gathered storage that comes and goes is no reason to compile
    again."""
    for result in unit(key)[0]:
        assert result["graphs"][WARM_UP:] == [result["graphs"][WARM_UP - 1]] * (
            len(result["graphs"]) - WARM_UP
        )


def test_all_units_share_one_graph() -> None:
    """I3: hooks of each unit's own do not make it a function of its own, so the depth
    of a model does not matter."""
    two, ten = (
        unit(("toy", 3, "in place", "before", "eager"))[0],
        unit(("ten blocks", 3, *_way(""), "eager"))[0],
    )
    for shallow, deep in zip(two, ten, strict=True):
        assert deep["graphs"][-1] == shallow["graphs"][-1] > 0


@pytest.mark.long
# Inductor imports what torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
def test_inductor_agrees(stage: int) -> None:
    """Generated C++ fuses what torch does apart, so sums are close and not the same."""
    compiled = functools.partial(_in_place, backend="inductor", fullgraph=True)
    options = {**KINDS["toy"], "steps": 4}
    cases = {
        "plain": functools.partial(train, stage, **options),
        "before": functools.partial(
            train, stage, compiled=compiled, when="before", **options
        ),
        "after": functools.partial(
            train, stage, compiled=compiled, when="after", **options
        ),
    }
    results = ranks.run_cases(WORLD, cases)
    for when in WHEN:
        for ours, plain in zip(results[when], results["plain"], strict=True):
            for name, value in plain["values"].items():
                torch.testing.assert_close(
                    ours["values"][name], value, rtol=1e-4, atol=2e-5, msg=name
                )
            assert ours["breaks"] == 0
            assert len(set(ours["graphs"][WARM_UP - 1 :])) == 1


# ---------------------------------------------------------------------- around units

TOY = functools.partial(models.toy, blocks=2)
ROOT_WAYS = [
    *((stage, "in place", "before", "eager") for stage in (1, 2)),
    (3, "in place", "before", "aot_eager"),
    (3, "replaced", "after", "eager"),
]


def _refused(how: str, when: str, root: bool, **options: Any) -> str:
    compiled = functools.partial(HOW[how], backend="eager", fullgraph=True)
    try:
        train(3, compiled=compiled, when=when, root=root, **options)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return "it was compiled"


REFUSED = {
    "a model": functools.partial(_refused, "in place", "after", True, build=TOY),
    "a module of torch's own, after its hooks": functools.partial(
        _refused, "replaced", "after", False, build=OwnModules
    ),
}


def whole_step(stage: int, compiled: bool) -> Result:
    """Train with a compiled function that holds forward, backward, clipping and
    step."""
    torch._dynamo.reset()
    counters.clear()
    run = Run(stage, world(), build=TOY)

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
        with torch._dynamo.config.patch(error_on_recompile=number >= WARM_UP):
            run.seen.append(
                call(
                    *(
                        models.share(t, dist.get_rank(), world())
                        for t in models.batch(number)
                    )
                )
            )
        run.note_buffers()
        graphs.append(counters["stats"]["unique_graphs"])
    result = run.result()
    return {
        "values": {**result["params"], **result["state"]},
        "seen": result["seen"],
        "graphs": graphs,
        "buffers": result["buffers"],
    }


def _root_cases() -> dict[Any, Callable[[], Any]]:
    cases: dict[Any, Callable[[], Any]] = dict(REFUSED.items())
    for stage in STAGES:
        trained = functools.partial(train, stage, build=TOY)
        cases[stage, "plain"] = trained
        cases[stage, "constant"] = functools.partial(trained, schedule=False)
        cases[stage, "plain, tensor lr"] = functools.partial(trained, tensor_lr=True)
        cases[stage, "step"] = functools.partial(trained, compiled_step=True)
        cases[stage, "step, tensor lr"] = functools.partial(
            trained, compiled_step=True, tensor_lr=True
        )
        for compiled in (True, False):
            cases[stage, "whole step", compiled] = functools.partial(
                whole_step, stage, compiled
            )
    for stage, how, when, backend in ROOT_WAYS:
        compiled = functools.partial(HOW[how], backend=backend, fullgraph=stage != 3)
        cases[stage, how, when, backend] = functools.partial(
            train, stage, build=TOY, compiled=compiled, when=when, root=True
        )
    return cases


@functools.cache
def roots() -> ranks.Cases:
    """Train with a compiled model, a compiled step, and both in one function."""
    _warm()
    return ranks.run_cases(WORLD, _root_cases())


in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


@pytest.mark.parametrize("key", ROOT_WAYS, ids=lambda key: "-".join(map(str, key)))
def test_a_compiled_model_trains_as_an_uncompiled_one(key: Any) -> None:
    """One graph in stages 1 and 2. In stage 3 the units are graphs, and what is between
    them."""
    stage = key[0]
    for ours, plain in zip(roots()[key], roots()[stage, "plain"], strict=True):
        assert same_values(ours, plain) == []
        assert (ours["breaks"] == 0) == (stage != 3)
        assert len(set(ours["graphs"][WARM_UP - 1 :])) == 1
        assert not any(ours["buffers"])


@pytest.mark.parametrize("name", REFUSED)
def test_one_graph_around_the_hooks_of_sharded_units_is_refused_by_name(
    name: str,
) -> None:
    """I4: the limit of stage 3; the error says what to compile instead."""
    for message in roots()[name]:
        assert "reason: zerokern" in message
        assert "compile each unit" in message


@in_stages
@pytest.mark.parametrize("lr", ["", ", tensor lr"])
def test_a_compiled_step_follows_the_learning_rate(lr: str, stage: int) -> None:
    """I5: also where the rate is a tensor that is written in place."""
    ways = (roots()[stage, way] for way in ("step" + lr, "plain" + lr, "constant"))
    for ours, plain, constant in zip(*ways, strict=True):
        assert same_values(ours, plain) == []
        assert differing(ours["values"], constant["values"]) != []
        assert len(set(ours["graphs"][WARM_UP - 1 :])) == 1


@in_stages
def test_a_compiled_function_may_hold_the_whole_step(stage: int) -> None:
    """Backward runs inside of it, and dynamo looks at every frame that it enters there:
    at our hooks, too."""
    for ours, plain in zip(
        *(roots()[stage, "whole step", compiled] for compiled in (True, False)),
        strict=True,
    ):
        assert same_values(ours, plain) == []
        assert ours["graphs"][-1] > 0
        assert len(set(ours["graphs"][WARM_UP - 1 :])) == 1
        assert not any(ours["buffers"])
