"""Parameters that are written to on some ranks only. Each rank keeps its own part of
what it has, so a write of one rank would be kept in part: it is refused, unless the
values are the same in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from marks import in_stages
from oracle import apart, differing, rank, sharded, whole, world
from registry import SMALL, cases_of
from short_runs import loss_of_share
from torch import nn

case = cases_of("parameters")

at_several = pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))


def _built(stage: int) -> tuple[nn.Module, Any]:
    model = models.toy(blocks=2)
    return model, sharded(model, stage, lr=1e-2, buckets=SMALL)


def _step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of_share(model, step).backward()
    optimizer.step()


def _of_block(model: nn.Module) -> list[nn.Parameter]:
    return list(model.get_submodule("blocks.1").parameters())


# ------------------------------------------------------------------------------ refused


def _halves(model: nn.Module) -> None:
    for param in _of_block(model):
        param.mul_(0.5)


def _loads(model: nn.Module) -> None:
    model.load_state_dict(models.toy(seed=1, blocks=2).state_dict())


def _resets_a_row(model: nn.Module) -> None:
    model.get_submodule("embedding").weight[3].zero_()  # type: ignore[operator, union-attr]


EDITS: dict[str, Callable[[nn.Module], None]] = {
    f.__name__.strip("_").replace("_", " "): f for f in (_halves, _loads, _resets_a_row)
}


@case
def writes_of_one_rank(stage: int) -> dict[str, Any]:
    """Return what is said of a write on the last rank, whether the state has changed,
    and how training goes on once rank 0's values were broadcast."""
    found = {}
    for name, edit in EDITS.items():
        (model, optimizer), (twin, plain) = _built(stage), _built(stage)
        for m, o in ((model, optimizer), (twin, plain)):
            _step(m, o, 0)
        message = ""
        try:
            with optimizer.full_params() if stage == 3 else torch.no_grad():
                if rank() == world() - 1:
                    edit(model)
            _step(model, optimizer, 1)
        except RuntimeError as error:
            message = str(error)
        optimizer.zero_grad()
        with optimizer.full_params():
            for param in model.parameters():
                dist.broadcast(param.data, 0)
        for m, o in ((model, optimizer), (twin, plain)):
            _step(m, o, 2)
        found[name] = message, apart(whole(model, optimizer), whole(twin, plain))
    return found


@at_several
@in_stages
@pytest.mark.parametrize("name", EDITS)
def test_a_write_of_one_rank_is_refused_on_all(name: str, stage: int, at: int) -> None:
    """At the next step, or where full_params is left in stage 3. A broadcast is the
    remedy."""
    for results in case.done(at)["writes_of_one_rank", stage]:
        message, differs = results[name]
        assert "alike on all ranks" in message
        assert differs == {}


@case(stages=(1, 2))
def writes_that_stay_different(stage: int) -> list[str]:
    """Return what is said of three steps after such a write."""
    model, optimizer = _built(stage)
    said = []
    with torch.no_grad():
        if rank() == 1:
            _halves(model)
    for step in range(3):
        try:
            _step(model, optimizer, step)
        except RuntimeError as error:
            said.append(str(error))
    return said


@at_several
@pytest.mark.parametrize("stage", [1, 2])
def test_it_is_refused_until_it_is_mended(stage: int, at: int) -> None:
    for said in case.done(at)["writes_that_stay_different", stage]:
        assert len(said) == 3


# ------------------------------------------------------------------------------ welcome


def _broadcast(model: nn.Module) -> None:
    """Rank 0 has read a checkpoint; torch knows of the write of one rank only."""
    if rank() == 0:
        _loads(model)
    for param in model.parameters():
        dist.broadcast(param.data, 0)


def _all_of_them(model: nn.Module) -> None:
    _loads(model)


def _by_a_reduction(model: nn.Module) -> None:
    """Model averaging."""
    for param in _of_block(model):
        param.add_(rank())
        dist.all_reduce(param.data)
        param.data.div_(world())


WELCOME: dict[str, Callable[[nn.Module], None]] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (_broadcast, _all_of_them, _by_a_reduction)
}


@case
def writes_that_end_equal(stage: int) -> dict[str, list[str]]:
    """Return what differs from writes that torch sees on every rank."""
    found = {}
    for name, edit in WELCOME.items():
        sides = []
        for seen in (False, True):
            model, optimizer = _built(stage)
            _step(model, optimizer, 0)
            with optimizer.full_params():
                edit(model)
                for param in model.parameters() if seen else ():
                    param.copy_(param.clone())
            for step in range(1, 3):
                _step(model, optimizer, step)
            sides.append(whole(model, optimizer))
        found[name] = differing(*sides)
    return found


@at_several
@in_stages
@pytest.mark.parametrize("name", WELCOME)
def test_writes_that_end_equal_are_kept(name: str, stage: int, at: int) -> None:
    for results in case.done(at)["writes_that_end_equal", stage]:
        assert results[name] == []


@case(stages=(1, 2))
def bytes_of_the_norm(stage: int) -> list[int]:
    """Return the bytes of the small vector, without and after a write on all ranks."""
    model, optimizer = _built(stage)
    sizes = []
    for step in range(2):
        if step:
            with torch.no_grad():
                _halves(model)
        optimizer.comm_log(clear=True)
        _step(model, optimizer, step)
        words = [c for c in optimizer.comm_log() if c.op == "all_gather_words"]
        sizes.append(sum(call.bytes for call in words))
    return sizes


@at_several
@pytest.mark.parametrize("stage", [1, 2])
def test_a_write_costs_no_byte(stage: int, at: int) -> None:
    """What tells of it travels in bits that were sent anyway."""
    for without, after in case.done(at)["bytes_of_the_norm", stage]:
        assert without == after > 0
