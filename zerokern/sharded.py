"""An optimizer as torch knows it, on top of a coordinator: what all update rules
share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from . import build, checks
from .comm import Comm
from .config import Buckets, Precision
from .eager import eager
from .observable import ObservableOptimizer
from .rules import UpdateRule
from .stages.zero1 import Zero1

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""A weak reference to the optimizer of each parameter, so that a newer one can take
over."""


class ShardedOptimizer(ObservableOptimizer):
    """Base of the optimizers: torch's contract, and the methods beyond it."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        rule: Callable[[Sequence[Mapping[str, Any]]], UpdateRule],
        *,
        stage: int,
        model: nn.Module | None,
        process_group: ProcessGroup | None,
        mesh: DeviceMesh | None,
        precision: Precision | None,
        buckets: Buckets | None,
        max_grad_norm: float | None,
        init: Callable[[nn.Module], Any] | Any | None,
    ) -> None:
        """Check everything, agree with the other ranks, then shard.

        Args:
            params, defaults: as of torch.optim.Optimizer.
            rule: makes the update rule of the param groups.
            stage, model, process_group, mesh, precision, buckets, max_grad_norm, init:
                described at `Adam`.
        """
        buckets = buckets or Buckets()
        checks.check_options(stage, model, process_group, mesh, max_grad_norm, buckets)
        self._sealed = False
        super().__init__(checks.checked_groups(params), defaults)
        for group in self.param_groups:
            checks.check_hyper(group)
        self.stage = stage
        self.max_grad_norm = max_grad_norm
        comm = Comm(mesh.get_group() if mesh is not None else process_group)
        plan = build.plan(
            self.param_groups,
            stage,
            model,
            comm,
            rule(self.param_groups),
            precision or Precision(),
            buckets,
            init,
        )
        owners = [
            known() for known in map(_owners.get, plan.params) if known is not None
        ]
        for owner in {
            id(owner): owner for owner in owners if owner is not None
        }.values():
            owner._let_go()
        self._zero: Zero1 | None = plan.coordinator()
        self._zero.groups = self.param_groups
        comm.end_construction()
        self._index_of = WeakTensorKeyDictionary(
            {p: i for i, p in enumerate(plan.params)}
        )
        for param in plan.params:
            _owners[param] = weakref.ref(self)
        self._sealed = True
        self._clip_once: float | Tensor | None = None
        self._loss_scale: Tensor | None = None
        """What the coming step divides the gradients by."""
        self._last_scale: float | Tensor = 1.0
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._warned = False
        self._expose_state()

    # ----------------------------------------------------------------- torch's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, while the optimizer is built.

        Raises:
            ValueError: the optimizer is built: its layout is fixed. Pass every group at
                construction.
        """
        if getattr(self, "_sealed", False):
            raise ValueError(
                "add_param_group after construction is not available: the flat layout"
                " is fixed. Pass all groups at construction (lr 0 keeps one still), or"
                " build a new optimizer, which takes the parameters over"
            )
        super().add_param_group(param_group)

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is not reduced yet, update this rank's shards, make parameters
        whole again (stages 1 and 2).

        A step whose gradients are not finite, on any rank, changes nothing on all of
        them and is counted (`skipped_steps`).

        Args:
            closure: computes the loss again and returns it; it may call zero_grad and
                backward.

        Raises:
            TypeError: the closure does not return a loss.
            RuntimeError: a newer optimizer has taken over, or a parameter was moved out
                of its buffer.
        """
        zero = self._coordinator()
        # torch's own scaler leaves its scale here, or None after the user's
        # scaler.unscale_(optimizer).
        loss_scale = getattr(self, "grad_scale", self._loss_scale)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if not isinstance(loss, Tensor | float | int):
                raise TypeError(
                    f"the closure returned {type(loss).__name__}; it must return the"
                    " loss, a tensor or a number. Nothing was updated"
                )
        if loss_scale is not None:
            zero.refuse_passing("a loss scale")
        changed = zero.settle_gradients()
        # Later gradients are not those that were to be clipped.
        clipped = self._clip_once is not None and not changed
        zero.step(
            self.param_groups,
            self._clip_once if clipped else self.max_grad_norm,
            loss_scale,
        )
        self._last_scale = 1.0 if loss_scale is None else loss_scale
        self._clip_once = self._loss_scale = None
        self._consolidated = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, reduced and local ones. `model.zero_grad()` does the
        same."""
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)
        self._coordinator().rounds.drop_zeroed()

    # ------------------------------------------------------------------ beyond torch

    @eager
    def clip_grad_norm_(
        self, max_norm: float | Tensor, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the total gradient norm of the coming step. Call it after the last
        backward, on all ranks.

        Nothing is multiplied here: the coefficient min(1, max_norm / (norm + 1e-6)) is
        applied inside the update.

        Args:
            max_norm: largest norm.
            norm_type: 2.

        Returns:
            The norm over all parameters and ranks before clipping: an fp32 0-d tensor
                on the device, the same everywhere.

        Raises:
            ValueError: another norm, or a negative bound.
        """
        if norm_type != 2.0:
            raise ValueError(
                f"clip_grad_norm_: norm_type {norm_type} is not available; it must"
                " be 2.0"
            )
        if not isinstance(max_norm, Tensor) and not max_norm >= 0:
            raise ValueError(
                f"clip_grad_norm_: max_norm {max_norm} must not be negative or NaN"
            )
        zero = self._coordinator()
        zero.refuse_passing("clip_grad_norm_")
        with torch.no_grad():
            zero.settle_gradients()
            self._clip_once = max_norm
            return zero.scalars.norm(self._loss_scale).float()

    @eager
    def unscale_(self, loss_scale: Tensor) -> Tensor:
        """Divide the coming step's gradients by a loss scale. `zerokern.GradScaler`
        calls this, on all ranks.

        Nothing is multiplied here: the factor is applied inside the update.

        Args:
            loss_scale: fp32, one element, on the device; not read by the host.

        Returns:
            1.0 if a gradient on any rank is not finite, else 0.0: fp32 [1] on the
                device, the same everywhere.
        """
        zero = self._coordinator()
        zero.refuse_passing("a loss scale")
        with torch.no_grad():
            zero.settle_gradients()
            self._loss_scale = loss_scale
            return (~zero.scalars.norm().isfinite()).float().reshape(1)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward accumulates locally and sends nothing, in
        every stage."""
        return self._coordinator().rounds.no_sync()

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Make every parameter whole, to read, save or edit the model. All ranks must
        enter it.

        Edits must be the same on all ranks; they are kept, and master weights follow.
        If the body raises, stage 3 drops them; in stages 1 and 2 the model was edited
        in place.
        """
        with torch.no_grad(), self._coordinator().full_params():
            yield

    def join(self) -> AbstractContextManager[None]:
        """Return a context for loops, of training or evaluation, in which the ranks
        have different numbers of batches.

        A rank that has run out goes on taking part until all have, in every stage. The
        mean stays one over all ranks, as in torch's Join, and gradients are taken to be
        zeroed after each step. Each collective is announced by a small one, for which
        the host waits.

        Raises:
            RuntimeError: on all ranks, if those with batches are about to do different
                things.
            ValueError: updates are made in backward.
        """
        return self._coordinator().join()

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let a method other than forward, such as `encode`, use a module's parameters
        in stage 3.

        It is wrapped on this module object; in stages 1 and 2 nothing needs to be done
        and nothing is.

        Args:
            module: the model, or a module in it.
            name: of the method.

        Raises:
            ValueError: there is no such method.
        """
        self._coordinator().register_forward_method(module, name)

    # ------------------------------------------------------------------ details

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Ask torch.amp.GradScaler, which looks here first, to leave unscaling and
        skipping to `step`."""
        if self._coordinator().comm.world > 1:
            raise RuntimeError(
                "torch.amp.GradScaler looks at p.grad, where sharded gradients are not;"
                " use zerokern.GradScaler, a subclass of it with the same arguments"
            )
        return True

    def _coordinator(self) -> Zero1:
        if self._zero is None:
            raise RuntimeError(
                "a newer optimizer was built over these parameters and has taken them"
                " over; use that one"
            )
        return self._zero

    def _let_go(self) -> None:
        self._coordinator().detach()
        self._zero = None
