"""Weights of 16 bits that users write past torch's version counters, beside fp32
masters: training goes on from what was written, as after a write that torch sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from marks import at_worlds, in_stages, in_stages_1_and_2
from oracle import differing, quiet_state_dict, rank, sharded, state_of, whole
from registry import SMALL, cases_of
from torch import Tensor, nn
from training import everything, params_of, step_by_hand

import zerokern

case = cases_of("optimizer")

Named = dict[str, Tensor]
Params = Iterable[nn.Parameter]


def in_full(optimizer: Any, stage: int) -> AbstractContextManager[Any]:
    """Return where parameters are whole: in stage 3 inside of full_params only."""
    return optimizer.full_params() if stage == 3 else nullcontext()


# ---------------------------------------------------------------------- ways to write


def halved(param: Tensor) -> Tensor:
    """Return what is written: every second element is halved, and the others stay."""
    factors = torch.ones(param.numel(), dtype=param.dtype)
    factors[::2] = 0.5
    return param.detach() * factors.view(param.shape)


def _copy_to_data(params: Params) -> None:
    for param in params:
        param.data.copy_(halved(param))


def _broadcast_data(params: Params) -> None:
    for param in params:
        if rank() == 0:
            param.data.copy_(halved(param))
        dist.broadcast(param.data, 0)


def _write_from_numpy(params: Params) -> None:
    for param in params:
        written = halved(param).view(torch.int16).numpy()
        param.detach().view(torch.int16).numpy()[...] = written


def _multiply_data(params: Params) -> None:
    params = list(params)
    factors = [halved(torch.ones_like(param)) for param in params]
    torch._foreach_mul_([param.data for param in params], factors)


def _as_torch_sees(params: Params) -> None:
    with torch.no_grad():
        for param in params:
            param.copy_(halved(param))


WRITES: dict[str, Callable[[Params], None]] = {
    "p.data.copy_": _copy_to_data,
    "broadcast": _broadcast_data,
    "numpy": _write_from_numpy,
    "foreach": _multiply_data,
}


# --------------------------------------------------------------- training and writing


def _set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _built(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    model = models.toy(blocks=2).bfloat16()
    return model, sharded(model, stage, lr=1e-2, **options)


def _trained(
    stage: int, write: Callable[[Params], None], buckets: zerokern.Buckets
) -> tuple[Named, Named, Named]:
    """Train two steps and write; return what was written, the weights after a step that
    moves nothing, and all that comes of two more steps."""
    model, optimizer = _built(stage, buckets=buckets)
    for step in range(2):
        step_by_hand(model, optimizer, step)
    with in_full(optimizer, stage):
        before = params_of(model)
        versions = [param._version for param in model.parameters()]
        write(model.parameters())
        written = params_of(model)
        seen = versions != [param._version for param in model.parameters()]
    assert seen == (write is _as_torch_sees)
    expected = {name: halved(param) for name, param in before.items()}
    assert differing(written, expected) == []
    assert len(differing(written, before)) == len(before)
    _set_lr(optimizer, 0.0)
    step_by_hand(model, optimizer, 2)
    held = whole(model, optimizer)
    _set_lr(optimizer, 1e-2)
    for step in range(3, 5):
        step_by_hand(model, optimizer, step)
    return written, held, everything(model, optimizer)


def _differences(stage: int, buckets: zerokern.Buckets) -> dict[str, Any]:
    """Return, by way of writing, what a step has moved of the weights, and what differs
    in the end from a run whose writes torch has seen."""
    *_, expected = _trained(stage, _as_torch_sees, buckets)
    found = {}
    for name, write in WRITES.items():
        written, held, after = _trained(stage, write, buckets)
        found[name] = differing(held, written), differing(after, expected)
    return found


@case
def unseen_writes(stage: int) -> dict[str, Any]:
    return _differences(stage, SMALL)


@case(stages=(1, 2))
def unseen_writes_to_late_gathers(stage: int) -> dict[str, Any]:
    buckets = zerokern.Buckets(bytes=6000, gather_in_forward=True)
    return _differences(stage, buckets)


@at_worlds
@in_stages_1_and_2
@pytest.mark.parametrize("name", WRITES)
def test_writes_wait_for_gathers_of_the_next_forward(
    name: str, stage: int, at: int
) -> None:
    for results in case.done(at)["unseen_writes_to_late_gathers", stage]:
        assert results[name] == ([], [])


@at_worlds
@in_stages
@pytest.mark.parametrize("name", WRITES)
def test_training_goes_on_from_what_was_written(name: str, stage: int, at: int) -> None:
    """The masters of what was not written keep their low bits, as where torch sees the
    write."""
    for results in case.done(at)["unseen_writes", stage]:
        moved, differs = results[name]
        assert moved == []
        assert differs == []


# ---------------------------------------------------------------------- without a step


@case
def saved_after_a_write(stage: int) -> dict[str, list[str]]:
    """Return the masters, in full form and in that of state_dict(), that are not what
    was written, and what a model that loads both differs in."""
    model, optimizer = _built(stage)
    step_by_hand(model, optimizer, 0)
    with in_full(optimizer, stage):
        for param in model.parameters():
            param.data.fill_(3.0)
    full = state_of(model, optimizer)
    saved = copy.deepcopy(quiet_state_dict(optimizer))
    weights = whole(model, optimizer)
    fresh, other = _built(stage)
    with in_full(other, stage):
        fresh.load_state_dict(weights)
    other.load_state_dict(saved)
    masters = [entry["master"] for entry in saved["state"].values()]
    return {
        "full": [
            name
            for name, value in full.items()
            if name.endswith("/master") and not bool((value == 3.0).all())
        ],
        "saved": [
            str(index)
            for index, master in enumerate(masters)
            if not bool((master == 3.0).all())
        ],
        "loaded": differing(everything(fresh, other), everything(model, optimizer)),
    }


@at_worlds
@in_stages
def test_a_checkpoint_right_after_a_write_has_it(stage: int, at: int) -> None:
    """A stale master would undo the write where it is loaded."""
    for found in case.done(at)["saved_after_a_write", stage]:
        assert found == {"full": [], "saved": [], "loaded": []}


@case
def written_without_a_gradient(stage: int) -> tuple[list[str], list[str]]:
    """Return what a step without gradients changes of what was written, and whether the
    next step with gradients starts there."""
    model, optimizer = _built(stage)
    step_by_hand(model, optimizer, 0)
    with in_full(optimizer, stage):
        _copy_to_data(model.parameters())
        written = params_of(model)
    optimizer.zero_grad()
    optimizer.step()
    with in_full(optimizer, stage):  # not `whole`, after which masters have followed
        kept = differing(params_of(model), written)
    _set_lr(optimizer, 0.0)
    step_by_hand(model, optimizer, 1)
    return kept, differing(whole(model, optimizer), written)


@at_worlds
@in_stages
def test_a_write_outlives_a_step_without_gradients(stage: int, at: int) -> None:
    for kept, started in case.done(at)["written_without_a_gradient", stage]:
        assert kept == []
        assert started == []
