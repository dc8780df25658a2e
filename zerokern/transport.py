"""Transfers between ranks: each is an object with its buffers, its name and phase in
the log, and the kernel that it ends in. Nobody else calls torch.distributed.

A reduce-scatter is a direct exchange of chunks; the sum is formed by the REDUCE kernel,
in rank order and fp32, so bits do not depend on the back end, and gloo sends half of
what its own reduce-scatter (an all-reduce) would. An all-gather works in place: native
on NCCL, the same exchange on gloo, where it costs less than the native call.

A transfer has one hop today, over one group, in the dtype of its buffer. Further hops
and other formats on the wire belong here: who starts and waits for a transfer sees
neither.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops, pretend
from .announcements import Announcements
from .comm_log import Call, StreamWaits
from .groups import Group, Groups
from .layout import Bucket
from .streams import SideStream

LOG_LENGTH = 65_536
"""Records kept; older ones are dropped."""

TAGS = 2**20

Pairs = Sequence[tuple[Tensor, Tensor, int]]
"""For each peer: the tensor to send, the tensor to receive into, its rank."""


class Transport:
    """What all transfers of an optimizer share: groups, temporary memory, a side
    stream, the log."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.groups, self.device, self.side = groups, device, SideStream(device)
        self.announcements = Announcements()
        self.poison = False
        """Fill temporary memory with NaN on the way out and back (tests)."""
        self.live_bytes = self.peak_bytes = 0
        """Temporary memory that is out, and the most that ever was."""
        self.log: deque[Call] = deque(maxlen=LOG_LENGTH)
        self.step = 0
        """Optimizer steps that have finished."""
        self.sent_in_step = self._sent = 0
        """Bytes sent in the last step, and since."""
        self.stream_waits, self._stream_in_step = StreamWaits(), StreamWaits()
        self._host = self._host_in_step = 0.0
        """Seconds that the host has waited since the last step, and in it."""
        self._building = True
        if device.type == "cpu" and not pretend.LISTENERS:
            # glibc maps a block afresh, page fault by page fault, unless a larger one
            # was freed before; its limit is 32 MiB.
            torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")

    # ------------------------------------------------------------ temporary memory

    def take(
        self,
        shape: int | tuple[int, ...],
        dtype: torch.dtype,
        *,
        gathered: bool = False,
    ) -> Tensor:
        """Return an uninitialised tensor.

        Args:
            shape, dtype: of the tensor.
            gathered: it is for parameters, which a rehearsal counts apart.
        """
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        self.live_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if pretend.LISTENERS:
            pretend.announce_scratch(tensor.nbytes, gathered=gathered)
        return tensor

    def give(
        self, tensor: Tensor, *, gathered: bool = False, may_be_kept: bool = False
    ) -> None:
        """End the life of a tensor from `take`; the caller drops its references. If it
        `may_be_kept` by others, it lives on as long as these."""
        if self.poison and not may_be_kept and tensor.is_floating_point():
            tensor.fill_(math.nan)
        self.live_bytes -= tensor.nbytes
        if pretend.LISTENERS:
            pretend.announce_scratch(-tensor.nbytes, gathered=gathered)

    # ------------------------------------------------------------ steps

    def end_construction(self) -> None:
        """Start counting; construction belongs to no step."""
        self._building = False
        self._sent, self._host, self.stream_waits = 0, 0.0, StreamWaits()

    def end_step(self) -> None:
        """Start counting bytes and waits anew, and keep those of the step that ends."""
        self.step += 1
        self.sent_in_step, self._sent = self._sent, 0
        self._host_in_step, self._host = self._host, 0.0
        if self.device.type == "cuda":
            self._stream_in_step, self.stream_waits = self.stream_waits, StreamWaits()

    def wait_ms_in_step(self) -> float:
        """Return how long the last step has waited: the host on a CPU, the stream on a
        GPU, for which the host waits now."""
        return 1000 * self._host_in_step + self._stream_in_step.milliseconds()

    def add_wait(self, seconds: float) -> None:
        """The host has waited for a collective."""
        self._host += seconds

    # ------------------------------------------------------------ collectives

    def all_gather_words(self, words: Tensor, title: str = "") -> Tensor:
        """Return [W, K]: the K words of every rank, complete on the current stream.
        Without a title they are the step's norm and used bits."""
        group = self.groups.agrees
        gathered = words.new_empty(group.size, words.numel())
        own = gathered[group.rank]
        own.copy_(words)
        if group.size > 1:
            pairs = []
            for rank in group.peers:
                pairs.append((own, gathered[rank], rank))
            op = "all_gather_words"
            self.start(op, title, "step", pairs, (gathered,), group).wait()
        return gathered

    def broadcast(self, buffer: Tensor, title: str) -> None:
        """Overwrite `buffer` with that of rank 0."""
        group = self.groups.agrees
        sent = buffer.nbytes if group.rank == 0 else 0
        self._record("broadcast", title, "init", buffer, sent, group)
        dist.broadcast(buffer, group.global_ranks[0], group=group.process_group)

    def start(
        self,
        op: str,
        title: str,
        phase: str,
        pairs: Pairs,
        buffers: Sequence[Tensor],
        group: Group,
    ) -> Pending:
        """Start a collective, and log it.

        Args:
            op, title, phase: for the log.
            pairs: what goes where; all of one size.
            buffers: which these are parts of, the whole (unsharded) one first.
            group: whose ranks are meant.
        """
        sent = pairs[0][0].nbytes * len(group.others)
        self._record(op, title, phase, buffers[0], sent, group)
        name = f"{op} of {title!r}"
        if not title:
            name = "all_gather of the step's norm and used bits"
        works: Any
        if group.is_fake:
            works = [pretend.Transfer(op, group.size, sent)]
        elif group.is_nccl and op == "all_gather":
            gather = dist.all_gather_into_tensor
            if hasattr(dist, "all_gather_single"):
                gather = dist.all_gather_single
            own = pairs[0][0]
            works = [gather(buffers[0], own, group=group.process_group, async_op=True)]
        else:
            works = self.point_to_point(name, pairs, group)
        return Pending(name, works, buffers, self)

    def point_to_point(self, name: str, pairs: Pairs, group: Group) -> list[dist.Work]:
        """Start all pairs in one batch, which NCCL runs as one grouped launch. Messages
        are tagged by name where tags exist: ranks that part ways then time out, and are
        told what they waited for, instead of taking another buffer for theirs."""
        tag = 0 if group.is_nccl else zlib.crc32(name.encode()) % TAGS
        process_group = group.process_group
        sends, receives = [], []
        for send, receive, rank in pairs:
            peer = group.global_ranks[rank]
            sends.append(dist.P2POp(dist.isend, send, peer, process_group, tag))
            receives.append(dist.P2POp(dist.irecv, receive, peer, process_group, tag))
        return dist.batch_isend_irecv(sends + receives)

    def _record(
        self, op: str, title: str, phase: str, buffer: Tensor, sent: int, group: Group
    ) -> None:
        if self._building:
            phase = "init"
        elif torch._C._current_graph_task_id() != -1:
            phase = "backward"
        dtype = str(buffer.dtype).removeprefix("torch.")
        what = op, title, buffer.numel(), dtype, sent, group.size
        self._sent += sent
        self.log.append(Call(*what, phase, self.step))


class Pending:
    """A collective under way. It holds its buffers until `wait` returns: back ends may
    still read or write them."""

    def __init__(
        self,
        name: str,
        works: Sequence[dist.Work],
        buffers: Sequence[Tensor],
        transport: Transport,
    ) -> None:
        self.name = name
        self._works, self._buffers, self._transport = works, buffers, transport
        self._error: RuntimeError | None = None

    def wait(self) -> None:
        """Wait for every part. gloo finishes parts out of order, so the last one alone
        would prove nothing.

        Raises:
            RuntimeError: a rank never took part, or has gone; names the collective. So
                does every later call.
        """
        if self._error is not None:
            raise self._error
        works, self._works = self._works, ()
        if not works:
            return
        on_gpu, transport = self._buffers[0].is_cuda, self._transport
        with torch.autograd.profiler.record_function(f"zerokern::wait {self.name}"):
            mark = transport.stream_waits.begin() if on_gpu else None
            begun = time.perf_counter()
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._error = RuntimeError(
                    f"{self.name} did not complete: another rank never took part in"
                    " it, or has ended. Every rank must run the same steps and, in"
                    " stage 3, the same units. The process group is broken now: in"
                    " stages 1 and 2 build a new one and a new optimizer, in stage 3"
                    " resume from a checkpoint"
                )
                raise self._error from error
            finally:
                self._buffers = ()
            if on_gpu:
                transport.stream_waits.end(mark)
            else:
                transport.add_wait(time.perf_counter() - begun)


class Gather:
    """The all-gather of one bucket: every rank's shard, side by side in one buffer."""

    def __init__(
        self, transport: Transport, bucket: Bucket, title: str, phase: str
    ) -> None:
        """Prepare; title and phase are for the log."""
        self._transport, self._group = transport, transport.groups.shards
        self._title, self._phase = title, phase
        self._numel, self._own = bucket.numel, bucket.shard(self._group.rank)
        self._buffer: Tensor | None = None
        self._is_temporary = False
        self._pending: Pending | None = None

    def start(self, shard: Tensor, whole: Tensor | None = None) -> None:
        """Send this rank's shard to all others.

        Args:
            shard: [S].
            whole: [W * S], where the shards are gathered, this one being a part of it.
                None for temporary memory, new for every gather: whoever keeps a view of
                it keeps its values.
        """
        group, buffer = self._group, whole
        if buffer is None:
            buffer = self._transport.take(self._numel, shard.dtype, gathered=True)
            buffer[self._own].copy_(shard)
        self._buffer, self._is_temporary = buffer, whole is None
        if group.size > 1:
            chunks = buffer.view(group.size, -1)
            own = chunks[group.rank]
            pairs = []
            for rank in group.peers:
                pairs.append((own, chunks[rank], rank))
            what = "all_gather", self._title, self._phase, pairs, (buffer,), group
            self._pending = self._transport.start(*what)

    def wait(self) -> Tensor:
        """Return the whole buffer, complete when the current stream gets here."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        assert self._buffer is not None
        return self._buffer

    def free(self) -> None:
        """Let temporary memory go, once nothing is under way. Whoever has a view of it
        keeps it alive."""
        pending, self._pending = self._pending, None
        buffer, self._buffer = self._buffer, None
        try:
            if pending is not None:
                pending.wait()
        finally:
            if self._is_temporary and buffer is not None:
                self._transport.give(buffer, gathered=True, may_be_kept=True)


class Reduce:
    """The reduce-scatter of one bucket's gradients: chunks are exchanged, then REDUCE
    forms the sum: on a GPU on the side, so that backward goes on."""

    def __init__(
        self, transport: Transport, bucket: Bucket, title: str, partials: Tensor
    ) -> None:
        """Prepare. `partials`, fp64, gets the sums of squares of this rank's shard."""
        self.title = title
        self._transport, self._group = transport, transport.groups.averages
        self._own = bucket.shard(self._group.rank)
        self._kernel = ops.prepared_reduce(
            partials, rank=self._group.rank, scale=1.0 / self._group.size
        )
        self._squares = ops.prepared_reduce(partials, rank=0, scale=1.0)
        self._pending: Pending | None = None
        # What REDUCE reads and writes is held until it has run, not until it was
        # queued: memory that goes back to the main stream's allocator would be handed
        # on while the side stream still works on it.
        self._held: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None
        self._formed: torch.cuda.Event | None = None

    def start(
        self, addends: Tensor, shard: Tensor, accumulated: Tensor | None = None
    ) -> None:
        """Start.

        Args:
            addends: [W * S], this rank's. Not to be written before `finish` returns.
            shard: [S]. Written with the mean; may be this rank's part of `addends`.
            accumulated: [S], added to the mean; written, too. May be `shard`, but not
                this rank's part of `addends`.
        """
        transport, group = self._transport, self._group
        shape = group.size - 1, shard.numel()
        received = transport.take(shape, addends.dtype)
        self._held = addends, received, shard, accumulated
        if group.size > 1:
            chunks = addends.view(group.size, -1)
            pairs = []
            for index, rank in enumerate(group.peers):
                pairs.append((chunks[rank], received[index], rank))
            what = "reduce_scatter", self.title, "step", pairs, (addends, received)
            self._pending = transport.start(*what, group)
        if transport.side.stream is not None:
            with transport.side.queue():
                self._form_sum()
            self._formed = transport.side.record()

    def finish(self) -> None:
        """Have the sum when the current stream gets here, and let go of everything."""
        if self._formed is None:
            self._form_sum()
        else:
            self._transport.side.wait(self._formed)
        assert self._held is not None
        self._transport.give(self._held[1])
        self._held = self._pending = self._formed = None

    def _form_sum(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        assert self._held is not None
        addends, received, shard, accumulated = self._held
        out = shard if accumulated is None else accumulated
        with torch.autograd.profiler.record_function(f"zerokern::reduce {self.title}"):
            own, accumulate = addends[self._own], accumulated is not None
            self._kernel(out, own, received, accumulate=accumulate)
            if out is not shard:
                shard.copy_(out)

    def alone(self, addends: Tensor, shard: Tensor) -> None:
        """World of one: form the mean of one addend. Arguments as of `start`."""
        nothing = addends.new_empty(0, shard.numel())
        self._kernel(shard, addends[self._own], nothing, accumulate=False)

    def sum_squares(self, shard: Tensor) -> None:
        """Form the sums of squares anew, of a shard [S] that was written to since."""
        self._squares(shard, shard, shard.new_empty(0, shard.numel()), accumulate=False)
