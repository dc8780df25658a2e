"""Gathering: the memory of whole parameters is given back at once, and ranks that do
not gather alike are told so."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from marks import at_worlds, in_stages, in_stages_1_and_2
from oracle import Run, apart, differing, rank, sharded, whole, world
from registry import cases_of
from torch import Tensor, nn
from training import step_by_hand

from zerokern.sharding.sharded import ShardedParameters

case = cases_of("parameters")


# ----------------------------------------------------------------- memory is given back


def gathered_bytes(optimizer: Any) -> int:
    """Return the bytes of the buffers that hold whole parameters, counted from their
    storages and not on a ledger."""
    store = optimizer.coordinator.parameters
    if isinstance(store, ShardedParameters):
        units = store.units.values()
        wholes = [bucket.whole for unit in units for bucket in unit.buckets]
        return sum(whole.nbytes for whole in wholes if whole is not None)
    return sum(flat.untyped_storage().nbytes() for flat in store.memory())


@case
def held_after_each_use(stage: int) -> dict[str, tuple[int, int]]:
    """Return the bytes of whole parameters and of scratch memory after each way to make
    parameters whole."""
    model = models.toy()
    optimizer = sharded(model, stage)
    tokens, targets = models.batch(0)
    found: dict[str, tuple[int, int]] = {}

    def note(name: str) -> None:
        found[name] = gathered_bytes(optimizer), optimizer.memory().buffers

    note("built")
    with optimizer.full_params():
        sum(p.sum() for p in model.parameters())
    note("read")
    with optimizer.full_params(), optimizer.full_params():
        pass
    note("nested")
    model.eval()
    with torch.no_grad():
        model(tokens)
        note("no_grad")
        model.blocks[1](torch.ones(2, 17))
        note("one block")
    with torch.inference_mode():
        model(tokens)
    note("inference_mode")
    model(tokens)
    note("graph dropped")
    model.train()
    for name in ("trained", "trained after evaluation"):
        optimizer.zero_grad()
        models.loss_of(model, tokens, targets).backward()
        note(f"{name}: backward")
        optimizer.step()
        note(name)
    return found


@at_worlds
@in_stages
def test_gathered_memory_is_given_back_at_once(stage: int, at: int) -> None:
    elements = sum(p.numel() for p in models.toy().parameters())
    payload = 4 * elements
    for found in case.done(at)["held_after_each_use", stage]:
        if stage == 3 and at > 1:
            assert set(found.values()) == {(0, 0)}
        else:
            assert {scratch for _, scratch in found.values()} == {0}
            assert len(set(found.values())) == 1
            assert found["built"][0] >= payload


def trained_between_evaluations(stage: int | None, of: int) -> dict[str, Tensor]:
    run = Run(stage, of, build=models.toy)
    for step in range(3):
        with torch.inference_mode():
            run.model(models.batch(20 + step)[0])
        run.optimizer.zero_grad()
        run.backward(step)
        with torch.inference_mode():
            run.model(models.batch(30 + step)[0])
        run.step()
    return whole(run.model, run.optimizer)


@case
def inference_mode_between_steps(stage: int) -> dict[str, Tensor]:
    return trained_between_evaluations(stage, world())


@at_worlds
@in_stages
def test_inference_mode_leaves_training_as_it_was(stage: int, at: int) -> None:
    """Nothing that was made in inference mode comes into a graph."""
    expected = trained_between_evaluations(None, at)
    for result in case.done(at)["inference_mode_between_steps", stage]:
        assert apart(result, expected) == {}


# ------------------------------------------------------- ranks that do not gather alike


@case(stages=(1, 2))
def one_rank_gathers(stage: int) -> tuple[int, list[str]]:
    """Return how many collectives it took that rank 0 looks at the parameters, and what
    differs from a model that nobody looked at."""
    model, twin = models.toy(), models.toy()
    optimizer = sharded(model, stage, lr=1e-2)
    plain = sharded(twin, stage, lr=1e-2)
    calls = len(optimizer.comm_log())
    if rank() == 0:
        whole(model, optimizer)
    calls = len(optimizer.comm_log()) - calls
    step_by_hand(model, optimizer, 0)
    step_by_hand(twin, plain, 0)
    return calls, differing(whole(model, optimizer), whole(twin, plain))


@in_stages_1_and_2
def test_one_rank_may_look_at_parameters_that_every_rank_has(stage: int) -> None:
    """Stages 1 and 2 send nothing for it."""
    for calls, changed in case.done(2)["one_rank_gathers", stage]:
        assert calls == 0
        assert changed == []


def _skips_the_gather(model: nn.Module, optimizer: Any) -> None:
    if rank() == 0:
        whole(model, optimizer)
    step_by_hand(model, optimizer, 0)


def _gathers_once_more(model: nn.Module, optimizer: Any) -> None:
    for _ in range(1 + rank()):
        whole(model, optimizer)
    models.loss_of(model, *models.batch(0)).backward()
    optimizer.step()


def _error_of(mismatch: Callable[[nn.Module, Any], None]) -> str:
    model = models.toy()
    group = dist.new_group(timeout=timedelta(seconds=3))
    optimizer = sharded(model, 3, process_group=group)
    with pytest.raises(RuntimeError) as error:
        mismatch(model, optimizer)
    return str(error.value)


@pytest.mark.parametrize(
    "mismatch",
    [_skips_the_gather, _gathers_once_more],
    ids=lambda f: f.__name__.strip("_"),
)
def test_ranks_that_do_not_gather_alike_are_told_so(
    mismatch: Callable[[nn.Module, Any], None],
) -> None:
    """Not a hang, and no rank takes another buffer for the one that it waits for."""
    for message in ranks.run(2, _error_of, mismatch):
        assert "did not complete: another rank never took part in it" in message
        assert "all_gather of" in message or "reduce_scatter of" in message
