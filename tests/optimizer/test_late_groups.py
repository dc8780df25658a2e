"""An optimizer that is older than the process group: its ranks would train each by
itself, unless there is one rank only."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import STAGES, apart, differing, rank, sharded, whole
from torch import Tensor, nn
from training import params_of, train_shares

MESSAGE = "built before torch.distributed was initialised"


def meet(
    folder: Path,
    name: str,
    at: int,
    of_rank: int,
) -> None:
    """Initialise torch.distributed."""
    dist.init_process_group(
        "gloo",
        init_method=(folder / name).as_uri(),
        rank=of_rank,
        world_size=at,
        timeout=timedelta(seconds=ranks.TIMEOUT_S),
    )


def built_early(
    stage: int,
    folder: Path,
    at: int,
    name: str,
) -> tuple[nn.Module, Any]:
    """Return a model and an optimizer that are older than the group that is there
    now."""
    of_rank = dist.get_rank()
    dist.destroy_process_group()
    model = models.toy(blocks=2)
    optimizer = sharded(model, stage, lr=1e-2)
    meet(
        folder,
        f"{name}{stage}",
        at,
        of_rank,
    )
    return model, optimizer


def _refused(folder: Path, at: int) -> dict[int, list[Any]]:
    found = {}
    for stage in STAGES:
        model, optimizer = built_early(
            stage,
            folder,
            at,
            "refused",
        )
        before = params_of(model)
        models.loss_of(model, *models.batch(rank())).backward()
        said = []
        for closure in (None, lambda: torch.zeros(())):
            with pytest.raises(RuntimeError, match=MESSAGE) as error:
                optimizer.step(closure)
            said.append(str(error.value))
        found[stage] = [said, differing(params_of(model), before)]
    return found


@pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))
def test_a_step_is_refused_on_every_rank(at: int, tmp_path: Path) -> None:
    """It says how many ranks there are and what to do; nothing was updated."""
    for of_rank in ranks.run(
        at,
        _refused,
        tmp_path,
        at,
    ):
        for said, changed in of_rank.values():
            assert changed == []
            for message in said:
                assert f"each of the {at} ranks" in message
                assert "after init_process_group" in message


def _trained_by_another(folder: Path, at: int) -> dict[int, dict[str, Tensor]]:
    """Build a new optimizer on a model after the old one was refused."""
    found = {}
    for stage in STAGES:
        model, optimizer = built_early(
            stage,
            folder,
            at,
            "another",
        )
        with pytest.raises(RuntimeError, match=MESSAGE):
            optimizer.step()
        optimizer = sharded(model, stage, lr=1e-2)
        train_shares(
            model,
            optimizer,
            range(3),
            at,
        )
        found[stage] = whole(model, optimizer)
    return found


def test_a_new_optimizer_takes_the_parameters_over(tmp_path: Path) -> None:
    model = models.toy(blocks=2)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_shares(
        model,
        plain,
        range(3),
        2,
    )
    for of_rank in ranks.run(
        2,
        _trained_by_another,
        tmp_path,
        2,
    ):
        for found in of_rank.values():
            assert apart(found, params_of(model)) == {}


def _trained_alone(folder: Path) -> dict[int, dict[str, Tensor]]:
    found = {}
    for stage in STAGES:
        model, optimizer = built_early(
            stage,
            folder,
            1,
            "alone",
        )
        train_shares(
            model,
            optimizer,
            range(3),
            1,
        )
        found[stage] = whole(model, optimizer)
    return found


def test_a_late_group_of_one_rank_changes_nothing(tmp_path: Path) -> None:
    model = models.toy(blocks=2)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_shares(
        model,
        plain,
        range(3),
        1,
    )
    for found in ranks.run(1, _trained_alone, tmp_path)[0].values():
        assert apart(found, params_of(model)) == {}


def _trained_without(folder: Path) -> dict[int, dict[str, Tensor]]:
    """The group came and went before the first step."""
    found = {}
    for stage in STAGES:
        of_rank = dist.get_rank()
        model, optimizer = built_early(
            stage,
            folder,
            2,
            "without",
        )
        dist.destroy_process_group()
        train_shares(
            model,
            optimizer,
            range(3),
            1,
        )
        found[stage] = whole(model, optimizer)
        meet(
            folder,
            f"end{stage}",
            2,
            of_rank,
        )
    return found


def test_a_group_that_is_gone_again_changes_nothing(tmp_path: Path) -> None:
    model = models.toy(blocks=2)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_shares(
        model,
        plain,
        range(3),
        1,
    )
    for of_rank in ranks.run(2, _trained_without, tmp_path):
        for found in of_rank.values():
            assert apart(found, params_of(model)) == {}


def _with_a_group_of_one(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Train alone on purpose: each rank in a group of its own."""
    groups = [dist.new_group([other]) for other in range(2)]
    found = {}
    for stage in STAGES:
        model = models.toy(blocks=2)
        optimizer = sharded(
            model,
            stage,
            lr=1e-2,
            process_group=groups[rank()],
        )
        for step in range(3):
            optimizer.zero_grad()
            models.loss_of(model, *models.batch(10 * rank() + step)).backward()
            optimizer.step()
        found[stage] = whole(model, optimizer)
    return found


def test_a_group_of_one_rank_trains_alone_on_purpose(tmp_path: Path) -> None:
    """As the message says. Each rank has seen batches of its own."""
    for of_rank, results in enumerate(ranks.run(2, _with_a_group_of_one, tmp_path)):
        model = models.toy(blocks=2)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            plain.zero_grad()
            models.loss_of(model, *models.batch(10 * of_rank + step)).backward()
            plain.step()
        for found in results.values():
            assert apart(found, params_of(model)) == {}
