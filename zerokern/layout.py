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
    closed: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    for index in reversed(range(len(params))):
        param = params[index]
        if not param.trainable:
            continue
        members = filling.setdefault(param.dtype, [])
        if (
            members
            and sum(params[i].numel for i in [*members, index]) * param.itemsize
            > bucket_bytes
        ):
            closed.append(filling.pop(param.dtype))
            filling[param.dtype] = members = []
        members.append(index)
    return _layout(params, [*closed, *filling.values()], world)


def by_unit(params: Sequence[ParamSpec], world: int) -> Layout:
    """Lay out stage 3: in each unit one bucket for each (dtype, trainable or frozen),
    last units first.

    The root unit comes last, since the embedding's gradient does.
    """
    units: dict[str, dict[tuple[str, bool], list[int]]] = {}
    for index, param in enumerate(params):
        units.setdefault(param.unit, {}).setdefault(
            (param.dtype, param.trainable), []
        ).append(index)
    order = [unit for unit in reversed(units) if unit] + [
        unit for unit in units if not unit
    ]
    return _layout(
        params, [members for unit in order for members in units[unit].values()], world
    )


def _layout(
    params: Sequence[ParamSpec], groups: Iterable[Sequence[int]], world: int
) -> Layout:
    buckets: list[Bucket] = []
    for members in groups:
        slots: list[Slot] = []
        for index in members:
            slots.append(
                Slot(index, slots[-1].padded_end if slots else 0, params[index].numel)
            )
        first = params[members[0]]
        buckets.append(
            Bucket(
                len(buckets),
                first.unit,
                first.dtype,
                first.itemsize,
                first.trainable,
                tuple(slots),
                world,
            )
        )
    return Layout(tuple(params), tuple(buckets), world)
