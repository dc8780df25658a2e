"""Models, groups and meshes that are refused at construction, which leaves the model as
it was."""

from __future__ import annotations

from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from marks import in_stages
from oracle import rank
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import zerokern


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3},
        {"stage": 7},
        {"lr": -1.0},
        {"differentiable": True},
        {"betas": (2.0, 0.0)},
    ],
    ids=str,
)
def test_a_refused_construction_leaves_the_model_as_it_was(
    options: dict[str, Any],
) -> None:
    """No hook, no flat buffer, no other values; an older optimizer goes on."""
    model = models.toy()
    older = zerokern.AdamW(model.parameters(), lr=1e-2)
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError):
        zerokern.AdamW(model.parameters(), **options)
    assert [p.data_ptr() for p in model.parameters()] == places
    models.loss_of(model, *models.batch(0)).backward()
    older.step()
    assert all(entry["step"] == 1 for entry in older.state_dict()["state"].values())


def test_stage3_parameters_must_be_of_the_model() -> None:
    def case() -> str:
        model = models.toy()
        params = [*model.parameters(), nn.Parameter(torch.ones(3))]
        with pytest.raises(ValueError, match="not in model") as error:
            zerokern.AdamW(params, stage=3, model=model)
        return str(error.value)

    assert ranks.run(2, case)[0].startswith("1 parameters")


class Forwarding(DistributedDataParallel):
    """As many projects have it: a wrapper that shows the module's own attributes."""


@in_stages
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, Forwarding])
def test_a_model_in_ddp_is_refused_until_it_is_out(
    stage: int, wrapper: type[nn.Module]
) -> None:
    message = r"wrapped in DistributedDataParallel.*ddp\.module"

    def case() -> None:
        model = models.toy()
        wrapped: nn.Module | None = wrapper(model)
        for given in (model, wrapped):
            with pytest.raises(ValueError, match=message):
                zerokern.AdamW(model.parameters(), stage=stage, model=given)
        wrapped = given = None
        optimizer = zerokern.AdamW(model.parameters(), stage=stage, model=model)
        model(torch.ones(2, 20, dtype=torch.int64)).sum().backward()
        optimizer.step()

    ranks.run(2, case)


def one() -> list[nn.Parameter]:
    """Return one good parameter."""
    return [nn.Parameter(torch.ones(3))]


def test_both_group_and_mesh_are_refused() -> None:
    def case() -> None:
        mesh = dist.init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match="process_group and mesh"):
            zerokern.AdamW(one(), process_group=mesh.get_group(), mesh=mesh)

    ranks.run(2, case)


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    def case() -> None:
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match=r"2 dimensions.*mesh\['dp'\]"):
            zerokern.AdamW(one(), mesh=mesh)

    ranks.run(2, case)


def test_a_group_without_this_rank_is_refused() -> None:
    def case() -> None:
        group = dist.new_group([0])
        if rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                zerokern.AdamW(one(), process_group=group)

    ranks.run(2, case)


def _refusal_of_dtensors(stage: int, frozen: bool) -> tuple[str, bool]:
    """Return the error, and whether the other parameters are where they were."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = models.toy(blocks=1)
    local = model.head.weight.detach().clone()
    weight = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    model.head.weight = nn.Parameter(weight, requires_grad=not frozen)
    others = [p for n, p in model.named_parameters() if n != "head.weight"]
    places = [p.data_ptr() for p in others]
    params = others if frozen else list(model.parameters())
    with pytest.raises(ValueError) as error:
        zerokern.AdamW(params, stage=stage, model=model if stage == 3 else None)
    others = [p for n, p in model.named_parameters() if n != "head.weight"]
    return str(error.value), [p.data_ptr() for p in others] == places


@pytest.mark.parametrize(
    ("stage", "frozen"), [(1, False), (2, False), (3, False), (3, True)]
)
def test_tensor_parallel_parameters_are_refused_by_name(
    stage: int, frozen: bool
) -> None:
    """Also frozen ones, which stage 3 shards with the rest; nothing was changed."""
    for message, untouched in ranks.run(2, _refusal_of_dtensors, stage, frozen):
        assert "DTensor" in message and "tensor parallelism" in message
        assert untouched
