"""Faults on purpose: a slow and disorderly wire, memory that is watched while it
travels, exceptions in users' code."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from oracle import Run, rank
from torch import Tensor, nn

from zerokern.groups import Group, Groups
from zerokern.sharding import reducer
from zerokern.sharding.units import UnitState
from zerokern.sharding.updater import Updater
from zerokern.transport import Pending, Transport

Transfers = Sequence[tuple[Tensor, Tensor, int]]
Start = Callable[[Transport, str, Transfers, Group], Sequence[dist.Work]]

# -------------------------------------------------------------------- a slow wire (LAG)


class _Flight:
    """A collective under way: it reads what it sends late, and delivers when this very
    handle is waited on."""

    def __init__(
        self,
        wire: _Wire,
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


class _Wire:
    """All that is under way on this rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flights: list[_Flight] = []
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


@contextmanager
def lag(
    seed: int, longest_ms: float = 20.0, *, shortest_ms: float = 0.0
) -> Iterator[_Wire]:
    """Delay every collective by a random time, so that they overtake each other.

    Data are read at the end of the delay and written to their place when the
    collective's own handle is waited on; until then the place holds NaN. It is an
    AssertionError if data change under way, if scratch memory is taken or given back
    while a collective uses it, or if one is never waited on.
    """
    wire = _Wire()
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

        flight = _Flight(wire, start, name, transfers, delay, last.get(key))
        last[key] = flight.started
        wire.flights.append(flight)
        wire.carried += 1
        return [flight]

    def after(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(transport: Transport, *args: Any, **options: Any) -> Any:
            result = method(transport, *args, **options)
            wire.check(result, what)
            return result

        return call

    def before(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(transport: Transport, tensor: Tensor, **options: Any) -> Any:
            wire.check(tensor, "given back")
            return method(transport, tensor, **options)

        return call

    with (
        mock.patch.object(Transport, "point_to_point", launch),
        mock.patch.object(Transport, "take", after(Transport.take, "handed out")),
        mock.patch.object(Transport, "give", before(Transport.give)),
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
def hostile(seed: int, longest_ms: float = 20.0) -> Iterator[_Wire]:
    """A slow wire and poisoned memory."""
    with poison(), lag(seed, longest_ms) as wire:
        yield wire


# ------------------------------------------------------------------- when things happen


@contextmanager
def recorded(optimizer: Any, blocks: dict[str, nn.Module]) -> Iterator[list[str]]:
    """Note in one list, as they happen: "issue NAME", "wait NAME", "update BUCKET",
    "begin forward BLOCK" and so on.

    NAME is that of the collective, such as "all_gather of 'blocks.0'".
    """
    events: list[str] = []
    start, wait, update = Transport.point_to_point, Pending.wait, Updater.update

    def noted(event: str) -> Callable[..., None]:
        return lambda *_: events.append(event)

    def launch(
        transport: Transport, name: str, transfers: Transfers, group: Group
    ) -> Any:
        events.append(f"issue {name}")
        return start(transport, name, transfers, group)

    def waited(pending: Pending) -> None:
        events.append(f"wait {pending.name}")
        wait(pending)

    def updated(updater: Updater, index: int, *args: Any, **options: Any) -> None:
        events.append(f"update {updater.buckets[index].layout.index}")
        update(updater, index, *args, **options)

    handles: list[Any] = []
    for name, module in blocks.items():
        # Inside of the optimizer's own hooks, so that what these wait for is not part
        # of the block's time.
        inside = next(module.children())
        handles.append(inside.register_forward_pre_hook(noted(f"begin forward {name}")))
        handles.append(
            module.register_forward_hook(noted(f"end forward {name}"), prepend=True)
        )
        handles.append(
            module.register_full_backward_pre_hook(noted(f"begin backward {name}"))
        )
        handles.append(
            module.register_full_backward_hook(noted(f"end backward {name}"))
        )
    with (
        mock.patch.object(Transport, "point_to_point", launch),
        mock.patch.object(Pending, "wait", waited),
        mock.patch.object(Updater, "update", updated),
    ):
        yield events
    for handle in handles:
        handle.remove()


# ------------------------------------------------------------------ at rest (LIVE, LOG)


def assert_at_rest(optimizer: Any) -> None:
    """Nothing is under way, gathered or half done: not only is the ledger empty, so are
    all states."""
    coordinator = optimizer.coordinator
    assert optimizer.memory().buffers == 0
    assert coordinator.reducer.is_at_rest()
    for unit in getattr(coordinator.parameters, "units", {}).values():
        assert unit.state is UnitState.SHARDED, unit.name
        assert [bucket.whole for bucket in unit.buckets] == [None] * len(unit.buckets)
    assert coordinator.is_at_rest()


def send(buffer: Tensor, received: Tensor, title: str = "x") -> Pending:
    """Start to send the chunks of a buffer to all ranks, as a reduction does."""
    transport = Transport(Groups.over(None), buffer.device)
    group = transport.groups.averages
    chunks = buffer.view(group.size, -1)
    others = enumerate(group.others)
    pairs = [(chunks[rank], received[index], rank) for index, rank in others]
    buffers = buffer, received
    return transport.start("reduce_scatter", title, "step", pairs, buffers, group)


def same_on_all_ranks(logs: Sequence[Sequence[Any]]) -> bool:
    """Return whether ranks issued the same collectives in the same order."""
    calls = [[call[:4] for call in log] for log in logs]
    return all(other == calls[0] for other in calls)


def short_group(seconds: float = 3.0, members: list[int] | None = None) -> Any:
    """Return a group, of all ranks unless it is told which, whose collectives fail
    soon: a hang is what is tested."""
    return dist.new_group(members, timeout=timedelta(seconds=seconds))


def buckets_under_way(number: int) -> AbstractContextManager[Any]:
    """Change how many buckets may travel at a time."""
    return mock.patch.object(reducer, "MAX_IN_FLIGHT", number)


# ------------------------------------------------------ exceptions in users' code (EXC)


class Boom(Exception):
    """Raised by a user's code."""


def boom(*_: Any) -> None:
    """Raise it."""
    raise Boom


PLACES: dict[str, Callable[[Run, int], None]] = {}
"""By where it raises: a function that runs one iteration, up to the exception."""


def _place(function: Callable[[Run, int], None]) -> Callable[[Run, int], None]:
    PLACES[function.__name__] = function
    return function


@contextmanager
def _hooked(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_call(number: int) -> Callable[..., None]:
    """Raise at the given call, counted from 1."""
    calls = []

    def hook(*_: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            raise Boom

    return hook


@_place
def forward_of_the_root_before_units(run: Run, step: int) -> None:
    with _hooked(run.model.embedding.register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_before_a_unit(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].register_forward_pre_hook(boom)):
        run.backward(step)


@_place
def forward_inside_a_unit(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].down.register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_after_a_unit(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_of_the_root_after_units(run: Run, step: int) -> None:
    with _hooked(run.model.head.register_forward_pre_hook(boom)):
        run.backward(step)


@_place
def hook_of_the_root_after_its_forward(run: Run, step: int) -> None:
    with _hooked(run.model.register_forward_hook(boom)):
        run.backward(step)


@_place
def forward_without_gradients(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[2].register_forward_hook(boom)):
        run.evaluate(step)


@_place
def unit_called_directly(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[0].down.register_forward_hook(boom)):
        run.model.blocks[0](torch.ones(17))


@_place
def between_forward_and_backward(run: Run, step: int) -> None:
    run.loss(step, run.each()[0])
    boom()


@_place
def module_hook_in_backward(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].up.register_full_backward_hook(boom)):
        run.backward(step)


@_place
def tensor_hook_in_backward(run: Run, step: int) -> None:
    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(boom)

    with _hooked(run.model.blocks[0].down.register_forward_hook(watch)):
        run.backward(step)


@_place
def first_gradient_of_backward(run: Run, step: int) -> None:
    with _hooked(run.model.head.bias.register_hook(boom)):
        run.backward(step)


@_place
def last_gradient_of_backward(run: Run, step: int) -> None:
    with _hooked(run.model.embedding.weight.register_hook(boom)):
        run.backward(step)


@_place
def hook_after_a_gradient_of_a_unit(run: Run, step: int) -> None:
    with _hooked(
        run.model.blocks[0].up.weight.register_post_accumulate_grad_hook(boom)
    ):
        run.backward(step)


@_place
def end_of_backward(run: Run, step: int) -> None:
    """A callback of the engine, which somebody else queued."""

    def queue(*_: Any) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(boom)

    with _hooked(run.model.blocks[1].up.weight.register_hook(queue)):
        run.backward(step)


def _in_recomputation(run: Run, step: int, reentrant: bool) -> None:
    run.model.checkpoint = reentrant
    try:
        with _hooked(run.model.blocks[1].down.register_forward_hook(_on_call(2))):
            run.backward(step)
    finally:
        run.model.checkpoint = None


@_place
def recomputation(run: Run, step: int) -> None:
    _in_recomputation(run, step, False)


@_place
def reentrant_recomputation(run: Run, step: int) -> None:
    _in_recomputation(run, step, True)


@_place
def backward_inside_a_reentrant_checkpoint(run: Run, step: int) -> None:
    run.model.checkpoint = True
    try:
        with _hooked(run.model.blocks[0].up.weight.register_hook(boom)):
            run.backward(step)
    finally:
        run.model.checkpoint = None


@_place
def forward_inside_no_sync(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[1].down.register_forward_hook(boom)), run.no_sync():
        run.backward(step)


@_place
def backward_inside_no_sync(run: Run, step: int) -> None:
    with _hooked(run.model.blocks[0].up.weight.register_hook(boom)), run.no_sync():
        run.backward(step)


@_place
def backward_after_one_inside_no_sync(run: Run, step: int) -> None:
    with run.no_sync():
        run.backward(step)
    module_hook_in_backward(run, step)


@_place
def backward_after_another(run: Run, step: int) -> None:
    run.backward(step)
    module_hook_in_backward(run, step)


@_place
def closure_before_its_backward(run: Run, step: int) -> None:
    run.optimizer.step(boom)


@_place
def closure_in_its_backward(run: Run, step: int) -> None:
    run.optimizer.step(lambda: module_hook_in_backward(run, step))


@_place
def closure_after_its_backward(run: Run, step: int) -> None:
    def compute() -> None:
        run.backward(step)
        boom()

    run.optimizer.step(compute)


@_place
def inside_full_params(run: Run, step: int) -> None:
    with nullcontext() if run.torch else run.optimizer.full_params():
        boom()


@_place
def forward_inside_full_params(run: Run, step: int) -> None:
    with nullcontext() if run.torch else run.optimizer.full_params():
        forward_without_gradients(run, step)
