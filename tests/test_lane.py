"""A GPU forms sums on a side stream: in which order two streams are told what, with
streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from zerokern.buffers import Scratch
from zerokern.lane import Lane
from zerokern.stages.exchange import Exchange


class Notes:
    """What the streams of one GPU were told, in order, and which of them is the current
    one."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = "main"

    def tell(self, what: str) -> None:
        self.told.append(f"{self.current}: {what}")


class Stream:
    """A stream that takes notes."""

    def __init__(self, notes: Notes, name: str) -> None:
        self.notes, self.name, self.device = notes, name, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.notes.told.append(f"{self.name}: wait for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.notes.told.append(f"{self.name}: wait for mark {event.number}")


class Event:
    """An event that takes notes."""

    count = 0

    def record(self, stream: Stream) -> None:
        Event.count += 1
        self.number = Event.count
        stream.notes.told.append(f"{stream.name}: mark {self.number}")


class Work:
    """A collective that notes who waits for it."""

    def __init__(self, notes: Notes, name: str) -> None:
        self.notes, self.name = notes, name

    def wait(self) -> None:
        self.notes.tell(f"wait for {self.name}")


class Comm:
    """Two ranks; collectives only take notes."""

    world = 2

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def exchange(self, buffer: Tensor, received: Tensor, unit: str) -> Work:
        self.notes.tell(f"send {unit}")
        return Work(self.notes, unit)


class Ledger(Scratch):
    """Scratch memory that notes what is given back."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(torch.device("cpu"))
        self.notes = notes

    def give(self, tensor: Tensor) -> None:
        self.notes.tell("give memory back")
        super().give(tensor)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    """A GPU of two streams, in place of torch's."""
    taken = Notes()
    side, main = Stream(taken, "side"), Stream(taken, "main")
    Event.count = 0

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, taken.current = taken.current, stream.name
        yield
        taken.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return taken


def _exchange(notes: Notes, lane: Lane, name: str) -> tuple[Exchange, Any]:
    exchange: Any = Exchange(Comm(notes), Ledger(notes), lane, name)  # type: ignore[arg-type]

    def reduce(received: Tensor) -> None:
        notes.tell(f"sum {name}")

    return exchange, lambda: exchange.start(torch.zeros(128), reduce)


def test_backward_goes_on_while_the_side_waits_for_the_wire(notes: Notes) -> None:
    lane = Lane(torch.device("cuda", 0))
    first, start_first = _exchange(notes, lane, "bucket 0")
    second, start_second = _exchange(notes, lane, "bucket 1")
    start_first()
    notes.tell("backward of the next layer")
    start_second()
    first.finish()
    second.finish()
    assert notes.told == [
        "main: send bucket 0",
        "side: wait for main",
        "side: wait for bucket 0",
        "side: sum bucket 0",
        "side: mark 1",
        "main: backward of the next layer",
        "main: send bucket 1",
        "side: wait for main",
        "side: wait for bucket 1",
        "side: sum bucket 1",
        "side: mark 2",
        "main: wait for mark 1",
        "main: give memory back",
        "main: wait for mark 2",
        "main: give memory back",
    ]


def test_a_cpu_waits_when_it_needs_the_sum(notes: Notes) -> None:
    exchange, start = _exchange(notes, Lane(torch.device("cpu")), "bucket 0")
    start()
    notes.tell("backward of the next layer")
    exchange.finish()
    assert notes.told == [
        "main: send bucket 0",
        "main: backward of the next layer",
        "main: wait for bucket 0",
        "main: sum bucket 0",
        "main: give memory back",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_a_stream_of_its_own_for_sums() -> None:
    lane = Lane(torch.device("cuda", torch.cuda.current_device()))
    values = torch.zeros(2**20, device="cuda")
    torch.cuda._sleep(10**8)
    values.fill_(1.0)
    with lane.beside():
        total = values.sum()
    lane.join(lane.mark())
    assert float(total) == 2**20
