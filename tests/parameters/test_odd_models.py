"""Models that flat buffers find hard: tied, scalar, empty, strided, mixed, tiny,
frozen, grouped, odd outputs."""

from __future__ import annotations

import functools
import itertools

import pytest
import ranks
import torch
from marks import in_stages, in_stages_1_and_2
from odd_models import MODELS, reference, train
from oracle import STAGES, apart, differing
from torch import nn

import zerokern
from zerokern import Precision


@functools.cache
def trained(at: int) -> ranks.Cases:
    """Train every model in every stage on one group of ranks."""
    cases = itertools.product(MODELS, STAGES)
    return ranks.run_cases(at, {c: functools.partial(train, *c) for c in cases})


at_worlds = pytest.mark.parametrize("at", ranks.worlds(1, 2, rarely=4))
of_models = pytest.mark.parametrize("name", MODELS)


@at_worlds
@in_stages
@of_models
def test_trains_like_torch(name: str, stage: int, at: int) -> None:
    """On every rank, and something did change."""
    expected = reference(name, at)
    # bf16 gradients are rounded on each rank before they are averaged; the first
    # differing bit is 2**-8 of them.
    limit = 2e-2 if name == "mixed_dtypes" else 1e-5
    for result in trained(at)[name, stage]:
        assert apart(result["params"], expected["params"], limit) == {}
        assert differing(result["params"], result["start"]) != []


@at_worlds
@in_stages
@of_models
def test_shapes_dtypes_and_objects_stay(name: str, stage: int, at: int) -> None:
    """p.shape is truthful while a parameter is sharded."""
    for result in trained(at)[name, stage]:
        assert result["attributes"]


@at_worlds
@in_stages
@of_models
def test_state_has_the_shapes_of_torch(name: str, stage: int, at: int) -> None:
    """The state of a scalar is a scalar. Parameters that never had a gradient have
    steps of 0."""
    expected = reference(name, at)
    for result in trained(at)[name, stage]:
        assert expected["state"].keys() <= result["state"].keys()
        for key, value in expected["state"].items():
            assert result["state"][key].shape == value.shape
            if key.endswith("/step"):
                assert result["state"][key] == value
        for key in result["state"].keys() - expected["state"].keys():
            assert key.endswith("/master") or not result["state"][key].any()


@at_worlds
@in_stages
@of_models
def test_no_scratch_memory_stays(name: str, stage: int, at: int) -> None:
    for result in trained(at)[name, stage]:
        assert result["buffers"] == 0


@at_worlds
@in_stages
@pytest.mark.parametrize(
    "name",
    ["frozen_unit", "frozen_first_unit", "partly_frozen_unit", "frozen_integers"],
)
def test_frozen_parameters_keep_their_bits(name: str, stage: int, at: int) -> None:
    params = MODELS[name]().named_parameters()
    frozen = {n for n, p in params if not p.requires_grad}
    for result in trained(at)[name, stage]:
        changed = differing(result["params"], result["start"])
        with_state = {key.rsplit("/")[0] for key in result["state"]}
        assert not frozen & set(changed)
        assert not frozen & with_state


@pytest.mark.parametrize("name", ["transposed", "channels_last"])
@in_stages_1_and_2
def test_dense_strides_stay(name: str, stage: int) -> None:
    assert trained(2)[name, stage][0]["strides"] == {
        n: p.stride() for n, p in MODELS[name]().named_parameters()
    }


@at_worlds
@in_stages
def test_module_buffers_are_untouched(stage: int, at: int) -> None:
    for result in trained(at)["buffers", stage]:
        assert result["module_buffers"]["units.0.count"] == 3
        assert result["module_buffers"]["units.0.mask"].dtype == torch.bool


COARSE = Precision(master="split24", moments="8bit")


@pytest.mark.parametrize("precision", [Precision(), COARSE], ids=str)
def test_a_strided_parameter_on_the_cpu_is_updated_in_place(
    precision: Precision,
) -> None:
    dtype = torch.float32 if precision == Precision() else torch.bfloat16
    for strided in (
        torch.randn(8, 6).t(),
        torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    ):
        param = nn.Parameter(strided.to(dtype))
        flat = nn.Parameter(param.detach().contiguous().clone())
        before = param.detach().clone()
        gradient = torch.linspace(-1, 1, param.numel())
        for one in (param, flat):
            optimizer = zerokern.AdamW([one], lr=0.1, precision=precision)
            one.grad = gradient.view(one.shape).to(dtype)
            optimizer.step()
        assert (param != before).any()
        # The order of elements in memory decides about random bits.
        if precision == Precision():
            assert torch.equal(param, flat)
        else:
            torch.testing.assert_close(param, flat, rtol=2**-6, atol=1e-3)
