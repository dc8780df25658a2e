"""A GPU forms sums on a side stream: in which order two streams are told what, with
streams that only take notes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from zerokern.groups import Group, Groups
from zerokern.layout import Bucket, Slot
from zerokern.streams import SideStream
from zerokern.transport import Reduce, Transport


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


class TwoRanks(Transport):
    """A rank of two whose collectives only take notes."""

    def __init__(self, notes: Notes, device: torch.device) -> None:
        group = Group(None)
        group.size, group.global_ranks = 2, [0, 1]
        group.others = group.peers = [1]
        super().__init__(Groups(group, group, group), torch.device("cpu"))
        self.notes = notes
        self.side = SideStream(device)

    def give(self, tensor: Tensor, **options: bool) -> None:
        self.notes.tell("give memory back")
        super().give(tensor, **options)

    def point_to_point(self, name: str, pairs: Any, group: Group) -> list[Any]:
        self.notes.tell(f"send {name.split()[-1]}")
        return [Work(self.notes, name.split()[-1])]


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


class Noted(Reduce):
    """A reduction whose sum is noted, and which keeps its memory until then."""

    def __init__(self, transport: TwoRanks, name: str) -> None:
        bucket = Bucket(0, "", "float32", 4, True, (Slot(0, 0, 128),), 2)
        super().__init__(transport, bucket, name, torch.zeros(1, dtype=torch.float64))
        self._kernel = self._sum
        self._notes = transport.notes
        self.used: list[weakref.ref[Tensor]] = []
        """What the sum reads and writes."""

    def _sum(self, out: Tensor, own: Tensor, received: Tensor, **_: Any) -> None:
        self._notes.tell(f"sum {self.title}")
        self.used = [weakref.ref(out), weakref.ref(received)]


def _start(reduction: Noted) -> None:
    accumulated = torch.zeros(64)
    reduction.start(torch.zeros(128), torch.zeros(64), accumulated)


def test_backward_goes_on_while_the_side_waits_for_the_wire(notes: Notes) -> None:
    transport = TwoRanks(notes, torch.device("cuda", 0))
    first, second = Noted(transport, "first"), Noted(transport, "second")
    _start(first)
    notes.tell("backward of the next layer")
    _start(second)
    first.finish()
    second.finish()
    assert notes.told == [
        "main: send 'first'",
        "side: wait for main",
        "side: wait for 'first'",
        "side: sum first",
        "side: mark 1",
        "main: backward of the next layer",
        "main: send 'second'",
        "side: wait for main",
        "side: wait for 'second'",
        "side: sum second",
        "side: mark 2",
        "main: wait for mark 1",
        "main: give memory back",
        "main: wait for mark 2",
        "main: give memory back",
    ]


def test_a_cpu_waits_when_it_needs_the_sum(notes: Notes) -> None:
    reduction = Noted(TwoRanks(notes, torch.device("cpu")), "first")
    _start(reduction)
    notes.tell("backward of the next layer")
    reduction.finish()
    assert notes.told == [
        "main: send 'first'",
        "main: backward of the next layer",
        "main: wait for 'first'",
        "main: sum first",
        "main: give memory back",
    ]


def test_memory_lives_until_the_side_has_used_it(notes: Notes) -> None:
    """What was queued on the side has not run yet: memory that goes back to the main
    stream's allocator in between is handed on, and the sum is formed of something
    else."""
    reduction = Noted(TwoRanks(notes, torch.device("cuda", 0)), "first")
    _start(reduction)
    gc.collect()
    assert all(reference() is not None for reference in reduction.used)
    reduction.finish()
    gc.collect()
    assert all(reference() is None for reference in reduction.used)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_a_stream_of_its_own_for_sums() -> None:
    side = SideStream(torch.device("cuda", torch.cuda.current_device()))
    values = torch.zeros(2**20, device="cuda")
    torch.cuda._sleep(10**8)
    values.fill_(1.0)
    with side.queue():
        total = values.sum()
    side.wait(side.record())
    assert float(total) == 2**20
