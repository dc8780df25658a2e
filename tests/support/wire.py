"""The wire between ranks, made worse on purpose: slow and disorderly, watched for
memory that is touched while it travels, or given up on soon."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from oracle import rank
from torch import Tensor

import zerokern
from zerokern.groups import Group, Groups
from zerokern.sharding import reducer
from zerokern.transport import Pending, Transport

Transfers = Sequence[tuple[Tensor, Tensor, int]]
"""What is sent, where what comes is received, and the peer, of each message."""
Method = Callable[..., Any]

TWO_PARAMETERS = zerokern.Buckets(bytes=2400)
"""A block's weight and its bias: there are more buckets than may travel at a time."""

# ------------------------------------------------------------------ slow and disorderly


class Flight:
    """A collective under way: it reads what it sends late, and delivers when this very
    handle is waited on."""

    def __init__(
        self,
        wire: Wire,
        start: Callable[[Transfers], Sequence[dist.Work]],
        name: str,
        transfers: Transfers,
        delay: float,
        earlier: Any,
    ) -> None:
        self.wire, self.start, self.name, self.delay = wire, start, name, delay
        self.sent = [send.data for send, _, _ in transfers]
        self.received = [receive.data for _, receive, _ in transfers]
        self.peers = [peer for _, _, peer in transfers]
        self.at_launch = [send.clone() for send in self.sent]
        self.private = [torch.empty_like(receive) for receive in self.received]
        self.ranges = [_range(t) for t in [*self.sent, *self.received]]
        for receive in self.received:
            _bits(receive).fill_(0xFF)  # NaN in every format of floats
        self.started = threading.Event()
        self.earlier: threading.Event | None = earlier
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._carry, daemon=True)
        self.thread.start()

    def _carry(self) -> None:
        try:
            with torch.no_grad():
                time.sleep(self.delay)
                if self.earlier is not None:
                    # Messages of one name are told apart by their order only.
                    self.earlier.wait()
                    self.earlier = None
                sent = [
                    _late(now, then)
                    for now, then in zip(self.sent, self.at_launch, strict=True)
                ]
                with self.wire.lock:
                    pairs = list(zip(sent, self.private, self.peers, strict=True))
                    works = self.start(pairs)
                self.started.set()
                for work in works:
                    work.wait()
        except BaseException as error:
            self.error = error
        finally:
            self.started.set()

    def wait(self) -> None:
        """Deliver."""
        self.thread.join()
        self.wire.flights.remove(self)
        if self.error is not None:
            raise self.error
        for now, then in zip(self.sent, self.at_launch, strict=True):
            assert _in_memory(now), (
                f"{self.name}: what is sent lost its memory under way"
            )
            assert torch.equal(_bits(now), _bits(then)), (
                f"{self.name}: what is sent was written to under way"
            )
        for receive, value in zip(self.received, self.private, strict=True):
            assert _in_memory(receive), (
                f"{self.name}: what is received lost its memory under way"
            )
            assert (_bits(receive) == 0xFF).all(), (
                f"{self.name}: somebody wrote to where data are received"
            )
            receive.copy_(value)


class Wire:
    """All that is under way on this rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flights: list[Flight] = []
        self.carried = 0

    def check(self, tensor: Tensor, what: str) -> None:
        """Refuse memory that a collective still reads or writes."""
        begin, end = _range(tensor)
        for flight in self.flights:
            for first, last in flight.ranges:
                assert end <= first or last <= begin, (
                    f"a buffer was {what} while {flight.name} used it"
                )


def _range(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _in_memory(tensor: Tensor) -> bool:
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end


def _late(now: Tensor, at_launch: Tensor) -> Tensor:
    """Return what is sent, as it is now; if its memory is gone, what it was: `wait`
    tells of that."""
    return now.clone() if _in_memory(now) else at_launch


def _checked_after(wire: Wire, method: Method, what: str) -> Method:
    def call(transport: Transport, *args: Any, **options: Any) -> Any:
        result = method(transport, *args, **options)
        wire.check(result, what)
        return result

    return call


def _checked_before(wire: Wire, method: Method, what: str) -> Method:
    def call(transport: Transport, tensor: Tensor, **options: Any) -> Any:
        wire.check(tensor, what)
        return method(transport, tensor, **options)

    return call


@contextmanager
def lag(
    seed: int, longest_ms: float = 20.0, *, shortest_ms: float = 0.0
) -> Iterator[Wire]:
    """Delay every collective by a random time, so that they overtake each other.

    Data are read at the end of the delay and written to their place when the
    collective's own handle is waited on; until then the place holds NaN. It is an
    AssertionError if data change under way, if scratch memory is taken or given back
    while a collective uses it, or if one is never waited on.
    """
    wire = Wire()
    point_to_point = Transport.point_to_point
    last: dict[tuple[int, str], threading.Event] = {}
    delays = random.Random(1009 * seed + rank())

    def launch(
        transport: Transport, name: str, transfers: Transfers, group: Group
    ) -> list[Any]:
        delay = delays.uniform(shortest_ms, longest_ms) / 1000
        key = id(transport), name

        def start(late: Transfers) -> Sequence[dist.Work]:
            return point_to_point(transport, name, late, group)

        flight = Flight(wire, start, name, transfers, delay, last.get(key))
        last[key] = flight.started
        wire.flights.append(flight)
        wire.carried += 1
        return [flight]

    take = _checked_after(wire, Transport.take, "handed out")
    give = _checked_before(wire, Transport.give, "given back")
    with (
        mock.patch.object(Transport, "point_to_point", launch),
        mock.patch.object(Transport, "take", take),
        mock.patch.object(Transport, "give", give),
    ):
        yield wire
    left = [flight.name for flight in wire.flights]
    for flight in wire.flights:
        flight.thread.join()
    assert not left, f"never waited for: {left}"


@contextmanager
def poison() -> Iterator[None]:
    """Let every optimizer that is built inside fill its scratch memory with NaN on the
    way out and back."""
    build = Transport.__init__

    def poisoned(transport: Transport, *args: Any) -> None:
        build(transport, *args)
        transport.poison = True

    with mock.patch.object(Transport, "__init__", poisoned):
        yield


@contextmanager
def hostile(seed: int, longest_ms: float = 20.0) -> Iterator[Wire]:
    """A slow wire and poisoned memory."""
    with poison(), lag(seed, longest_ms) as wire:
        yield wire


# -------------------------------------------------------- by hand, by groups of its own


def send(buffer: Tensor, received: Tensor, title: str = "x") -> Pending:
    """Start to send the chunks of a buffer to all ranks, as a reduction does."""
    transport = Transport(Groups.over(None), buffer.device)
    group = transport.groups.averages
    chunks = buffer.view(group.size, -1)
    others = enumerate(group.others)
    pairs = [(chunks[peer], received[index], peer) for index, peer in others]
    buffers = buffer, received
    return transport.start("reduce_scatter", title, "step", pairs, buffers, group)


def short_group(seconds: float = 3.0, members: list[int] | None = None) -> Any:
    """Return a group, of all ranks unless it is told which, whose collectives fail
    soon: a hang is what is tested."""
    return dist.new_group(members, timeout=timedelta(seconds=seconds))


def buckets_under_way(number: int) -> AbstractContextManager[Any]:
    """Change how many buckets may travel at a time."""
    return mock.patch.object(reducer, "MAX_IN_FLIGHT", number)
