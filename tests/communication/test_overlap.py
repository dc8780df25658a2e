"""Reductions, gathers and updates happen while others compute, if they may overlap; and
they are the same ones if not."""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import Any

import models
import pytest
import ranks
import torch
from at_rest import assert_at_rest
from marks import in_stages, in_stages_1_and_2
from oracle import STAGES, sharded
from timeline import recorded
from torch import Tensor, nn
from wire import hostile, lag

import zerokern

at_worlds = pytest.mark.parametrize("at", (2, 3), ids="world{}".format)

BLOCKS = 4
BLOCK_BYTES = 4 * (2 * 17 * 33 + 33 + 17 + 34)
"""A bucket of this size ends in another block than the one before it."""


def _last_blocks(model: models.Toy, optimizer: Any) -> dict[str, int]:
    """Return in which block the backward forms the last gradient of each bucket: the
    head counts as a block after all others, the embedding as one before."""
    place = {id(model.embedding.weight): -1}
    for number, module in enumerate([*model.blocks, model.head]):
        place |= {id(param): number for param in module.parameters()}
    return {
        bucket.transfer.title: min(place[id(slot.param)] for slot in bucket.slots)
        for bucket in optimizer.coordinator.gradients
    }


def _events(stage: int, overlap: bool) -> dict[str, Any]:
    """Return what happened in the third iteration, in order."""
    buckets = zerokern.Buckets(bytes=BLOCK_BYTES, overlap=overlap)
    with hostile(stage, 5.0):
        model = models.toy(blocks=BLOCKS)
        optimizer = sharded(model, stage, buckets=buckets)
        blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
        for step in range(3):
            optimizer.zero_grad()
            optimizer.comm_log(clear=True)
            with recorded(optimizer, blocks) as events:
                models.loss_of(model, *models.batch(step)).backward()
                optimizer.step()
        ends_in = _last_blocks(model, optimizer)
        assert_at_rest(optimizer)
        return {"events": events, "ends_in": ends_in, "log": optimizer.comm_log()}


@functools.cache
def happened(at: int) -> ranks.Cases:
    """Record every stage with and without overlap."""
    cases = {
        (stage, overlap): functools.partial(_events, stage, overlap)
        for stage in STAGES
        for overlap in (True, False)
    }
    return ranks.run_cases(at, cases)


Order = dict[str, list[int]]


def _order(result: dict[str, Any]) -> Order:
    """Return at which places each event happened."""
    places: Order = {}
    for place, event in enumerate(result["events"]):
        places.setdefault(event, []).append(place)
    return places


def _first(order: Order, beginning: str) -> list[int]:
    """Return the first place of each event that begins so, in order."""
    return sorted(
        places[0] for event, places in order.items() if event.startswith(beginning)
    )


@at_worlds
@in_stages
def test_a_reduction_is_on_its_way_while_the_next_block_computes(
    at: int, stage: int
) -> None:
    """Issued before the next backward has run, and not waited for before that."""
    for result in happened(at)[stage, True]:
        order = _order(result)
        ends_in = result["ends_in"].items()
        early = {bucket: block for bucket, block in ends_in if 1 <= block < BLOCKS}
        assert len(early) >= BLOCKS - 2
        for bucket, block in early.items():
            following = f"backward blocks.{block - 1}"
            issue = order[f"issue reduce_scatter of {bucket!r}"][0]
            wait = order[f"wait reduce_scatter of {bucket!r}"][0]
            assert issue < order[f"end {following}"][0]
            assert wait > order[f"begin {following}"][0]


@at_worlds
@in_stages
def test_without_overlap_reductions_come_after_backward(at: int, stage: int) -> None:
    """What the test above would see if nothing overlapped."""
    for result in happened(at)[stage, False]:
        order = _order(result)
        last = max(order[f"end backward blocks.{block}"][0] for block in range(BLOCKS))
        assert _first(order, "issue reduce")[0] > last


@at_worlds
def test_a_gather_is_on_its_way_while_the_unit_before_it_computes(at: int) -> None:
    """In forward and in backward."""
    for result in happened(at)[3, True]:
        order = _order(result)
        for block in range(1, BLOCKS):
            issues = order[f"issue all_gather of 'blocks.{block}'"]
            waits = order[f"wait all_gather of 'blocks.{block}'"]
            assert len(issues) == 2
            assert issues[0] < order[f"end forward blocks.{block - 1}"][0] < waits[0]

        for block in range(BLOCKS - 1):
            issue = order[f"issue all_gather of 'blocks.{block}'"][1]
            wait = order[f"wait all_gather of 'blocks.{block}'"][1]
            assert issue < order[f"end backward blocks.{block + 1}"][0]
            assert wait > order[f"begin backward blocks.{block + 1}"][0]


@at_worlds
def test_without_overlap_a_unit_is_gathered_when_it_is_needed(at: int) -> None:
    for result in happened(at)[3, False]:
        order = _order(result)
        for block in range(1, BLOCKS):
            issue = order[f"issue all_gather of 'blocks.{block}'"][0]
            assert issue > order[f"end forward blocks.{block - 1}"][0]


@at_worlds
@in_stages_1_and_2
def test_a_bucket_is_updated_while_the_one_before_it_is_gathered(
    at: int, stage: int
) -> None:
    """No gather of a step is waited for before the last update."""
    for result in happened(at)[stage, True]:
        order = _order(result)
        updates = _first(order, "update")
        issues = _first(order, "issue all_gather of 'bucket")
        waits = _first(order, "wait all_gather of 'bucket")
        assert len(updates) == len(issues) == len(waits) > BLOCKS
        for update, issue, following in zip(updates, issues, updates[1:], strict=False):
            assert update < issue < following
        assert min(waits) > max(updates)


@at_worlds
@in_stages
def test_overlap_changes_no_volume(at: int, stage: int) -> None:
    """The same collectives, if in another order."""
    overlapped = happened(at)[stage, True]
    in_turn = happened(at)[stage, False]
    for ours, theirs in zip(overlapped, in_turn, strict=True):
        calls = Counter(call[:6] for call in ours["log"])
        assert calls == Counter(call[:6] for call in theirs["log"])


# ------------------------------------------------------------------------- on the clock


class Slept(models.Block):
    """A block that computes for a while, in forward and in backward."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: time.sleep(self.seconds))
        return y


def _slow_model(seconds: float) -> nn.Module:
    torch.manual_seed(0)
    model = models.Toy(0)
    model.blocks.extend(Slept() for _ in range(BLOCKS))
    for block in model.blocks:
        block.seconds = seconds
    return model


def _timed(stage: int, seconds: float) -> tuple[float, float]:
    """Return how long an iteration takes, and the sum of what it computes and sends."""
    longest = 1000 * seconds
    model = _slow_model(seconds)
    optimizer = sharded(model, stage, buckets=zerokern.Buckets(bytes=BLOCK_BYTES))
    times = []
    with lag(0, longest, shortest_ms=longest) as wire:
        for step in range(4):
            carried = wire.carried
            begun = time.perf_counter()
            optimizer.zero_grad()
            models.loss_of(model, *models.batch(step)).backward()
            optimizer.step()
            times.append(time.perf_counter() - begun)
        sends = wire.carried - carried
    return min(times[1:]), seconds * (2 * BLOCKS + sends)


@functools.cache
def timed() -> ranks.Cases:
    cases = {stage: functools.partial(_timed, stage, 0.03) for stage in STAGES}
    return ranks.run_cases(2, cases)


@pytest.mark.long  # a clock: the order of issue and completion is tested above
@in_stages
def test_an_iteration_takes_less_than_its_parts(stage: int) -> None:
    """At most 0.7 of what computing and sending take one after the other."""
    for took, parts in timed()[stage]:
        assert took <= 0.7 * parts
