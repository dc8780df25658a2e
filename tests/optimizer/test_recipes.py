"""Every storage format and update rule through the whole optimizer: the same bits in
every world, stage and bucket, through checkpoints, and in the memory that they say."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import STAGES, apart, differing, quiet_state_dict, sharded, state_of, whole
from recipes import MASTERS, MOMENTS, RECIPES, Recipe, built
from torch import Tensor
from training import everything, train_by_hand

from zerokern import Precision

Case = tuple[str, Recipe]

SOME_RECIPES = [
    Recipe("fp32", "fp32", "fp32"),
    Recipe("bf16", "split24", "8bit"),
    Recipe("bf16", "none", "bf16"),
]
CASES: list[Case] = [
    *(("adamw", recipe) for recipe in RECIPES),
    *itertools.product(("adam", "sgd", "lion"), SOME_RECIPES),
]
each_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join((case[0], *case[1]))
)


# ---------------------------------------------------------------------------- same bits

SHARDINGS = [(1, 4000), (1, 2**20), (2, 64), (3, 4000)]
"""Stages and sizes of buckets."""


def run(rule: str, recipe: Recipe, stage: int, size: int) -> dict[str, Tensor]:
    """Return everything after some steps."""
    model, optimizer = built(rule, recipe, stage, size)
    train_by_hand(model, optimizer, range(4))
    return everything(model, optimizer)


@functools.cache
def in_a_world(world: int) -> ranks.Cases:
    """Return all cases of a world, run in one group."""
    return ranks.run_cases(
        world,
        {
            (case, sharding): functools.partial(run, *case, *sharding)
            for case, sharding in itertools.product(CASES, SHARDINGS)
        },
    )


@each_case
@pytest.mark.parametrize("world", ranks.worlds(2, rarely=3))
def test_neither_world_nor_stage_nor_bucket_changes_a_bit(
    case: Case, world: int
) -> None:
    """Stochastic rounding and 8-bit blocks do not see how a parameter is cut."""
    alone = run(*case, 1, 4000)
    for sharding in SHARDINGS:
        for result in in_a_world(world)[case, sharding]:
            assert differing(result, alone) == [], sharding


@each_case
def test_the_seed_decides_and_torchs_generator_is_left_alone(case: Case) -> None:
    _, (dtype, master, moments) = case
    models.toy()
    after_a_model = torch.get_rng_state()
    results = []
    for seed in (5, 5, 6):
        model, optimizer = built(*case, stage=1, seed=seed)
        train_by_hand(model, optimizer)
        assert torch.equal(torch.get_rng_state(), after_a_model)
        results.append(everything(model, optimizer))
    assert differing(results[0], results[1]) == []
    rounds_at_random = dtype == "bf16" and master in ("split24", "none")
    stochastic = moments != "fp32" or rounds_at_random
    assert bool(differing(results[0], results[2])) == stochastic


# -------------------------------------------------------------------------- checkpoints


def resumed(rule: str, recipe: Recipe, stage: int, *, full: bool) -> list[str]:
    """Save, load into a fresh optimizer, go on: return what differs from a run that was
    not interrupted."""
    model, optimizer = built(rule, recipe, stage)
    train_by_hand(model, optimizer)
    state = optimizer.full_state_dict() if full else quiet_state_dict(optimizer)
    saved = copy.deepcopy(state)
    weights = whole(model, optimizer)
    again, fresh = built(rule, recipe, stage, 700 if full else 4000)
    fresh.load_state_dict(saved)
    with fresh.full_params():
        again.load_state_dict(weights)
    train_by_hand(model, optimizer, range(3, 6))
    train_by_hand(again, fresh, range(3, 6))
    return differing(everything(again, fresh), everything(model, optimizer))


@functools.cache
def resumptions(cases: tuple[tuple[int, bool], ...]) -> ranks.Cases:
    """Return every case on two ranks."""
    return ranks.run_cases(
        2,
        {
            (case, stage, full): functools.partial(resumed, *case, stage, full=full)
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
    case: Case, cases: tuple[tuple[int, bool], ...]
) -> None:
    """In every format nothing is lost or promoted on the way through a checkpoint,
    whole or sharded."""
    assert resumed(*case, 1, full=True) == []
    assert resumed(*case, 1, full=False) == []
    for stage, full in cases:
        assert resumptions(cases)[case, stage, full] == [[], []], (stage, full)


@pytest.mark.parametrize("recipe", RECIPES, ids="-".join)
def test_torch_opens_every_checkpoint(recipe: Recipe) -> None:
    """What leaves the optimizer is in torch's layout and fp32; master weights are exact
    to the last bit held."""
    model, optimizer = built("adamw", recipe, 1)
    train_by_hand(model, optimizer)
    saved = optimizer.state_dict()
    other = models.toy().float()
    theirs = torch.optim.AdamW(other.parameters())
    theirs.load_state_dict(copy.deepcopy(saved))
    has_master = recipe.dtype == "bf16" and recipe.master != "none"
    pairs = zip(other.parameters(), model.parameters(), strict=True)
    for index, (param, mine) in enumerate(pairs):
        entry = saved["state"][index]
        assert {value.dtype for value in entry.values()} == {torch.float32}
        assert all(value.shape in ((), param.shape) for value in entry.values())
        assert torch.equal(theirs.state[param]["exp_avg"], entry["exp_avg"])
        assert ("master" in entry) == has_master
        if has_master:
            assert torch.equal(entry["master"].bfloat16(), mine)


# Precision relative to a tensor's largest element.
OF_MOMENTS = {"fp32": 0.0, "bf16": 2**-8, "8bit": 2**-5}
OF_MASTERS = {"fp32": 0.0, "split32": 2**-23, "split24": 2**-15, "none": 0.0}


@pytest.mark.parametrize(
    "recipe", [r for r in RECIPES if r.dtype == "bf16"], ids="-".join
)
def test_a_checkpoint_opens_in_every_other_recipe(recipe: Recipe) -> None:
    """What both formats can hold arrives; the rest is rounded, and training goes on."""
    model, optimizer = built("adamw", Recipe("bf16", "fp32", "fp32"), 1)
    train_by_hand(model, optimizer)
    again, other = built("adamw", recipe, 1)
    again.load_state_dict(whole(model, optimizer))
    other.load_state_dict(optimizer.state_dict())
    ours, theirs = state_of(again, other), state_of(model, optimizer)
    moments = {k: v for k, v in ours.items() if "exp_avg" in k}
    expected = {k: v for k, v in theirs.items() if "exp_avg" in k}
    assert apart(moments, expected, 2 * OF_MOMENTS[recipe.moments]) == {}
    masters = {k: v for k, v in ours.items() if k.endswith("master")}
    expected = {k: theirs[k] for k in masters}
    assert apart(masters, expected, OF_MASTERS[recipe.master]) == {}
    train_by_hand(again, other, range(3, 5))
    assert all(p.isfinite().all() for p in again.parameters())


def test_a_sharded_state_of_another_precision_is_refused() -> None:
    def refused() -> tuple[str, bool]:
        model, optimizer = built("adamw", Recipe("bf16", "split32", "8bit"), 1)
        train_by_hand(model, optimizer, range(1))
        again, other = built("adamw", Recipe("bf16", "split32", "bf16"), 1)
        train_by_hand(again, other, range(1))
        before = everything(again, other)
        with pytest.raises(ValueError, match="precision they were saved with") as error:
            other.load_state_dict(quiet_state_dict(optimizer))
        changed = differing(everything(again, other), before)
        return str(error.value), changed == []

    for text, untouched in ranks.run(2, refused):
        assert untouched and "full_state_dict" in text


# -------------------------------------------------------------------------------- bytes

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
    world = 2
    numel = sum(p.numel() for p in models.gpt().parameters())
    for found in ranks.run(world, memories):
        for (master, moments, stage), memory in found.items():
            expected = {
                "parameters": 2 * numel / (world if stage == 3 else 1),
                "gradients": 2 * numel / (1 if stage == 1 else world),
                "master": BYTES[master] * numel / world,
                "moments": 2 * MOMENT_BYTES[moments] * numel / world,
            }
            for role, size in expected.items():
                where = master, moments, stage, role
                assert getattr(memory, role) == pytest.approx(size, rel=0.03), where


# ---------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("stage", STAGES)
def test_a_bf16_gradient_shard_rounds_once(stage: int) -> None:
    """Precision(gradients=bf16): the fp32 sum over ranks is rounded to bf16, and
    nothing else changes."""

    def run_both() -> list[str]:
        results = []
        for gradients in (torch.bfloat16, torch.float32):
            model = models.toy().bfloat16()
            options = {"precision": Precision(gradients=gradients), "lr": 1e-2}
            optimizer = sharded(model, stage, max_grad_norm=0.5, **options)
            train_by_hand(model, optimizer)  # small integers: bf16 holds their sums
            results.append(everything(model, optimizer))
        return differing(*results)

    assert ranks.run(2, run_both) == [[], []]


@in_stages
def test_fp32_wire_keeps_small_bf16_gradients(stage: int) -> None:
    """256 micro-batches of 2**-9 next to one of 1, accumulated in fp32: 1.5, and
    not 1."""

    def case() -> Tensor:
        model = models.Weighted([(70,)], torch.bfloat16)
        precision = Precision(wire=torch.float32)
        optimizer = sharded(model, stage, precision=precision, betas=(0.0, 0.0))
        with optimizer.no_sync():
            for value in (1.0, *[2**-9] * 256):
                model([torch.full((70,), value)]).backward()
        optimizer.step()
        return state_of(model, optimizer)["terms.0.weight/exp_avg"]

    for result in ranks.run(2, case):
        assert torch.equal(result, torch.full((70,), 1.5))
