"""The slow wire of these tests sees faults: each wrong use of a buffer that travels is
an error."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from oracle import sharded, world
from registry import cases_of
from wire import lag, send

case = cases_of("communication")


def _reduce_before_the_wait() -> None:
    buffer, received = torch.ones(2 * world()), torch.empty(world() - 1, 2)
    with lag(0):
        work = send(buffer, received)
        early = received.clone()
        work.wait()
        assert early.isnan().all()
        assert (received == 1).all()


def _write_under_way(late: bool) -> None:
    buffer, received = torch.ones(2 * world()), torch.empty(world() - 1, 2)
    with lag(0, 20.0, shortest_ms=10.0) as wire:
        work = send(buffer, received)
        if late:
            wire.flights[0].thread.join()  # sent, but nobody has waited
        buffer.zero_()
        work.wait()


def _write_early() -> None:
    _write_under_way(late=False)


def _write_late() -> None:
    _write_under_way(late=True)


def _give_back_under_way() -> None:
    optimizer = sharded(models.toy(), 2)
    scratch = optimizer.coordinator.transport
    with lag(0):
        buffer = scratch.take(2 * world(), torch.float32)
        work = send(buffer, torch.empty(world() - 1, 2))
        try:
            scratch.give(buffer)
        finally:
            work.wait()


def _never_wait() -> None:
    with lag(0):
        send(torch.ones(2 * world()), torch.empty(world() - 1, 2))


SEEN: dict[str, tuple[Callable[[], None], str | None]] = {
    "output read early": (_reduce_before_the_wait, None),
    "input written before it was sent": (_write_early, "written to under way"),
    "input written after it was sent": (_write_late, "written to under way"),
    "buffer given back": (
        _give_back_under_way,
        "given back while reduce_scatter of 'x' used it",
    ),
    "never waited for": (_never_wait, "never waited for"),
}
"""What is done wrong, and what is said. An early read finds no data, and is no error of
its own."""


def _told(function: Callable[[], None]) -> str | None:
    try:
        function()
    except AssertionError as error:
        return str(error)
    return None


@case(stages=(2,))
def seen_faults(stage: int) -> dict[str, str | None]:
    return {name: _told(function) for name, (function, _) in SEEN.items()}


@pytest.mark.parametrize("fault", SEEN)
def test_the_harness_sees_faults(fault: str) -> None:
    _, expected = SEEN[fault]
    for messages in case.done(2)["seen_faults", 2]:
        message = messages[fault]
        if expected is None:
            assert message is None
        else:
            assert message is not None
            assert expected in message
