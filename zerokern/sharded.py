"""An optimizer as torch knows it, on top of a coordinator: what Adam and AdamW share with every update rule to come."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from . import build, state
from .buffers import Memory
from .comm import Call, Comm
from .config import Buckets, Precision
from .stages.zero1 import Zero1

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""A weak reference to the optimizer of each parameter, so that a newer one can take over."""


class ShardedOptimizer(Optimizer):
    """Base of the optimizers: torch's contract, and the methods beyond it."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        stage: int,
        model: nn.Module | None,
        process_group: ProcessGroup | None,
        mesh: DeviceMesh | None,
        precision: Precision | None,
        buckets: Buckets | None,
        max_grad_norm: float | None,
    ) -> None:
        """Check everything, agree with the other ranks, then shard. The arguments are described at `Adam`."""
        build.check_options(stage, model, process_group, mesh, max_grad_norm)
        self._sealed = False
        super().__init__(build.checked_groups(params), defaults)
        for group in self.param_groups:
            build.check_hyper(group)
        self.stage = stage
        self.max_grad_norm = max_grad_norm
        comm = Comm(mesh.get_group() if mesh is not None else process_group)
        plan = build.plan(self.param_groups, stage, model, comm, precision or Precision(), buckets or Buckets())
        owners = [known() for known in map(_owners.get, plan.params) if known is not None]
        for owner in {id(owner): owner for owner in owners if owner is not None}.values():
            owner._let_go()
        self._zero: Zero1 | None = plan.coordinator()
        self._index_of = WeakTensorKeyDictionary({p: i for i, p in enumerate(plan.params)})
        for param in plan.params:
            _owners[param] = weakref.ref(self)
        self._sealed = True
        self._clip_once: float | Tensor | None = None
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._warned = False
        self._expose_state()

    # ------------------------------------------------------------------ torch's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, while the optimizer is built.

        Raises:
            ValueError: the optimizer is built: its layout is fixed. Pass every group at construction.
        """
        if getattr(self, "_sealed", False):
            raise ValueError(
                "add_param_group after construction is not available: the flat layout is fixed. Pass all groups at "
                "construction (lr 0 keeps one still), or build a new optimizer, which takes the parameters over"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, update this rank's shards, make parameters whole again (stages 1 and 2).

        A step whose gradients are not finite, on any rank, changes nothing on all of them and is counted
        (`skipped_steps`).

        Args:
            closure: computes the loss again and returns it; it may call zero_grad and backward.

        Raises:
            TypeError: the closure does not return a loss.
            RuntimeError: a newer optimizer has taken over, or a parameter was moved out of its buffer.
        """
        zero = self._coordinator()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if not isinstance(loss, Tensor | float | int):
                raise TypeError(
                    f"the closure returned {type(loss).__name__}; it must return the loss, a tensor or a number. "
                    "Nothing was updated"
                )
        changed = zero.settle_gradients()
        clipped = self._clip_once is not None and not changed  # later gradients are not those that were to be clipped
        zero.step(self.param_groups, self._clip_once if clipped else self.max_grad_norm)
        self._clip_once = None
        self._consolidated = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, reduced and local ones. `model.zero_grad()` does the same."""
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without communicating.

        In a world of one, or after `consolidate_state_dict`, it is in torch's layout. Else it is this rank's shards,
        labelled by `range`, which load at the same world size and rank only; a warning says so once.
        """
        packed = super().state_dict()
        if self._consolidated is not None:
            packed["state"] = {self._positions[i]: entry for i, entry in self._consolidated.items()}
            return packed
        if self._coordinator().comm.world > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                "state_dict() holds this rank's shards only. Save it on every rank, or call full_state_dict(), or "
                "consolidate_state_dict() on all ranks first",
                stacklevel=2,
            )
        packed["state"] = {key: {**entry, "step": entry["step"].float()} for key, entry in packed["state"].items()}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's layout or our own, in place; moments and master weights stay fp32. Nothing is sent.

        Raises:
            ValueError: it is of another model or another sharding. Nothing was changed.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        zero = self._coordinator()
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups], [len(group["params"]) for group in saved]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state has param groups of {sizes[1]} parameters, this optimizer of {sizes[0]}: "
                "it is of another model"
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
            ours.update({name: value for name, value in theirs.items() if name not in ("params", "param_names")})
        self._consolidated = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ------------------------------------------------------------------ beyond torch

    def clip_grad_norm_(self, max_norm: float | Tensor, norm_type: float = 2.0) -> Tensor:
        """Clip the total gradient norm of the coming step. Call it after the last backward, on all ranks.

        Nothing is multiplied here: the coefficient min(1, max_norm / (norm + 1e-6)) is applied inside the update.

        Args:
            max_norm: largest norm.
            norm_type: 2.

        Returns:
            The norm over all parameters and ranks before clipping: an fp32 0-d tensor on the device, the same
                everywhere.

        Raises:
            ValueError: another norm, or a negative bound.
        """
        if norm_type != 2.0:
            raise ValueError(f"clip_grad_norm_: norm_type {norm_type} is not available; it must be 2.0")
        if not isinstance(max_norm, Tensor) and not max_norm >= 0:
            raise ValueError(f"clip_grad_norm_: max_norm {max_norm} must not be negative or NaN")
        zero = self._coordinator()
        with torch.no_grad():
            zero.settle_gradients()
            self._clip_once = max_norm
            return zero.scalars.norm().float()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates locally and sends nothing, in every stage."""
        return self._coordinator().rounds.no_sync()

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Make every parameter whole, to read, save or edit the model. All ranks must enter it.

        Edits must be the same on all ranks; they are kept, and master weights follow. If the body raises, stage 3 drops
        them; in stages 1 and 2 the model was edited in place.
        """
        with torch.no_grad(), self._coordinator().full_params():
            yield

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
        """Gather the state so that `state_dict()` on rank `to` returns all of it, until the next step. All ranks
        must call it.

        Lightning and torch's ZeroRedundancyOptimizer know this name.
        """
        with torch.no_grad():
            gathered = state.full_state(self._coordinator(), to)
        if to == self._coordinator().comm.rank:
            self._consolidated = gathered

    def memory(self) -> Memory:
        """Return the bytes of model state that this rank holds, by role."""
        return self._coordinator().memory()

    def comm_log(self, *, clear: bool = False) -> tuple[Call, ...]:
        """Return this rank's collectives, oldest first; the last 65,536 of them.

        Args:
            clear: forget them afterwards.
        """
        calls = tuple(self._coordinator().comm.log)
        if clear:
            self._coordinator().comm.log.clear()
        return calls

    @property
    def grad_norm(self) -> Tensor:
        """Total gradient norm of the last step, before clipping: an fp64 0-d tensor on the device."""
        return self._coordinator().scalars.report[0]

    @property
    def skipped_steps(self) -> Tensor:
        """Steps skipped for non-finite gradients so far: an fp64 0-d tensor on the device."""
        return self._coordinator().scalars.report[2]

    # ------------------------------------------------------------------ details

    def _coordinator(self) -> Zero1:
        if self._zero is None:
            raise RuntimeError(
                "a newer optimizer was built over these parameters and has taken them over; use that one"
            )
        return self._zero

    def _let_go(self) -> None:
        self._coordinator().detach()
        self._zero = None

    def _expose_state(self) -> None:
        """Fill `self.state` with views of this rank's shards, from the first moment on: an empty state makes DCP
        take a step."""
        params = [p for group in self.param_groups for p in group["params"]]
        self._positions = {self._index_of[p]: position for position, p in enumerate(params)}
        views = state.live_state(self._coordinator())
        for param in params:
            index = self._index_of[param]
            if index in views:
                self.state[param] = views[index]
