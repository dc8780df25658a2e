"""An optimizer's state in torch's terms: saved, loaded, gathered."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from . import state
from .stages.zero1 import Zero1


class StatefulOptimizer(Optimizer):
    """The part of torch's contract that is about state, and the ways to have all of it
    in one place."""

    _index_of: WeakTensorKeyDictionary
    """Each parameter's index in the layout."""
    _consolidated: dict[int, dict[str, Any]] | None
    """The whole state, until the next step."""
    _warned: bool

    @abstractmethod
    def _coordinator(self) -> Zero1:
        """Return what holds the shards."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state without communicating.

        In a world of one, or after `consolidate_state_dict`, it is in torch's layout,
        fp32. Else it is this rank's shards as they are stored, labelled by `range`,
        which load at the same world size, rank and precision only; a warning says so
        once.
        """
        packed = super().state_dict()
        whole = self._consolidated
        if (
            whole is None
            and self._coordinator().comm.world == 1
            and not state.torch_layout(self._coordinator())
        ):
            whole = state.full_state(self._coordinator(), None)
        if whole is not None:
            packed["state"] = {self._positions[i]: entry for i, entry in whole.items()}
            return packed
        if self._coordinator().comm.world > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                "state_dict() holds this rank's shards only. Save it on every rank, or"
                " call full_state_dict(), or consolidate_state_dict() on all ranks"
                " first",
                stacklevel=2,
            )
        packed["state"] = {
            key: {**entry, "step": entry["step"].float()}
            for key, entry in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's layout or our own, in place, rounded to the formats of this
        optimizer. Nothing is sent.

        Raises:
            ValueError: it is of another model or another sharding. Nothing was changed.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        zero = self._coordinator()
        saved = state_dict["param_groups"]
        sizes = (
            [len(group["params"]) for group in self.param_groups],
            [len(group["params"]) for group in saved],
        )
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state has param groups of {sizes[1]} parameters, this optimizer"
                f" of {sizes[0]}: it is of another model"
            )
        indices = {}
        for ours, theirs in zip(self.param_groups, saved, strict=True):
            for param, key in zip(ours["params"], theirs["params"], strict=True):
                if key in state_dict["state"]:
                    indices[self._index_of[param]] = state_dict["state"][key]
        state.check_state(zero, indices)
        with torch.no_grad():
            state.load_state(zero, indices)
        for ours, theirs in zip(self.param_groups, saved, strict=True):
            ours.update(
                {
                    name: value
                    for name, value in theirs.items()
                    if name not in ("params", "param_names")
                }
            )
        self._consolidated = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_state_dict(self, *, to: int | None = None) -> dict[str, Any]:
        """Gather the state in torch's layout into host memory. All ranks must call it.

        Args:
            to: the rank that gets it; the others get {}. None: every rank.
        """
        with torch.no_grad():
            gathered = state.full_state(self._coordinator(), to)
        if to is not None and to != self._coordinator().comm.rank:
            return {}
        before, self._consolidated = self._consolidated, gathered
        try:
            return self.state_dict()
        finally:
            self._consolidated = before

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state so that `state_dict()` on rank `to` returns all of it, until
        the next step. All ranks must call it.

        Lightning and torch's ZeroRedundancyOptimizer know this name.
        """
        with torch.no_grad():
            gathered = state.full_state(self._coordinator(), to)
        if to == self._coordinator().comm.rank:
            self._consolidated = gathered

    def _expose_state(self) -> None:
        """Fill `self.state` with views of this rank's shards, from the first moment on:
        an empty state makes DCP take a step."""
        params = [p for group in self.param_groups for p in group["params"]]
        self._positions = {
            self._index_of[p]: position for position, p in enumerate(params)
        }
        views = state.live_state(self._coordinator())
        for param in params:
            index = self._index_of[param]
            if index in views:
                self.state[param] = views[index]
