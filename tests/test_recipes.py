"""Every storage format and update rule through the whole optimizer: the same bits in
every world, stage and bucket."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import (
    STAGES,
    apart,
    differing,
    integer_gradient,
    quiet_state_dict,
    set_integer_gradients,
    sharded,
    state_of,
    whole,
)
from torch import Tensor

import zerokern
from zerokern import Buckets, Precision

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (zerokern.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (zerokern.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (
        zerokern.SGD,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "lion": (zerokern.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}
MASTERS, MOMENTS = ("fp32", "split32", "split24", "none"), ("fp32", "bf16", "8bit")
RECIPES = list(itertools.product(("fp32", "bf16"), MASTERS, MOMENTS))
"""Parameters' dtype, master, moments. Without the fp32 ones, where a master means
nothing."""
RECIPES = [recipe for recipe in RECIPES if recipe[0] == "bf16" or recipe[1] == "fp32"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Optimizer = Any


def built(
    rule: str, recipe: tuple[str, str, str], stage: int, size: int = 4000
) -> tuple[Any, Optimizer]:
    """Return a model in the recipe's dtype, and its optimizer."""
    dtype, master, moments = recipe
    model = models.toy().to(DTYPES[dtype])
    optimizer, options = RULES[rule]
    precision = Precision(master=master, moments=moments, seed=5)
    return model, sharded(
        model,
        stage,
        adam=optimizer,
        precision=precision,
        buckets=Buckets(bytes=size),
        **options,
    )


def trained(model: Any, optimizer: Optimizer, steps: range) -> None:
    """Train on integer gradients, whose sums are exact in any world."""
    for step in steps:
        optimizer.zero_grad()
        set_integer_gradients(model, step)
        optimizer.step()


def everything(model: Any, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return parameters and state, in fp32 as checkpoints hold it."""
    return whole(model, optimizer) | state_of(model, optimizer)


def run(
    rule: str, recipe: tuple[str, str, str], stage: int, size: int
) -> dict[str, Tensor]:
    """Return everything after some steps."""
    model, optimizer = built(rule, recipe, stage, size)
    trained(model, optimizer, range(4))
    return everything(model, optimizer)


CASES = [("adamw", *recipe) for recipe in RECIPES] + [
    (rule, *recipe)
    for rule in ("adam", "sgd", "lion")
    for recipe in (
        ("fp32", "fp32", "fp32"),
        ("bf16", "split24", "8bit"),
        ("bf16", "none", "bf16"),
    )
]
SHARDINGS = [(1, 4000), (1, 2**20), (2, 64), (3, 4000)]
each_case = pytest.mark.parametrize("case", CASES, ids="-".join)


@functools.cache
def in_a_world(world: int) -> ranks.Cases:
    """Return all cases of a world, run in one group."""
    return ranks.run_cases(
        world,
        {
            (case, sharding): functools.partial(run, case[0], case[1:], *sharding)
            for case, sharding in itertools.product(CASES, SHARDINGS)
        },
    )


@each_case
@pytest.mark.parametrize("world", ranks.worlds(2, rarely=3))
def test_neither_world_nor_stage_nor_bucket_changes_a_bit(
    case: tuple[str, ...], world: int
) -> None:
    """Rows 34 and 35, fifth opening: stochastic rounding and 8-bit blocks do not see
    how a parameter is cut."""
    alone = run(case[0], case[1:], 1, 4000)  # type: ignore[arg-type]
    for sharding in SHARDINGS:
        for result in in_a_world(world)[case, sharding]:
            assert differing(result, alone) == [], sharding


@each_case
def test_the_seed_decides_and_torchs_generator_is_left_alone(
    case: tuple[str, ...],
) -> None:
    rule, dtype, master, moments = case
    before = torch.get_rng_state()
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(0)
        model = models.toy().to(DTYPES[dtype])
        torch.set_rng_state(before)
        optimizer, options = RULES[rule]
        optimizer = optimizer(
            model.parameters(),
            precision=Precision(master=master, moments=moments, seed=seed),
            **options,
        )
        trained(model, optimizer, range(3))
        results.append(everything(model, optimizer))
    assert torch.equal(torch.get_rng_state(), before)
    assert differing(results[0], results[1]) == []
    stochastic = moments != "fp32" or (
        dtype == "bf16" and master in ("split24", "none")
    )
    assert bool(differing(results[0], results[2])) == stochastic


# ---------------------------------------------------------------------- state


def resumed(
    rule: str, recipe: tuple[str, str, str], stage: int, *, full: bool
) -> list[str]:
    """Save, load into a fresh optimizer, go on: return what differs from a run that was
    not interrupted."""
    model, optimizer = built(rule, recipe, stage)
    trained(model, optimizer, range(3))
    saved = copy.deepcopy(
        optimizer.full_state_dict() if full else quiet_state_dict(optimizer)
    )
    weights = whole(model, optimizer)
    again, fresh = built(rule, recipe, stage, 700 if full else 4000)
    fresh.load_state_dict(saved)
    with fresh.full_params():
        again.load_state_dict(weights)
    trained(model, optimizer, range(3, 6))
    trained(again, fresh, range(3, 6))
    return differing(everything(again, fresh), everything(model, optimizer))


@functools.cache
def resumptions(cases: tuple[tuple[int, bool], ...]) -> ranks.Cases:
    """Return every case on two ranks."""
    return ranks.run_cases(
        2,
        {
            (case, stage, full): functools.partial(
                resumed, case[0], case[1:], stage, full=full
            )
            for case, (stage, full) in itertools.product(CASES, cases)
        },
    )


@pytest.mark.parametrize(
    "cases",
    [
        ((1, True), (3, False)),
        pytest.param(((1, False), (3, True)), marks=pytest.mark.long),
    ],
    ids=[
        "whole of stage 1, sharded of stage 3",
        "sharded of stage 1, whole of stage 3",
    ],
)
@each_case
def test_a_resumed_run_is_an_uninterrupted_one(
    case: tuple[str, ...], cases: tuple[tuple[int, bool], ...]
) -> None:
    """Rows 24 and 25, every format: nothing is lost or promoted on the way through a
    checkpoint, whole or sharded."""
    assert resumed(case[0], case[1:], 1, full=True) == []  # type: ignore[arg-type]
    assert resumed(case[0], case[1:], 1, full=False) == []  # type: ignore[arg-type]
    for stage, full in cases:
        assert resumptions(cases)[case, stage, full] == [[], []], (stage, full)


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_torch_opens_every_checkpoint(recipe: tuple[str, str, str]) -> None:
    """What leaves the optimizer is in torch's layout and fp32; master weights are exact
    to the last bit held."""
    model, optimizer = built("adamw", recipe, 1)
    trained(model, optimizer, range(3))
    saved = optimizer.state_dict()
    other = models.toy().float()
    theirs = torch.optim.AdamW(other.parameters())
    theirs.load_state_dict(copy.deepcopy(saved))
    for index, (param, mine) in enumerate(
        zip(other.parameters(), model.parameters(), strict=True)
    ):
        entry = saved["state"][index]
        assert {value.dtype for value in entry.values()} == {torch.float32}
        assert all(value.shape in ((), param.shape) for value in entry.values())
        assert torch.equal(theirs.state[param]["exp_avg"], entry["exp_avg"])
        assert ("master" in entry) == (recipe[0] == "bf16" and recipe[1] != "none")
        if "master" in entry:
            assert torch.equal(entry["master"].bfloat16(), mine)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r[0] == "bf16"], ids="-".join)
def test_a_checkpoint_opens_in_every_other_recipe(recipe: tuple[str, str, str]) -> None:
    """What both formats can hold arrives; the rest is rounded, and training goes on."""
    model, optimizer = built("adamw", ("bf16", "fp32", "fp32"), 1)
    trained(model, optimizer, range(3))
    again, other = built("adamw", recipe, 1)
    again.load_state_dict(whole(model, optimizer))
    other.load_state_dict(optimizer.state_dict())
    ours, theirs = state_of(again, other), state_of(model, optimizer)
    # Of a tensor's largest element.
    limit = {"fp32": 0.0, "bf16": 2**-8, "8bit": 2**-5}[recipe[2]]
    assert (
        apart(
            {k: v for k, v in ours.items() if "exp_avg" in k},
            {k: v for k, v in theirs.items() if "exp_avg" in k},
            2 * limit,
        )
        == {}
    )
    masters = {k: v for k, v in ours.items() if k.endswith("master")}
    precision = {"fp32": 0.0, "split32": 2**-23, "split24": 2**-15, "none": 0.0}[
        recipe[1]
    ]
    assert apart(masters, {k: theirs[k] for k in masters}, precision) == {}
    trained(again, other, range(3, 5))
    assert all(p.isfinite().all() for p in again.parameters())


def test_a_sharded_state_of_another_precision_is_refused() -> None:
    def refused() -> tuple[str, bool]:
        model, optimizer = built("adamw", ("bf16", "split32", "8bit"), 1)
        trained(model, optimizer, range(1))
        again, other = built("adamw", ("bf16", "split32", "bf16"), 1)
        trained(again, other, range(1))
        before = everything(again, other)
        with pytest.raises(ValueError, match="precision they were saved with") as error:
            other.load_state_dict(quiet_state_dict(optimizer))
        return str(error.value), differing(everything(again, other), before) == []

    assert all(
        untouched and "full_state_dict" in text
        for text, untouched in ranks.run(2, refused)
    )


# ----------------------------------------------------- weights that somebody else wrote


@pytest.mark.parametrize("master", MASTERS)
def test_weights_written_from_outside_reach_the_master(master: str) -> None:
    """Also 0 and infinity, beside which stale low bits would make a NaN."""
    model, optimizer = built("adamw", ("bf16", master, "8bit"), 1)
    trained(model, optimizer, range(3))
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    masters = state_of(model, optimizer)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(-0.0)
        model.embedding.weight.fill_(3.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    trained(model, optimizer, range(3, 4))
    for name, param in model.named_parameters():
        if name.startswith("blocks"):
            assert torch.equal(param, kept[name])
    assert not model.head.weight.any() and not model.head.bias.any()
    assert (model.embedding.weight == 3.0).all()
    after = state_of(model, optimizer)
    for name in masters:
        if name.endswith("master") and name.startswith("blocks"):
            assert torch.equal(after[name], masters[name]), (
                "untouched weights keep their low bits"
            )


# ---------------------------------------------------------------------- bytes

BYTES = {"fp32": 4.0, "split32": 2.0, "split24": 1.0, "none": 0.0}
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 1 / 64}


def memories() -> dict[tuple[str, str, int], Any]:
    """Return what a rank holds under each recipe and stage, and the elements of the
    model."""
    found: dict[tuple[str, str, int], Any] = {}
    for master, moments, stage in itertools.product(MASTERS, MOMENTS, STAGES):
        model = models.gpt().bfloat16()
        precision = Precision(master=master, moments=moments, gradients=torch.bfloat16)
        optimizer = sharded(model, stage, precision=precision)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        found[master, moments, stage] = optimizer.memory()
    return found


def test_memory_is_what_the_formats_say() -> None:
    numel, world = sum(p.numel() for p in models.gpt().parameters()), 2
    for found in ranks.run(world, memories):
        for (master, moments, stage), memory in found.items():
            expected = {
                "parameters": 2 * numel / (world if stage == 3 else 1),
                "gradients": 2 * numel / (1 if stage == 1 else world),
                "master": BYTES[master] * numel / world,
                "moments": 2 * MOMENT_BYTES[moments] * numel / world,
            }
            for role, size in expected.items():
                assert getattr(memory, role) == pytest.approx(size, rel=0.03), (
                    master,
                    moments,
                    stage,
                    role,
                )


@pytest.mark.parametrize("stage", STAGES)
def test_a_bf16_gradient_shard_rounds_once(stage: int) -> None:
    """Precision(gradients=bf16): the fp32 sum over ranks is rounded to bf16, and
    nothing else changes."""

    def run_both() -> list[str]:
        results = []
        for gradients in (torch.bfloat16, torch.float32):
            model = models.toy().bfloat16()
            optimizer = sharded(
                model,
                stage,
                lr=1e-2,
                precision=Precision(gradients=gradients),
                max_grad_norm=0.5,
            )
            trained(model, optimizer, range(3))  # small integers: bf16 holds their sums
            results.append(everything(model, optimizer))
        return differing(*results)

    assert ranks.run(2, run_both) == [[], []]


# ------------------------------------------------------------------ rules against torch

AGAINST_TORCH: dict[
    str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]
] = {
    "adamw amsgrad": (
        zerokern.AdamW,
        torch.optim.AdamW,
        {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1},
    ),
    "adam amsgrad maximize": (
        zerokern.Adam,
        torch.optim.Adam,
        {"lr": 1e-2, "amsgrad": True, "maximize": True},
    ),
    "sgd": (zerokern.SGD, torch.optim.SGD, {"lr": 1e-2}),
    "sgd decay": (zerokern.SGD, torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd momentum": (zerokern.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "sgd dampening": (
        zerokern.SGD,
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5},
    ),
    "sgd nesterov maximize": (
        zerokern.SGD,
        torch.optim.SGD,
        {
            "lr": 1e-2,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0.1,
            "maximize": True,
        },
    ),
}


def same_as_torch(name: str, stage: int) -> dict[str, float]:
    """Train ours on each rank's gradients, torch's on their mean; return what is
    apart."""
    ours, theirs, options = AGAINST_TORCH[name]
    model, other = models.toy(), models.toy()
    optimizer = sharded(model, stage, adam=ours, **options)
    reference = theirs(other.parameters(), **options)
    for step in range(6):
        optimizer.zero_grad()
        set_integer_gradients(model, step)
        for index, (p, gradient) in enumerate(
            zip(other.parameters(), gradients(model, step), strict=True)
        ):
            p.grad = gradient
            if step == 2 and index == 1:  # one parameter without a gradient for a step
                p.grad = list(model.parameters())[1].grad = None
        optimizer.step()
        reference.step()
    saved = optimizer.full_state_dict()
    found = whole(model, optimizer)
    reference.load_state_dict(saved)  # what torch would go on with
    return apart(found, {n: p.detach() for n, p in other.named_parameters()})


def gradients(model: Any, step: int) -> list[Tensor]:
    """Return the mean gradients over the ranks."""
    alone = models.toy()
    for index, param in enumerate(alone.parameters()):
        param.grad = integer_gradient(param.shape, step, index, 0, 1)
    return [p.grad for p in alone.parameters()]  # type: ignore[misc]


@functools.cache
def against_torch() -> ranks.Cases:
    """Return every rule and stage on two ranks."""
    cases = itertools.product(AGAINST_TORCH, STAGES)
    return ranks.run_cases(
        2, {case: functools.partial(same_as_torch, *case) for case in cases}
    )


@pytest.mark.parametrize("name", AGAINST_TORCH)
@pytest.mark.parametrize("stage", STAGES)
def test_rules_are_those_of_torch(name: str, stage: int) -> None:
    assert same_as_torch(name, 1) == {}
    assert against_torch()[name, stage] == [{}, {}]


@pytest.mark.parametrize("name", AGAINST_TORCH)
def test_states_come_and_go_to_torch(name: str) -> None:
    """Torch's checkpoint goes on in ours: momentum is not dampened as if it were new,
    maxima are kept."""
    ours, theirs, options = AGAINST_TORCH[name]
    model = models.toy()
    reference = theirs(model.parameters(), **options)
    for step in range(3):
        set_integer_gradients(model, step)
        reference.step()
    other = copy.deepcopy(model)
    optimizer = ours(other.parameters(), **options)
    optimizer.load_state_dict(reference.state_dict())
    for step in range(3, 6):
        set_integer_gradients(model, step)
        set_integer_gradients(other, step)
        reference.step()
        optimizer.step()
    assert (
        apart(
            whole(other, optimizer),
            {n: p.detach() for n, p in model.named_parameters()},
        )
        == {}
    )


def test_sgd_without_momentum_has_no_state() -> None:
    model = models.toy().bfloat16()
    optimizer = zerokern.SGD(model.parameters(), precision=Precision(master="none"))
    trained(model, optimizer, range(2))
    assert optimizer.memory().moments == optimizer.memory().master == 0
    with pytest.raises(ValueError, match=r"momentum=0\.9 was set after construction"):
        optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.step()
