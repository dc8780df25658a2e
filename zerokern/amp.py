"""Loss scaling for fp16 gradients that are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .checking.plain import PlainOptimizer
from .sharded_optimizer import ShardedOptimizer

Averaging = ShardedOptimizer | PlainOptimizer
"""Optimizers that unscale averaged gradients themselves."""


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for sharded gradients; the same arguments, state and calls.

    torch's own looks for infinities in p.grad, where reduced gradients are not. This
    one takes what the optimizer knows of all ranks, so an overflow on one rank skips
    the step on all, and their scales stay equal. No gradient is multiplied: the update
    divides by the scale. Other optimizers are handled as torch does::

        scaler = GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)         # optional
        optimizer.clip_grad_norm_(1.0)     # optional; before or after unscale_
        scaler.step(optimizer)
        scaler.update()
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Have the coming step divide by the loss scale. All ranks must call it, if one
        does.

        Raises:
            RuntimeError: called twice since `update()`, or after `step()`.
        """
        if not isinstance(optimizer, Averaging):
            super().unscale_(optimizer)
            return
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError(
                "unscale_() came after step() or after another unscale_(); call it once"
                " per optimizer, before step(), and update() at the end of the"
                " iteration"
            )
        self._note_overflow(optimizer, state)
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is not finite on some rank; `update()` then lowers
        the scale.

        Returns:
            What optimizer.step returns.

        Raises:
            RuntimeError: called twice since `update()`, or with a closure.
        """
        if not self._enabled or not isinstance(optimizer, Averaging):
            return super().step(optimizer, *args, **kwargs)
        if any(value is not None for value in (*args, *kwargs.values())):
            raise RuntimeError(
                "closures are not available with a loss scale; call backward before"
                " scaler.step"
            )
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        self._note_overflow(optimizer, state)
        # Accelerate puts a wrapper in the place of step, and takes a step for skipped
        # if it was not called.
        watched = "step" in vars(optimizer) and not hasattr(
            optimizer.step, "_wrapped_by_lr_sched"
        )
        (found,) = state["found_inf_per_device"].values()
        result = (
            type(optimizer).step(optimizer)  # type: ignore[arg-type]
            if watched and found.item()
            else optimizer.step()
        )
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale, as torch does, but never below the least normal number: it
        could not grow from 0."""
        super().update(new_scale)
        if self._enabled and self._scale is not None:
            self._scale.clamp_(min=torch.finfo(torch.float32).tiny)

    def _note_overflow(self, optimizer: Averaging, state: dict[str, Any]) -> None:
        """Note whether this iteration's gradients are finite; nothing is sent if they
        are reduced already."""
        scale = self._get_scale_async()
        assert scale is not None
        found = optimizer.unscale_(scale)
        state["found_inf_per_device"] = {found.device: found}
