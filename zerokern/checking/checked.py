"""What an optimizer has for its own check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..observation import Observation
from .first_step import FirstStep
from .session import SESSION, Phase

Batch = TypeVar("Batch")


class Checked(Optimizer):
    """Base of an optimizer that can be compared with plain torch."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Under ZEROKERN_CHECK, at first: what stands for this one in plain torch."""
        if SESSION is not None and SESSION.phase is not Phase.OURS:
            return SESSION.plain(cls, args, options)
        return super().__new__(cls)

    def begin_check(self, model: nn.Module | None) -> None:
        """This one is built: watch its steps, under ZEROKERN_CHECK."""
        if SESSION is not None:
            SESSION.watch(self, model)

    def gradients_to_use(self) -> dict[int, Tensor | None]:
        """Return what the coming step will work with, as `Observation` does."""
        optimizer: Any = self
        scale = getattr(self, "grad_scale", optimizer._loss_scale)
        observation: Observation = optimizer.observation(collective=True)
        with torch.no_grad():
            return observation.gradients_to_use(optimizer.max_grad_norm, scale)

    def check(
        self, loss_fn: Callable[[nn.Module, Batch], Tensor], batch: Batch
    ) -> None:
        """Compare a step with plain torch: run it on a plain copy of the model with
        torch's own optimizer and gradients averaged one by one, then here, and compare
        every gradient and every weight. All ranks must call it.

        For the first minute of a long job. Every rank holds the whole model and its
        whole state meanwhile. Weights, state, buffers and random numbers are as they
        were afterwards; gradients are gone. What a loop does beside the loss is checked
        by `ZEROKERN_CHECK`.

        Example::

            optimizer.check(lambda model, batch: model(**batch).loss, batch)

        Args:
            loss_fn: returns the loss of the model that it is given, which is a copy the
                first time.
            batch: this rank's, given to `loss_fn`.

        Raises:
            RuntimeError: on all ranks, if a gradient or a weight differs: names the
                first parameter that does.
            ValueError: no `model` was given at construction, updates are made in
                backward, or the loss does not use the model that it is given.
        """
        optimizer: Any = self
        coordinator = optimizer.coordinator
        model = coordinator.blueprint.model
        if model is None:
            raise ValueError(
                "check() needs the model, to copy it: build the optimizer with"
                " model=model"
            )
        coordinator.refuse_in_backward("check()")
        coordinator.refuse_in_join("check()")
        step = FirstStep(optimizer, model)
        try:
            found = step.compare(loss_fn, batch)
        finally:
            step.undo()
        group = coordinator.transport.groups.agrees
        for clause in [found] if group.size == 1 else group.all_gather_objects(found):
            if clause is not None:
                raise RuntimeError(f"check: {clause}")
