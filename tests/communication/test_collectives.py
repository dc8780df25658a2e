"""Which collectives are used, and how: point-to-point messages whose handles wait for
all of their own; none of the back end's reductions; nothing in a world of one."""

from __future__ import annotations

import functools
import math
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from marks import in_stages
from oracle import STAGES, apart, sharded, whole, world
from registry import cases_of
from short_runs import loss_of_share
from torch import Tensor, nn
from wire import TWO_PARAMETERS, lag

from zerokern.groups import Groups
from zerokern.transport import Pending, Transport

case = cases_of("communication")

# ------------------------------------------------------------------------------ handles


SIZES = (3, 1, 1000, 64, 7, 20_000, 5, 300)
ORDERS = (range(8), (3, 1, 7, 0, 2, 6, 5, 4), (7,))
"""In which gathers are waited for, by turns."""


def _start_gathers(transport: Transport, base: int) -> list[tuple[Pending, Tensor]]:
    """Start a gather of each size, of numbers that say whose they are."""
    group = transport.groups.shards
    started = []
    for number, size in enumerate(SIZES):
        buffer = torch.full((group.size * size,), math.nan)
        chunks = buffer.view(group.size, -1)
        own = chunks[group.rank]
        own.fill_(base + 10 * number + group.rank)
        pairs = [(own, chunks[peer], peer) for peer in group.others]
        title, buffers = f"unit {number}", (buffer,)
        work = transport.start("all_gather", title, "step", pairs, buffers, group)
        started.append((work, buffer))
    return started


def _eight_at_a_time(rounds: int, lag_ms: float | None) -> int:
    """Return how many gathers were not complete when their own handles had been waited
    on."""
    transport = Transport(Groups.over(None), torch.device("cpu"))
    of_rank = torch.arange(world()).float()
    wrong = 0
    with nullcontext() if lag_ms is None else lag(1, lag_ms):
        for index in range(rounds):
            started = _start_gathers(transport, 100 * index)
            order = ORDERS[index % len(ORDERS)]
            for number in order:
                work, buffer = started[number]
                work.wait()
                expected = 100 * index + 10 * number + of_rank
                expected = expected.repeat_interleave(SIZES[number])
                wrong += not torch.equal(buffer, expected)
            for number in set(range(len(SIZES))) - set(order):
                started[number][0].wait()
    return wrong


def test_a_handle_waits_for_all_of_its_own_collective() -> None:
    """Gloo finishes messages out of order."""
    cases = {
        "good": functools.partial(_eight_at_a_time, 200, None),
        "bad": functools.partial(_eight_at_a_time, 20, 3.0),
    }
    done = ranks.run_cases(3, cases)
    assert done["good"] == [0, 0, 0]
    assert done["bad"] == [0, 0, 0]


# ------------------------------------------------------------------------ traps of gloo

FORBIDDEN = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "all_to_all_single",
    "all_to_all",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "_coalescing_manager",
    "barrier",
)


def _train(stage: int) -> tuple[nn.Module, Any]:
    model = models.forked()
    optimizer = sharded(model, stage, buckets=TWO_PARAMETERS, lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        loss_of_share(model, step).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return model, optimizer


@case
def train_among_traps(stage: int) -> tuple[float, list[str]]:
    """Train with every trap armed; return the sum of ones over all ranks, and the
    warnings."""

    def trap(*_: Any, **__: Any) -> None:
        raise AssertionError("the back end's own reduction or coalescing was used")

    traps = {name: trap for name in FORBIDDEN if hasattr(dist, name)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with mock.patch.multiple(dist, **traps):
            _, optimizer = _train(stage)
            optimizer.full_state_dict()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item(), [str(warning.message) for warning in seen]


@in_stages
def test_no_trap_of_gloo_is_stepped_into(stage: int) -> None:
    """No coalescing, no reduction by the back end; the group works on afterwards."""
    results = case.done(2)["train_among_traps", stage]
    assert [ones for ones, _ in results] == [2.0] * 2


@in_stages
def test_nothing_is_deprecated(stage: int) -> None:
    results = case.done(2)["train_among_traps", stage]
    assert [seen for _, seen in results] == [[]] * 2


# ----------------------------------------------------------------------- a world of one


def _alone(stage: int) -> dict[str, Any]:
    model, optimizer = _train(stage)
    peak = optimizer.coordinator.transport.peak_bytes
    params = whole(model, optimizer)
    return {"params": params, "log": optimizer.comm_log(), "peak": peak}


@functools.cache
def alone_in_a_group() -> ranks.Cases:
    cases = {stage: functools.partial(_alone, stage) for stage in STAGES}
    return ranks.run_cases(1, cases)


@in_stages
@pytest.mark.parametrize("group", [False, True], ids=["no group", "group of one"])
def test_a_world_of_one_is_plain_adamw(stage: int, group: bool) -> None:
    """Nothing is sent, nor copied into buffers; the result is AdamW's."""
    result = alone_in_a_group()[stage][0] if group else _alone(stage)
    model = models.forked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        models.loss_of(model, *models.batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    expected = dict(model.named_parameters())
    assert result["log"] == ()
    assert result["peak"] == 0
    assert apart(result["params"], expected, 1e-6) == {}
