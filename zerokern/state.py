"""Optimizer state in torch's layout, and back: what `state_dict()` and `load_state_dict()` are made of.

Full form, torch's own: each parameter's tensors have its shape; `step` is an fp32 scalar. A 16-bit parameter has
`master` too. Sharded form, without communication: the tensors are this rank's flat part, and `range` says which
elements these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .buffers import view_in
from .layout import Piece
from .stages.zero1 import Zero1

MOMENTS = ("exp_avg", "exp_avg_sq")


def live_state(zero: Zero1) -> dict[int, dict[str, Any]]:
    """Return each trainable parameter's state on this rank as views, by index in the layout.

    In a world of one they have the parameter's shape, as in torch; else they are this rank's flat part, perhaps empty.
    """
    state: dict[int, dict[str, Any]] = {}
    alone = zero.comm.world == 1
    for parameters in zero.trainable:
        pieces = {piece.param: piece for piece in parameters.bucket.pieces(zero.comm.rank)}
        whole = {name: parameters.views_of(shard) for name, shard in parameters.state_pieces().items()} if alone else {}
        for index, slot in enumerate(parameters.bucket.slots):
            entry: dict[str, Any] = {"step": zero.scalars.steps[zero.row_of[slot.param]]}
            for name, shard in parameters.state_pieces().items():
                if alone:
                    entry[name] = whole[name][index]
                else:
                    piece = pieces.get(slot.param, Piece(slot.param, 0, 0, 0))
                    entry[name] = shard[piece.start : piece.start + piece.numel]
                    entry["range"] = (piece.offset, piece.offset + piece.numel)
            state[slot.param] = entry
    return state


def full_state(zero: Zero1, to: int | None) -> dict[int, dict[str, Any]]:
    """Gather every parameter's state in torch's layout, bucket by bucket, into host memory. Every rank must call it.

    Args:
        zero: the coordinator.
        to: the rank that keeps the result; None: all of them. Other ranks return an empty dict.
    """
    phase, zero.comm.phase = zero.comm.phase, "checkpoint"
    keep = to is None or to == zero.comm.rank
    steps = zero.scalars.steps.cpu()
    state: dict[int, dict[str, Any]] = {}
    for parameters in zero.trainable:
        for name, shard in parameters.state_pieces().items():
            whole = zero.scratch.take(parameters.bucket.numel, shard.dtype)
            whole[parameters.bucket.shard(zero.comm.rank)].copy_(shard)
            zero.comm.all_gather(whole, f"{name} {parameters.bucket.index}").wait()
            if keep:
                for slot, view in zip(parameters.bucket.slots, parameters.views_of(whole), strict=True):
                    entry = state.setdefault(slot.param, {"step": steps[zero.row_of[slot.param]].float()})
                    entry[name] = torch.empty_like(view, device="cpu").copy_(view)
            zero.scratch.give(whole)
    zero.comm.phase = phase
    return state


def check_state(zero: Zero1, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse a state that does not fit, before anything is changed.

    Raises:
        ValueError: names the parameter, what it has and what it needs.
    """
    ours = live_state(zero)
    for param, entry in state.items():
        spec = zero.layout.params[param]
        if param not in ours:
            continue  # frozen since it was saved: nothing to load into
        for name in MOMENTS:
            if name not in entry:
                raise ValueError(
                    f"the state of {spec.name!r} has {sorted(entry)} but no {name!r}: "
                    "it is of another optimizer than Adam or AdamW"
                )
        if "range" in entry and tuple(entry["range"]) != tuple(ours[param].get("range", ())):
            raise ValueError(
                f"the state of {spec.name!r} is a shard of elements {tuple(entry['range'])}, this rank holds "
                f"{ours[param].get('range', 'all of it')}: sharded states load at the world size, "
                "rank and layout they were saved with; save full_state_dict() to load anywhere"
            )
        for name in MOMENTS + ("master",) * ("master" in entry):
            shape = tuple(entry[name].shape)
            needed = (entry["range"][1] - entry["range"][0],) if "range" in entry else spec.shape
            if shape != needed:
                raise ValueError(
                    f"{name!r} of {spec.name!r} has shape {shape}; it must be {needed}: the state is of another model"
                )


def load_state(zero: Zero1, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Copy a checked state into the shards, bits and precision kept; parameters without state start from zero.

    A missing `master` (a checkpoint of torch's own AdamW) is made from the parameter.
    """
    for parameters in zero.trainable:
        shards = parameters.state_pieces()
        loaded: list[tuple[Tensor, Tensor]] = []
        pieces = {piece.param: piece for piece in parameters.bucket.pieces(zero.comm.rank)}
        for slot, stride in zip(parameters.bucket.slots, parameters.strides, strict=True):
            entry = state.get(slot.param, {})
            step = entry.get("step", 0)
            zero.scalars.steps[zero.row_of[slot.param]] = step if not isinstance(step, Tensor) else step.to(torch.int64)
            piece = pieces.get(slot.param)
            for name in shards.keys() & entry.keys() if piece is not None else ():
                assert piece is not None
                value = entry[name]
                if "range" not in entry:
                    value = _in_memory_order(value, stride)[piece.offset : piece.offset + piece.numel]
                # A copy: the state may be made of views of these very shards.
                loaded.append((shards[name][piece.start : piece.start + piece.numel], value.reshape(-1).clone()))
        for shard in shards.values():
            shard.zero_()
        if parameters.master is not None:
            parameters.master.copy_(parameters.own)
        for part, value in loaded:
            part.copy_(value)


def _in_memory_order(value: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a tensor's elements, flat, in the order in which a parameter of that stride stores them."""
    flat = value.new_empty(value.numel())
    view_in(flat, 0, value.shape, stride).copy_(value)
    return flat
