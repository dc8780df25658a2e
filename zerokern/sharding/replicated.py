"""Stages 1 and 2: every rank has all parameters, and gathers them after an update."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..pretend import address
from ..transport import Gather, Transport
from .handles import ParamHandles
from .hooks import Handles, ModuleHook
from .initial import checksum_of
from .parameters import ParameterBucket, storages_of
from .placeholders import Placeholders

VERSION = operator.attrgetter("_version")


class ReplicatedBucket:
    """One bucket's parameters: views of flat memory that lives as long as they do."""

    def __init__(
        self,
        parameters: ParameterBucket,
        transport: Transport,
        *,
        in_forward: bool,
    ) -> None:
        assert parameters.flat is not None
        self.parameters = parameters
        self._views = storages_of(parameters.views_of(parameters.flat))
        self._addresses = [address(view) for view in self._views]
        for param, view in zip(parameters.params, self._views, strict=True):
            param.data = view
        self._whole = parameters.flat
        self._gather = Gather(transport, parameters.layout, parameters.name, "step")
        self._alone = transport.groups.alone
        self._is_pending = False
        self._placeholders = Placeholders(parameters.params, self)
        self._in_forward = in_forward
        self._versions: list[int] = []
        """Torch's counts of writes to the parameters, as of our last look or update."""
        self._versions = list(map(VERSION, self.parameters.params))

    def publish(self, written: Sequence[nn.Parameter]) -> None:
        """Send this rank's part, which was updated, to all ranks.

        Args:
            written: the parameters that have a new value.
        """
        # A backward that still needs the old values fails, as torch lets it after any
        # write.
        torch.autograd.graph.increment_version(written)
        self._versions = list(map(VERSION, self.parameters.params))
        if self._alone:
            return
        self._gather.start(self.parameters.own, self._whole)
        self._is_pending = True
        if self._in_forward:
            self._placeholders.substitute()
            self.parameters.hide()

    def wait(self) -> None:
        """Have the parameters whole when the current stream gets here."""
        if self._is_pending:
            self._gather.wait()
            self._is_pending = False
            if self._in_forward:
                self._placeholders.restore(self._views)
                self.parameters.show()

    def provide(self, param: nn.Parameter, reader: str) -> None:
        """Whoever reads a parameter has to wait for it."""
        self.wait()

    def follow_writes(self) -> list[int]:
        """If somebody has written to a parameter since the last time, let the master
        follow. Return the numbers of those written to, in the layout.

        Raises:
            RuntimeError: a parameter no longer is its view of the bucket, as after
                `model.to(...)`; names it and the remedy.
        """
        written = []
        versions = self._versions
        for index, param in enumerate(self.parameters.params):
            if isinstance(param, FakeTensor):
                found = address(param)
            else:
                found = param.data_ptr(), 0
            if found != self._addresses[index] or param.dtype != self.parameters.dtype:
                self._refuse_moved(index)
            version = param._version
            if version != versions[index]:
                written.append(self.parameters.handles[index].index)
                versions[index] = version
        if written:
            self.parameters.refresh_master()
        return written

    def _refuse_moved(self, index: int) -> None:
        name = self.parameters.handles[index].name
        raise RuntimeError(
            f"parameter {name!r} no longer lives in the optimizer's flat buffer: it was"
            " moved, cast or its .data was replaced. Move and cast the model before the"
            " optimizer is built, or build a new optimizer"
        )


class ReplicatedParameters:
    """All parameters of the optimizer.

    Gathers of a step are waited for at its end, or with `gather_in_forward`, bucket by
    bucket, where a parameter is first read. In the second case parameters are
    placeholders meanwhile, so whoever reads one, in whatever order, has to wait for it,
    and nobody can see a half of it.
    """

    def __init__(self, transport: Transport, *, in_forward: bool) -> None:
        self._transport = transport
        self._in_forward = in_forward
        self.shows_all = False
        """Parameters are copies, to be written back: never here."""
        self._buckets: dict[int, ReplicatedBucket] = {}
        """By their index in the layout."""
        self.mark = 0
        """Tells which parameters somebody has written to since the last step: 31 bits,
        0 if none."""
        self._is_doubtful = False
        """The ranks were found to have different parameters."""
        self._handles = Handles()

    def __del__(self) -> None:
        # Whoever drops the optimizer keeps the model; and transfers that nobody waits
        # for would block the group.
        with suppress(Exception):  # the interpreter may be on its way out
            self.wait_all()

    def add(self, parameters: ParameterBucket) -> None:
        """Take a bucket, whose parameters become views of its memory."""
        self._buckets[parameters.layout.index] = ReplicatedBucket(
            parameters, self._transport, in_forward=self._in_forward
        )

    def open(self, gone: Sequence[ParameterBucket]) -> None:
        """Before `replace`: have every parameter whole."""
        self.wait_all()

    def replace(
        self,
        gone: Sequence[ParameterBucket],
        made: Sequence[ParameterBucket],
    ) -> None:
        """Take further buckets. None goes: frozen parameters have none."""
        for parameters in made:
            self.add(parameters)

    def hook(self, modules: Sequence[nn.Module], handles: ParamHandles) -> None:
        """Wait for all parameters of a module before its forward, too: compiled code
        would not notice a placeholder."""
        for module in modules:
            found = [handles.find(param) for param in module.parameters()]
            numbers = sorted({handle.bucket for handle in found if handle is not None})
            buckets = [number for number in numbers if number in self._buckets]
            before = ReplicatedParameters._before_forward
            self._handles.add(
                ModuleHook(module, self, before, buckets).before_forward()
            )

    def _before_forward(self, buckets: Sequence[int], *_: Any) -> None:
        for index in buckets:
            self._buckets[index].wait()

    # ---------------------------------------------------------------- a step

    def prepare_step(self) -> None:
        """Have every parameter whole, and let masters follow what was written to them.

        Raises:
            RuntimeError: a parameter was moved out of its bucket.
        """
        self.wait_all()
        written: list[int] = []
        for bucket in self._buckets.values():
            written += bucket.follow_writes()
        self.mark = zlib.crc32(repr(written).encode()) >> 1 if written else 0
        if self._is_doubtful:
            self.mark = 1 + self._transport.groups.agrees.rank

    def compare(self) -> None:
        """The ranks have written to different parameters: refuse that, unless what they
        have now is the same, as after a broadcast.

        Raises:
            RuntimeError: on all ranks; says the remedy.
        """
        buckets = [bucket.parameters for bucket in self._buckets.values()]
        sums = self._transport.all_gather_words(checksum_of(buckets)).flatten()
        self._is_doubtful = bool((sums != sums[0]).any())
        if self._is_doubtful:
            raise RuntimeError(
                "parameters were written to on some ranks and not on others, and are"
                " not the same on all of them now; write to them alike on all ranks, or"
                " broadcast them afterwards. Nothing was updated"
            )

    def updated(
        self,
        parameters: ParameterBucket,
        written: Sequence[nn.Parameter],
    ) -> None:
        """The shard of a bucket was updated: send it to all ranks."""
        self._buckets[parameters.layout.index].publish(written)

    def prepare_update(self, parameters: ParameterBucket) -> None:
        """In backward: have one bucket as `prepare_step` has all of them."""
        bucket = self._buckets[parameters.layout.index]
        bucket.wait()  # if nobody has read it since its last update
        bucket.follow_writes()

    def end_step(self) -> None:
        """Wait for what was sent, unless that is for the next forward."""
        if not self._in_forward:
            self.wait_all()

    def recover(self) -> None:
        """Nothing is left of a forward that never came to its end."""

    def wait_all(self) -> None:
        """Have every parameter whole when the current stream gets here."""
        for bucket in self._buckets.values():
            bucket.wait()

    # --------------------------------------------------------------- what users ask for

    @contextmanager
    def full(self) -> Iterator[None]:
        """Make every parameter whole. Edits made inside, the same on all ranks, are
        kept."""
        self.wait_all()
        try:
            yield
        finally:
            for bucket in self._buckets.values():
                bucket.parameters.refresh_master()

    def unit_names(self) -> set[str]:
        """Return the units that have parameters: there are none."""
        return set()

    def unit_titles(self) -> list[str]:
        """Return the names of the units, for messages: there are none."""
        return []

    def gather_unit(self, index: int) -> None:
        """There are no units."""

    def memory(self) -> list[Tensor]:
        """Return what holds the parameters of this rank."""
        flats = [bucket.parameters.flat for bucket in self._buckets.values()]
        return [flat for flat in flats if flat is not None]

    def detach(self) -> None:
        """Let go of the parameters: remove the hooks, leave every parameter whole."""
        self.wait_all()
        self._handles.remove()
