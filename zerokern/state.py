"""Optimizer state in torch's layout, and back: what `state_dict()` and
`load_state_dict()` are made of.

Full form, torch's own: each parameter's tensors have its shape and are fp32, whatever
they are stored as; `step` is an fp32 scalar. A 16-bit parameter has `master` too.
Sharded form, without communication: the tensors are this rank's flat part as they are
stored, and `range` says which elements these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .buffers import ParameterBucket, view_in
from .layout import Piece
from .stages.zero1 import Zero1


def torch_layout(zero: Zero1) -> bool:
    """Return whether the live state is in torch's layout: a world of one that stores
    everything in fp32."""
    return zero.comm.world == 1 and all(
        parameters.is_plain() for parameters in zero.trainable
    )


def live_state(zero: Zero1) -> dict[int, dict[str, Any]]:
    """Return each trainable parameter's state on this rank as views, by index in the
    layout.

    They have the parameter's shape where `torch_layout`; else they are this rank's flat
    part, perhaps empty.
    """
    state: dict[int, dict[str, Any]] = {}
    alone = torch_layout(zero)
    for parameters in zero.trainable:
        stored = parameters.stored()
        pieces = {
            piece.param: piece for piece in parameters.bucket.pieces(zero.comm.rank)
        }
        whole = (
            {name: parameters.views_of(tensor) for name, (tensor, _) in stored.items()}
            if alone
            else {}
        )
        for index, slot in enumerate(parameters.bucket.slots):
            entry: dict[str, Any] = {
                "step": zero.scalars.steps[zero.row_of[slot.param]]
            }
            piece = pieces.get(slot.param, Piece(slot.param, 0, 0, 0))
            for name, (tensor, per_entry) in stored.items():
                entry[name] = (
                    whole[name][index] if alone else _part(tensor, per_entry, piece)
                )
            if not alone:
                entry["range"] = (piece.offset, piece.offset + piece.numel)
            state[slot.param] = entry
    return state


def _part(tensor: Tensor, per_entry: int, piece: Piece) -> Tensor:
    """Return what a stored tensor, with an entry per `per_entry` elements, has of a
    piece."""
    return tensor[
        piece.start // per_entry : -(-(piece.start + piece.numel) // per_entry)
    ]


def full_state(zero: Zero1, to: int | None) -> dict[int, dict[str, Any]]:
    """Gather every parameter's state in torch's layout, bucket by bucket, into host
    memory. Every rank must call it.

    Args:
        zero: the coordinator.
        to: the rank that keeps the result; None: all of them. Other ranks return an
            empty dict.
    """
    phase, zero.comm.phase = zero.comm.phase, "checkpoint"
    keep = to is None or to == zero.comm.rank
    steps = zero.scalars.steps.cpu()
    rows = {
        slot.param: zero.row_of[slot.param]
        for p in zero.trainable
        for slot in p.bucket.slots
    }
    state: dict[int, dict[str, Any]] = {
        param: {"step": steps[row].float()} for param, row in rows.items()
    }
    for parameters in zero.trainable:
        for name, field in parameters.states().items():
            whole = zero.scratch.take(parameters.bucket.numel, torch.float32)
            ops.load_state_(
                whole[parameters.bucket.shard(zero.comm.rank)], parameters.shard, field
            )
            zero.comm.all_gather(whole, f"{name} {parameters.bucket.index}").wait()
            if keep:
                for slot, view in zip(
                    parameters.bucket.slots, parameters.views_of(whole), strict=True
                ):
                    state[slot.param][name] = torch.empty_like(
                        view, device="cpu"
                    ).copy_(view)
            zero.scratch.give(whole)
    zero.comm.phase = phase
    return state if keep else {}


def check_state(zero: Zero1, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse a state that does not fit, before anything is changed.

    Raises:
        ValueError: names the parameter, what it has and what it needs.
    """
    ours = live_state(zero)
    parameters_of = {slot.param: p for p in zero.trainable for slot in p.bucket.slots}
    for param, entry in state.items():
        if param not in ours:
            continue  # frozen since it was saved: nothing to load into
        spec, parameters = zero.layout.params[param], parameters_of[param]
        for name in parameters.moments:
            # Torch's SGD has none before its first step.
            if name not in entry and name != "momentum_buffer":
                raise ValueError(
                    f"the state of {spec.name!r} has {sorted(entry)} but no {name!r}:"
                    " it is of another optimizer"
                )
        if "range" in entry:
            _check_sharded(spec.name, entry, ours[param])
            continue
        for name in parameters.states():
            if entry.get(name) is not None and tuple(entry[name].shape) != spec.shape:
                raise ValueError(
                    f"{name!r} of {spec.name!r} has shape {tuple(entry[name].shape)};"
                    f" it must be {spec.shape}: the state is of another model"
                )


def _check_sharded(
    param: str, entry: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    if tuple(entry["range"]) != tuple(ours.get("range", ())):
        raise ValueError(
            f"the state of {param!r} is a shard of elements {tuple(entry['range'])},"
            f" this rank holds {ours.get('range', 'all of it')}: sharded states load at"
            " the world size, rank and layout they were saved with; save"
            " full_state_dict() to load anywhere"
        )
    for name, tensor in ours.items():
        if isinstance(tensor, Tensor) and name != "step":
            theirs = entry.get(name)
            if (
                theirs is None
                or theirs.shape != tensor.shape
                or theirs.dtype != tensor.dtype
            ):
                found = None if theirs is None else (tuple(theirs.shape), theirs.dtype)
                raise ValueError(
                    f"{name!r} of {param!r} is {found}; it must be"
                    f" {(tuple(tensor.shape), tensor.dtype)}: sharded states load into"
                    " the precision they were saved with; save full_state_dict() to"
                    " load into any"
                )


def load_state(zero: Zero1, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Copy a checked state into the shards, rounded to their formats; parameters
    without state start from zero.

    What was saved by this optimizer comes back as the same bits, since its values are
    exact in fp32. A missing `master` (a checkpoint of torch's own AdamW) is made from
    the parameter.
    """
    for parameters in zero.trainable:
        entries = [state.get(slot.param, {}) for slot in parameters.bucket.slots]
        for slot, entry in zip(parameters.bucket.slots, entries, strict=True):
            momentum = entry.get("momentum_buffer")
            # Torch's SGD does not count.
            step = entry.get("step", 0 if momentum is None else 1)
            zero.scalars.steps[zero.row_of[slot.param]] = (
                step if not isinstance(step, Tensor) else step.to(torch.int64)
            )
        # Copies, since a sharded state may be made of views of these very shards.
        sharded = [
            (
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in entry.items()
                }
                if "range" in entry
                else {}
            )
            for entry in entries
        ]
        for name, field in parameters.states().items():
            _load_full(parameters, name, field, entries, zero)
        _load_sharded(parameters, sharded, zero.comm.rank)


def _load_full(
    parameters: ParameterBucket,
    name: str,
    field: str,
    entries: Sequence[Mapping[str, Any]],
    zero: Zero1,
) -> None:
    """Form one state of a bucket's shard in fp32, and store it. Only then, as the
    entries may be views of the shard."""
    values = zero.scratch.take(parameters.bucket.shard_numel, torch.float32)
    values.copy_(parameters.own) if field == "master" else values.zero_()
    pieces = {piece.param: piece for piece in parameters.bucket.pieces(zero.comm.rank)}
    for slot, stride, entry in zip(
        parameters.bucket.slots, parameters.strides, entries, strict=True
    ):
        piece, value = pieces.get(slot.param), entry.get(name)
        if piece is not None and value is not None and "range" not in entry:
            flat = _in_memory_order(value, stride)[
                piece.offset : piece.offset + piece.numel
            ]
            values[piece.start : piece.start + piece.numel].copy_(flat)
    ops.store_state_(parameters.shard, field, values)
    zero.scratch.give(values)


def _load_sharded(
    parameters: ParameterBucket, entries: Sequence[Mapping[str, Any]], rank: int
) -> None:
    """Copy what is of sharded form, as it is stored."""
    pieces = {piece.param: piece for piece in parameters.bucket.pieces(rank)}
    for slot, entry in zip(parameters.bucket.slots, entries, strict=True):
        if slot.param in pieces and "range" in entry:
            for name, (tensor, per_entry) in parameters.stored().items():
                _part(tensor, per_entry, pieces[slot.param]).copy_(entry[name])


def _in_memory_order(value: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a tensor's elements, flat, in the order in which a parameter of that
    stride stores them."""
    flat = value.new_empty(value.numel())
    view_in(flat, 0, value.shape, stride).copy_(value)
    return flat
