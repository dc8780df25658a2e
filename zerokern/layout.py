"""Where every element lives: parameters -> slots -> buckets -> shards. Pure arithmetic,
no tensors, no torch.

Coordinators, checkpoints and the planner all read this one table. It is the same on
every rank (compared by fingerprint at construction), and everything that depends on the
rank is a function of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK = 64
"""Slots and shards start at multiples of this many elements, so that kernels keep
128-bit accesses in every dtype."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter, as far as the layout depends on it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    """Bytes per element."""
    trainable: bool = True
    """Frozen parameters take part in gathers (stage 3) only."""
    unit: str = ""
    """Stage 3: the unit that gathers it. "" is the root unit."""

    @property
    def numel(self) -> int:
        """Elements."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket: elements [start, end); the next slot starts at
    a multiple of BLOCK."""

    param: int
    """Index in Layout.params."""
    start: int
    numel: int

    @property
    def end(self) -> int:
        """First element past the parameter."""
        return self.start + self.numel

    @property
    def padded_end(self) -> int:
        """First element past the padding."""
        return round_up(self.end, BLOCK)


@dataclass(frozen=True)
class Piece:
    """The part of a parameter in one rank's shard: shard[start : start + numel] =
    param.flat[offset : ...]."""

    param: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """A flat buffer of one dtype, gathered, reduced and updated as a whole. Rank r owns
    the r-th of equal shards."""

    index: int
    unit: str
    dtype: str
    itemsize: int
    trainable: bool
    slots: tuple[Slot, ...]
    world: int

    @cached_property
    def payload(self) -> int:
        """Elements of parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def numel(self) -> int:
        """Elements with padding: a multiple of world x BLOCK."""
        return round_up(self.slots[-1].padded_end, self.world * BLOCK)

    @cached_property
    def padding(self) -> list[tuple[int, int]]:
        """Ranges of elements, (first, end), that are of no parameter."""
        following = [*(slot.start for slot in self.slots[1:]), self.numel]
        return [
            (slot.end, start)
            for slot, start in zip(self.slots, following, strict=True)
            if slot.end < start
        ]

    @property
    def shard_numel(self) -> int:
        """Elements per rank."""
        return self.numel // self.world

    def shard(self, rank: int) -> slice:
        """Return the elements that `rank` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the non-empty parts of parameters in the shard of `rank`, in order.
        Cuts ignore parameter borders."""
        cut = self.shard(rank)
        pieces = []
        for slot in self.slots:
            start = max(slot.start, cut.start)
            end = min(slot.end, cut.stop)
            if start < end:
                pieces.append(
                    Piece(
                        slot.param, start - cut.start, start - slot.start, end - start
                    )
                )
        return tuple(pieces)

    def runs(self, rank: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return (first block, end block, param, origin) of each stretch of one
        parameter in the shard of `rank`.

        Block b of the shard is block b + origin of the parameter. The runs cover the
        shard: the padding at the end of a bucket counts as part of its last parameter.
        """
        first = rank * self.shard_numel // BLOCK
        end = (rank + 1) * self.shard_numel // BLOCK
        runs = []
        for position, slot in enumerate(self.slots):
            last = position == len(self.slots) - 1
            low = max(slot.start // BLOCK, first)
            high = min((self.numel if last else slot.padded_end) // BLOCK, end)
            if low < high:
                runs.append(
                    (low - first, high - first, slot.param, first - slot.start // BLOCK)
                )
        return tuple(runs)


@dataclass(frozen=True)
class Layout:
    """All parameters and buckets. Buckets are in the order in which gradients are
    expected to become ready."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    world: int

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(param.numel for param in self.params)

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)

    def lines(self) -> list[str]:
        """Return a description with one parameter or bucket per line; ranks must agree
        on all of them."""
        lines = [f"world size {self.world}"]
        for index, p in enumerate(self.params):
            kind = "trainable" if p.trainable else "frozen"
            lines.append(
                f"parameter {index} {p.name!r}: shape {p.shape}, {p.dtype}, {kind},"
                f" unit {p.unit!r}"
            )
        lines += [
            f"bucket {b.index}: unit {b.unit!r}, {b.dtype}, slots"
            f" {[s.param for s in b.slots]}"
            for b in self.buckets
        ]
        return lines


def fingerprint(lines: Iterable[str]) -> bytes:
    """Return 32 bytes that differ when any line differs."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def bucketed(params: Sequence[ParamSpec], world: int, bucket_bytes: int) -> Layout:
    """Lay out stages 1 and 2: consecutive trainable parameters in reverse order, one
    dtype to a bucket.

    The reverse of registration is about the order in which backward finishes gradients.
    A bucket is closed before it would pass `bucket_bytes`. Frozen parameters have no
    slot.
    """
    members = _by_bytes(params, range(len(params)), bucket_bytes)
    return Layout(tuple(params), _buckets(params, members, world), world)


def by_unit(params: Sequence[ParamSpec], world: int) -> Layout:
    """Lay out stage 3: in each unit one bucket for each (dtype, trainable or frozen),
    last units first.

    The root unit comes last, since the embedding's gradient does.
    """
    members = _by_unit(params, range(len(params)))
    return Layout(tuple(params), _buckets(params, members, world), world)


def grown(
    layout: Layout, params: Sequence[ParamSpec], bucket_bytes: int | None
) -> Layout:
    """Return a layout with more parameters to train, in buckets of their own.

    Buckets of other parameters stay as they are. A frozen one that has lost parameters
    keeps its number and is cut anew, or is gone.

    Args:
        layout: the one so far.
        params: those of `layout`, some of which were frozen and are trainable now, then
            further ones.
        bucket_bytes: as of `bucketed`; None: as `by_unit`.
    """
    known = len(layout.params)
    added = [
        index
        for index, param in enumerate(params)
        if index >= known or param.trainable != layout.params[index].trainable
    ]
    buckets = []
    for bucket in layout.buckets:
        left = [slot.param for slot in bucket.slots if slot.param not in added]
        if len(left) == len(bucket.slots):
            buckets.append(bucket)
        elif left:
            buckets += _buckets(params, [left], layout.world, bucket.index)
    if bucket_bytes is None:
        members = _by_unit(params, added)
    else:
        members = _by_bytes(params, added, bucket_bytes)
    first = 1 + max((bucket.index for bucket in layout.buckets), default=-1)
    fresh = _buckets(params, members, layout.world, first)
    return Layout(tuple(params), (*buckets, *fresh), layout.world)


def _by_bytes(
    params: Sequence[ParamSpec], chosen: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    closed: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    for index in reversed(chosen):
        param = params[index]
        if not param.trainable:
            continue
        members = filling.setdefault(param.dtype, [])
        numel = param.numel + sum(params[i].numel for i in members)
        if members and numel * param.itemsize > bucket_bytes:
            closed.append(filling.pop(param.dtype))
            filling[param.dtype] = members = []
        members.append(index)
    return [*closed, *filling.values()]


def _by_unit(params: Sequence[ParamSpec], chosen: Sequence[int]) -> list[list[int]]:
    units: dict[str, dict[tuple[str, bool], list[int]]] = {}
    for index in chosen:
        param = params[index]
        kinds = units.setdefault(param.unit, {})
        kinds.setdefault((param.dtype, param.trainable), []).append(index)
    order = [unit for unit in reversed(units) if unit]
    order += [unit for unit in units if not unit]
    return [members for unit in order for members in units[unit].values()]


def _buckets(
    params: Sequence[ParamSpec],
    groups: Iterable[Sequence[int]],
    world: int,
    first_index: int = 0,
) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    for number, members in enumerate(groups):
        slots: list[Slot] = []
        for index in members:
            start = slots[-1].padded_end if slots else 0
            slots.append(Slot(index, start, params[index].numel))
        first = params[members[0]]
        what = first.unit, first.dtype, first.itemsize, first.trainable
        buckets.append(Bucket(first_index + number, *what, tuple(slots), world))
    return tuple(buckets)
