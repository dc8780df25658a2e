"""The recipes of the benchmarks, shards of them, and the cases of `pytest bench/`."""

from __future__ import annotations

import pytest
import torch

from bench import cases, gpu, recipes, shards
from bench.recipes import RECIPES, Unavailable
from zerokern import ops

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))


def test_floors_are_those_of_the_survey() -> None:
    floors = {name: recipe.update_bytes for name, recipe in RECIPES.items()}
    assert floors == {
        "fp32": 28,
        "master32": 30,
        "split32": 26,
        "split32+bf16": 18,
        "split32+8bit": 14.0625,
        "split24+8bit": 12.0625,
        "bf16+8bit": 10.0625,
        "lion fp32": 20,
        "sgd fp32": 20,
    }
    assert RECIPES["fp32"].step_bytes == 32 and RECIPES["master32"].step_bytes == 32


@each_recipe
def test_a_shard_has_the_bytes_of_its_recipe(recipe: recipes.Recipe) -> None:
    step = shards.Step.of(recipe, 2**13, "cpu", "torch")
    held = sum(tensor.nbytes for tensor in (*step.shard.tensors(), step.grad))
    assert held == recipe.state_bytes * 2**13


@each_recipe
def test_a_step_changes_every_parameter(recipe: recipes.Recipe) -> None:
    step = shards.Step.of(recipe, 2**13, "cpu", "torch")
    step.set(lr=1e-2)
    copy = step.copy()
    step.clipped_step()
    # The eleventh step formed the first table, this is the twelfth.
    assert bool((step.steps == 12).all())
    for first, end, _, _ in step.columns.runs:
        inside = slice(first * ops.BLOCK, end * ops.BLOCK)
        assert not torch.equal(step.shard.param[inside], copy.shard.param[inside])
    copy.clipped_step()
    assert all(map(torch.equal, step.tensors(), copy.tensors()))


def test_sizes_and_recipes_are_read_from_the_command_line() -> None:
    options = gpu.arguments(
        ["--sizes", "1,0.0001,1024", "--recipes", "fp32, split24+8bit", "--quick"]
    )
    assert recipes.mebi(options.sizes) == [2**20, 64, 2**30] and options.quick
    assert [recipe.name for recipe in recipes.select(options.recipes)] == [
        "fp32",
        "split24+8bit",
    ]
    assert recipes.mebi(gpu.arguments([]).sizes) == [2**20, 2**24, 2**26, 2**28, 2**30]
    assert recipes.select(None) == list(RECIPES.values())
    with pytest.raises(SystemExit, match="fp31"):
        recipes.select("fp31")


def test_every_case_of_the_microbenchmarks_can_be_built() -> None:
    for op in cases.MAKERS:
        there = {(recipe, provider) for recipe, provider, _ in cases.every(op)}
        for recipe, provider in there:
            try:
                case = cases.make(op, recipe, provider, 2**12)
            except Unavailable:
                continue
            case.run()
            assert case.moved == case.bytes_per_element * 2**12
