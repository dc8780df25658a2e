"""Optimizer state in torch's layout, and back: what `state_dict()` and
`load_state_dict()` are made of.

Full form, torch's own: each parameter's tensors have its shape and are fp32, whatever
they are stored as; `step` is an fp32 scalar. A 16-bit parameter has `master` too.
Sharded form, without communication: the tensors are this rank's flat part as they are
stored, and `range` says which elements these are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .layout import Piece
from .saved_groups import pairs_of
from .sharding.coordinator import Coordinator
from .sharding.handles import ParamHandle
from .sharding.parameters import ParameterBucket, view_in
from .transport import Gather

NOWHERE = -1
"""The position of a parameter that was taken out of its group."""

Entry = Mapping[str, Any]
"""The state of one parameter."""


class OptimizerState:
    """The state that one coordinator keeps, by position of the parameters in the param
    groups."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._whole: dict[int, dict[str, Any]] | None = None
        """All of it, until the next step."""
        self.is_consolidated = False
        """Whether that is so here."""
        self._warned = False

    def is_plain(self) -> bool:
        """Return whether the live state is in torch's layout: a world of one that
        stores everything in fp32."""
        alone = self._coordinator.transport.groups.alone
        return alone and all(b.is_plain() for b in self._coordinator.trainable)

    def live(self) -> dict[int, dict[str, Any]]:
        """Return each trainable parameter's state on this rank as views.

        They have the parameter's shape where `is_plain`; else they are this rank's flat
        part, perhaps empty.
        """
        state: dict[int, dict[str, Any]] = {}
        plain = self.is_plain()
        steps = self._coordinator.updater.steps
        for bucket in self._coordinator.trainable:
            stored = bucket.stored()
            views = {
                name: bucket.views_of(t) for name, (t, _) in stored.items() if plain
            }
            for handle in self._of(bucket):
                entry: dict[str, Any] = {"step": steps[handle.column]}
                piece = bucket.piece_of(handle)
                for name, (tensor, per_entry) in stored.items():
                    if plain:
                        entry[name] = views[name][handle.slot]
                    else:
                        entry[name] = _part(tensor, per_entry, piece)
                if not plain:
                    entry["range"] = (piece.offset, piece.offset + piece.numel)
                state[handle.position] = entry
        state.pop(NOWHERE, None)
        return state

    def _of(self, bucket: ParameterBucket) -> list[ParamHandle]:
        """Return the handles of a bucket as they are now: param groups may have been
        edited since it was made."""
        return [self._coordinator.handles[handle.index] for handle in bucket.handles]

    def by_param(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return `live` by parameter, in the order of the param groups."""
        live = self.live()
        handles = sorted(self._coordinator.handles, key=lambda h: h.position)
        return {h.param: live[h.position] for h in handles if h.position in live}

    def reset(self, param: nn.Parameter) -> None:
        """Start the state of one parameter anew, on this rank."""
        handle = self._coordinator.handles.find(param)
        assert handle is not None
        self._coordinator.updater.steps[handle.column] = 0
        for bucket in self._coordinator.trainable:
            if bucket.layout.index == handle.bucket:
                piece = bucket.piece_of(handle)
                for name, (tensor, per_entry) in bucket.stored().items():
                    if name != "master":
                        _part(tensor, per_entry, piece).zero_()

    # ---------------------------------------------------------------- out

    def to_save(self, packed: dict[int, Any]) -> dict[int, Any]:
        """Return what `state_dict()` is to hold, given torch's packing of the live
        state. Nothing is sent."""
        alone = self._coordinator.transport.groups.alone
        if self._whole is not None:
            return self._whole
        # What was written to a parameter would be undone by a master that is loaded.
        for bucket in self._coordinator.trainable:
            bucket.refresh_master()
        if alone and not self.is_plain():
            return self.gather(None)
        if not alone and not self._warned:
            self._warned = True
            warnings.warn(
                "state_dict() holds this rank's shards only. Save it on every rank, or"
                " call full_state_dict(), or consolidate_state_dict() on all ranks"
                " first",
                stacklevel=4,
            )
        return {key: {**e, "step": e["step"].float()} for key, e in packed.items()}

    def gather(self, to: int | None) -> dict[int, dict[str, Any]]:
        """Gather every parameter's state in torch's layout, bucket by bucket, into host
        memory. Every rank must call it.

        Args:
            to: the rank that keeps the result; None: all of them. Other ranks return an
                empty dict.
        """
        self._coordinator.refuse_in_join("gathering the state")
        transport = self._coordinator.transport
        keep = to is None or to == transport.groups.shards.rank
        steps = self._coordinator.updater.steps.cpu()
        state: dict[int, dict[str, Any]] = {}
        for bucket in self._coordinator.trainable:
            layout = bucket.layout
            handles = self._of(bucket)
            for handle in handles:
                state[handle.position] = {"step": steps[handle.column].float()}
            for name, field in bucket.states().items():
                title = f"{name} {layout.index}"
                gather = Gather(transport, layout, title, "checkpoint")
                values = transport.take(layout.shard_numel, torch.float32)
                ops.load_state_(values, bucket.shard, field)
                gather.start(values)
                views = bucket.views_of(gather.wait())
                for handle, view in zip(handles, views, strict=True):
                    if keep:
                        copy = torch.empty_like(view, device="cpu").copy_(view)
                        state[handle.position][name] = copy
                gather.free()
                transport.give(values)
        state.pop(NOWHERE, None)
        return state if keep else {}

    def consolidate(self, to: int) -> None:
        """Gather the state to one rank, whose `to_save` has all of it until
        `forget`."""
        gathered = self.gather(to)
        if to == self._coordinator.transport.groups.shards.rank:
            self._whole = gathered
            self.is_consolidated = True

    def forget(self) -> None:
        """Drop what was gathered: it is out of date."""
        self._whole = None
        self.is_consolidated = False

    # ---------------------------------------------------------------- in

    @torch.no_grad()
    def load_into(
        self,
        groups: Sequence[MutableMapping[str, Any]],
        state_dict: Mapping[str, Any],
    ) -> None:
        """Load a state dict, in place.

        Args:
            groups: torch's param groups, whose options are replaced.
            state_dict: of torch's layout, or our own.

        Raises:
            ValueError: it is of another model or another sharding. Nothing was changed.
        """
        paired = pairs_of(groups, state_dict["param_groups"])
        entries = {}
        for ours, _, keys in paired:
            for param, key in zip(ours["params"], keys, strict=True):
                handle = self._coordinator.handles.find(param)
                if handle is not None and key in state_dict["state"]:
                    entries[handle.position] = state_dict["state"][key]
        self._check(entries)
        self._load(entries)
        for ours, theirs, _ in paired:
            for name, value in theirs.items():
                if name not in ("params", "param_names"):
                    ours[name] = value

    def _load(self, state: Mapping[int, Entry]) -> None:
        """Copy a state into the shards, rounded to their formats; parameters without
        state start from zero.

        What was saved by this optimizer comes back as the same bits, since its values
        are exact in fp32. A missing `master` (a checkpoint of torch's own AdamW) is
        made from the parameter.
        """
        steps = self._coordinator.updater.steps
        transport = self._coordinator.transport
        for bucket in self._coordinator.trainable:
            handles = self._of(bucket)
            entries = [state.get(handle.position, {}) for handle in handles]
            for handle, entry in zip(handles, entries, strict=True):
                # Torch's SGD does not count.
                step = entry.get("step", int(entry.get("momentum_buffer") is not None))
                if isinstance(step, Tensor):
                    step = step.to(torch.int64)
                steps[handle.column] = step
            # Copies, since a sharded state may be made of views of these very shards.
            sharded = [_copied(entry) if "range" in entry else {} for entry in entries]
            for name, field in bucket.states().items():
                values = transport.take(bucket.layout.shard_numel, torch.float32)
                _form(values, bucket, name, entries)
                # Only now, as the entries may be views of the shard.
                ops.store_state_(bucket.shard, field, values)
                transport.give(values)
            _load_sharded(bucket, sharded)
            _follow_masters(bucket, entries)
        self.forget()

    def _check(self, state: Mapping[int, Entry]) -> None:
        """Refuse a state that does not fit, before anything is changed."""
        ours = self.live()
        for bucket in self._coordinator.trainable:
            for handle in self._of(bucket):
                entry = state.get(handle.position)
                if entry is None:
                    continue
                for name in bucket.moments:
                    # Torch's SGD has none before its first step.
                    if name not in entry and name != "momentum_buffer":
                        raise ValueError(
                            f"the state of {handle.name!r} has {sorted(entry)} but no"
                            f" {name!r}: it is of another optimizer"
                        )
                if "range" in entry:
                    _check_sharded(handle, entry, ours[handle.position])
                else:
                    _check_full(handle, entry, bucket)


def _check_full(handle: ParamHandle, entry: Entry, bucket: ParameterBucket) -> None:
    shape = tuple(handle.param.shape)
    for name in bucket.states():
        if entry.get(name) is not None and tuple(entry[name].shape) != shape:
            raise ValueError(
                f"{name!r} of {handle.name!r} has shape {tuple(entry[name].shape)};"
                f" it must be {shape}: the state is of another model"
            )


def _check_sharded(handle: ParamHandle, entry: Entry, ours: Entry) -> None:
    if tuple(entry["range"]) != tuple(ours.get("range", ())):
        raise ValueError(
            f"the state of {handle.name!r} is a shard of elements"
            f" {tuple(entry['range'])}, this rank holds"
            f" {ours.get('range', 'all of it')}: sharded states load at the world size,"
            " rank and layout they were saved with; save full_state_dict() to load"
            " anywhere"
        )
    for name, tensor in ours.items():
        if not isinstance(tensor, Tensor) or name == "step":
            continue
        theirs = entry.get(name)
        found = None if theirs is None else (tuple(theirs.shape), theirs.dtype)
        needed = tuple(tensor.shape), tensor.dtype
        if found != needed:
            raise ValueError(
                f"{name!r} of {handle.name!r} is {found}; it must be {needed}: sharded"
                " states load into the precision they were saved with; save"
                " full_state_dict() to load into any"
            )


def _part(tensor: Tensor, per_entry: int, piece: Piece) -> Tensor:
    """Return what a stored tensor, with an entry per `per_entry` elements, has of a
    piece."""
    end = -(-(piece.start + piece.numel) // per_entry)
    return tensor[piece.start // per_entry : end]


def _copied(entry: Entry) -> Entry:
    copy = {}
    for name, value in entry.items():
        copy[name] = value.clone() if isinstance(value, Tensor) else value
    return copy


def _form(
    values: Tensor,
    bucket: ParameterBucket,
    name: str,
    entries: Sequence[Entry],
) -> None:
    """Form one state of a bucket's shard in fp32, of what is in full form."""
    values.copy_(bucket.own) if name == "master" else values.zero_()
    for handle, entry in zip(bucket.handles, entries, strict=True):
        piece = bucket.piece_of(handle)
        value = entry.get(name)
        if piece.numel and value is not None and "range" not in entry:
            flat = _in_memory_order(value, bucket.strides[handle.slot])
            part = flat[piece.offset : piece.offset + piece.numel]
            values[piece.start : piece.start + piece.numel].copy_(part)


def _load_sharded(bucket: ParameterBucket, entries: Sequence[Entry]) -> None:
    """Copy what is of sharded form, as it is stored."""
    master = bucket.shard.master
    for handle, entry in zip(bucket.handles, entries, strict=True):
        piece = bucket.piece_of(handle)
        if piece.numel and "range" in entry:
            for name, (tensor, per_entry) in bucket.stored().items():
                _part(tensor, per_entry, piece).copy_(entry[name])
            if master is not None and master.dtype == torch.float32:
                # Else the next update would take the parameter for a later write.
                _part(bucket.own, 1, piece).copy_(_part(master, 1, piece))


def _follow_masters(bucket: ParameterBucket, entries: Sequence[Entry]) -> None:
    """Let 16-bit parameters be what their masters round to, where these were loaded in
    full form: else the next update would start from the parameters."""
    if bucket.shard.master is None:
        return
    for handle, entry in zip(bucket.handles, entries, strict=True):
        master = entry.get("master")
        if master is None or "range" in entry:
            continue
        if bucket.flat is not None:
            bucket.views_of(bucket.flat)[handle.slot].copy_(master)
            continue
        piece = bucket.piece_of(handle)
        part = _in_memory_order(master, bucket.strides[handle.slot])
        part = part[piece.offset : piece.offset + piece.numel]
        bucket.own[piece.start : piece.start + piece.numel].copy_(part)


def _in_memory_order(value: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a tensor's elements, flat, in the order in which a parameter of that
    stride stores them."""
    flat = value.new_empty(value.numel())
    view_in(flat, 0, value.shape, stride).copy_(value)
    return flat
