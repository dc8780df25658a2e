"""Collectives on one process group: what is sent, to whom, and a log of it. Nobody else
calls torch.distributed.

A reduce-scatter is a direct exchange of chunks; the sum is formed by the REDUCE kernel,
in rank order and fp32, so bits do not depend on the back end, and gloo sends half of
what its own reduce-scatter (an all-reduce) would. An all-gather works in place: native
on NCCL, the same exchange on gloo, where it costs less than the native call.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .pretend import Transfer

LOG_LENGTH = 65_536
"""Records kept; older ones are dropped."""

TAGS = 2**20


class Call(NamedTuple):
    """One collective, as one rank saw it."""

    op: str
    """"reduce_scatter", "all_gather", "broadcast" or "all_gather_words"."""
    unit: str
    """The bucket or unit that it served."""
    elements: int
    """Elements of the whole (unsharded) buffer, padding included."""
    dtype: str
    bytes: int
    """Bytes that this rank sent."""
    group: int
    """Ranks in the group."""
    phase: str
    """"init", "forward", "backward", "step" or "checkpoint"."""
    step: int
    """Optimizer steps that had finished."""


class Waits:
    """Time spent waiting for the wire: of the host on a CPU, of the current stream on a
    GPU."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def watch(self, *, on_gpu: bool) -> Iterator[None]:
        """Count what the body waits."""
        if on_gpu and not torch.cuda.is_current_stream_capturing():
            begin, end = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun

    def milliseconds(self) -> float:
        """Return the sum. On a GPU the host waits until it is known."""
        for _, end in self._events:
            end.synchronize()
        return 1000 * self._seconds + sum(
            float(begin.elapsed_time(end)) for begin, end in self._events
        )


class Work:
    """A collective under way. It holds its buffers until `wait` returns: backends may
    still read or write them."""

    def __init__(
        self,
        name: str = "",
        works: Sequence[dist.Work] = (),
        buffers: Sequence[Tensor] = (),
        waits: Waits | None = None,
    ) -> None:
        self._name = name
        self._works = works
        self._buffers = buffers
        self._waits = waits or Waits()
        self._error: RuntimeError | None = None

    @property
    def pending(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._works)

    def wait(self) -> None:
        """Wait for every part. gloo finishes parts out of order, so the last one alone
        would prove nothing.

        Raises:
            RuntimeError: a rank never took part, or has gone; names the collective. So
                does every later call.
        """
        if self._error is not None:
            raise self._error
        if not self._works:
            return
        works, self._works = self._works, ()
        on_gpu = any(buffer.is_cuda for buffer in self._buffers)
        try:
            with (
                torch.autograd.profiler.record_function(f"zerokern::wait {self._name}"),
                self._waits.watch(on_gpu=on_gpu),
            ):
                for work in works:
                    work.wait()
        except RuntimeError as error:
            self._error = RuntimeError(
                f"{self._name} did not complete: another rank never took part in it, or"
                " has ended. Every rank must run the same steps and, in stage 3, the"
                " same units. The process group is broken now: in stages 1 and 2 build"
                " a new one and a new optimizer, in stage 3 resume from a checkpoint"
            )
            raise self._error from error
        finally:
            self._buffers = ()


class Comm:
    """A process group, or a single process when there is none."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """Use `group`, or the default group, or a world of one if torch.distributed is
        not initialised.

        Raises:
            ValueError: this process is not a member of `group`.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                "this process is not a member of process_group; build the optimizer on"
                " its members only"
            )
        self.native_gather = group is not None and dist.get_backend(group) == "nccl"
        self.pretends = group is not None and dist.get_backend(group) == "fake"
        """Nothing is sent, and nothing that ranks could differ in is compared."""
        self.phase = "init"
        self.listener: Callable[[str, int], None] | None = None
        """Inside of `join`: is told what this rank is about to do."""
        self.step = 0
        self.log: deque[Call] = deque(maxlen=LOG_LENGTH)
        self.sent = self.sent_in_step = 0
        """Bytes sent since the last step, and in it."""
        self.waits, self.waits_in_step = Waits(), Waits()
        self._others = [r for r in range(self.world) if r != self.rank]
        self._global = [] if group is None else dist.get_process_group_ranks(group)

    def exchange(self, buffer: Tensor, received: Tensor, unit: str) -> Work:
        """Start the communication of a reduce-scatter: send chunk r of `buffer` to rank
        r, receive what is ours.

        Args:
            buffer: [W * S]. Must not be written before `wait`, except for this rank's
                own chunk.
            received: [W - 1, S], the chunks of the other ranks in rank order. Written.
            unit: name for the log.
        """
        if self.world == 1:
            return Work()
        self._record(
            "reduce_scatter",
            unit,
            buffer,
            buffer.numel() // self.world * (self.world - 1),
        )
        name = f"reduce_scatter of {unit!r}"
        if self.pretends:
            return self._pretend(name, (buffer, received))
        chunks = buffer.view(self.world, -1)
        transfers = [
            (chunks[r], row, r) for r, row in zip(self._others, received, strict=True)
        ]
        return Work(
            name, self._point_to_point(name, transfers), (buffer, received), self.waits
        )

    def all_gather(self, buffer: Tensor, unit: str) -> Work:
        """Start an all-gather in place: every rank's chunk of `buffer` is sent from
        where it lies.

        Args:
            buffer: [W * S]; on entry this rank's own chunk holds its data. The other
                chunks are written.
            unit: name for the log.
        """
        if self.world == 1:
            return Work()
        self._record(
            "all_gather", unit, buffer, buffer.numel() // self.world * (self.world - 1)
        )
        name = f"all_gather of {unit!r}"
        if self.pretends:
            return self._pretend(name, (buffer,))
        chunks = buffer.view(self.world, -1)
        own = chunks[self.rank]
        if self.native_gather:
            gather = (
                getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            )
            return Work(
                name,
                [gather(buffer, own, group=self.group, async_op=True)],
                (buffer,),
                self.waits,
            )
        transfers = [(own, chunks[r], r) for r in self._others]
        return Work(name, self._point_to_point(name, transfers), (buffer,), self.waits)

    def all_gather_words(self, words: Tensor) -> Tensor:
        """Return [W, K]: the K words of every rank, complete on the current stream."""
        gathered = words.new_empty(self.world, words.numel())
        gathered[self.rank].copy_(words)
        if self.world > 1:
            self._record(
                "all_gather_words", "", gathered, words.numel() * (self.world - 1)
            )
            name = "all_gather of the step's norm and used bits"
            if self.pretends:
                self._pretend(name, (gathered,)).wait()
                return gathered
            transfers = [(gathered[self.rank], gathered[r], r) for r in self._others]
            Work(
                name, self._point_to_point(name, transfers), (gathered,), self.waits
            ).wait()
        return gathered

    def broadcast(self, buffer: Tensor, unit: str) -> None:
        """Overwrite `buffer` with that of rank 0."""
        self._record("broadcast", unit, buffer, buffer.numel() if self.rank == 0 else 0)
        dist.broadcast(buffer, self._global[0], group=self.group)

    def announce(self, event: str, index: int = 0) -> None:
        """Say what this rank is about to do, if anybody listens."""
        if self.listener is not None:
            self.listener(event, index)

    def end_construction(self) -> None:
        """What was sent until now is of no step, and what comes next is of a backward,
        or says so."""
        self.sent, self.waits = 0, Waits()
        self.phase = "backward"

    def end_step(self) -> None:
        """Start counting bytes and waits anew, and keep those of the step that ends."""
        self.step += 1
        self.sent_in_step, self.sent = self.sent, 0
        self.waits_in_step, self.waits = self.waits, Waits()

    def check_agreement(
        self, fingerprint: bytes, lines: Sequence[str], device: torch.device
    ) -> None:
        """Compare a description over the ranks before anything is changed.

        Raises:
            ValueError: on all ranks, if any rank's differs: names the first line that
                does.
        """
        if self.world == 1:
            return
        words = torch.frombuffer(bytearray(fingerprint), dtype=torch.int64).to(device)
        gathered = self.all_gather_words(words)
        if not self.pretends and (gathered != gathered[0]).any():
            described: list[list[str]] = [[] for _ in range(self.world)]
            dist.all_gather_object(described, list(lines), group=self.group)
            raise ValueError(_first_difference(described))

    def _point_to_point(
        self, name: str, transfers: Sequence[tuple[Tensor, Tensor, int]]
    ) -> list[dist.Work]:
        """Start all (send, receive, rank in group) pairs in one batch, which NCCL runs
        as one grouped launch.

        Messages are tagged by name where tags exist: ranks that part ways then time
        out, and are told what they waited for, instead of taking another buffer for
        theirs.
        """
        tag = 0 if self.native_gather else zlib.crc32(name.encode()) % TAGS
        peers = [(send, receive, self._global[r]) for send, receive, r in transfers]
        operations = [
            dist.P2POp(dist.isend, send, peer, self.group, tag)
            for send, _, peer in peers
        ]
        operations += [
            dist.P2POp(dist.irecv, receive, peer, self.group, tag)
            for _, receive, peer in peers
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _pretend(self, name: str, buffers: Sequence[Tensor]) -> Work:
        call = self.log[-1]
        works: Any = [Transfer(call.op, self.world, call.bytes)]
        return Work(name, works, buffers, self.waits)

    def _record(self, op: str, unit: str, buffer: Tensor, sent: int) -> None:
        dtype = str(buffer.dtype).removeprefix("torch.")
        sent_bytes = sent * buffer.element_size()
        self.sent += sent_bytes
        self.log.append(
            Call(
                op,
                unit,
                buffer.numel(),
                dtype,
                sent_bytes,
                self.world,
                self.phase,
                self.step,
            )
        )


def _first_difference(described: Sequence[Sequence[str]]) -> str:
    for rank, lines in enumerate(described):
        for ours, first in zip(
            [*lines, "(nothing)"], [*described[0], "(nothing)"], strict=False
        ):
            if ours != first:
                return (
                    f"the ranks describe different models. Rank {rank} has: {ours}."
                    f" Rank 0 has: {first}. Every rank must build the same parameters,"
                    " in the same order, with the same options"
                )
    return "the ranks describe different models"
