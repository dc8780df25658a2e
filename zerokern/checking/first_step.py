"""One step of an optimizer beside the same step of plain torch, after which everything
is as it was."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .comparison import Step, first_difference
from .plain import PLAIN, PlainOptimizer

Loss = Callable[[nn.Module, Any], Tensor]


class FirstStep:
    """A model and its plain copy, on every rank."""

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
    ) -> None:
        """Copy the model, and the optimizer's state.

        Raises:
            ValueError: the optimizer trains parameters that are not in the model.
        """
        self._optimizer, self._model = optimizer, model
        self._state = optimizer.full_state_dict()
        self._buffers = {name: b.clone() for name, b in model.named_buffers()}
        self._random = _Randomness()
        with optimizer.full_params():
            self._copy = copy.deepcopy(model)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._begun = _weights(self._copy)
        self._plain = self._plain_optimizer()

    def _plain_optimizer(self) -> PlainOptimizer:
        """Return the optimizer of the copy, with the same groups and the same state."""
        copies = dict(self._copy.named_parameters())
        groups = []
        for group in self._optimizer.param_groups:
            options = {k: v for k, v in group.items() if k != "param_names"}
            chosen = [copies[self._name_of(param)] for param in group["params"]]
            groups.append({**options, "params": chosen})
        kinds = [k.__name__ for k in type(self._optimizer).__mro__]
        kind = next(name for name in kinds if name in PLAIN)
        averages = self._optimizer.coordinator.transport.groups.averages
        plain = PLAIN[kind](
            groups,
            max_grad_norm=self._optimizer.max_grad_norm,
            process_group=averages.process_group,
        )
        plain.take_state(self._state)
        return plain

    def _name_of(self, param: nn.Parameter) -> str:
        name = self._names.get(id(param))
        if name is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not in model; pass the"
                " module that holds all that the optimizer trains"
            )
        return name

    def compare(self, loss_fn: Loss, batch: Any) -> str | None:
        """Take the step on both sides. Return a clause on the first parameter that
        differs; None if none does.

        Raises:
            ValueError: the loss does not depend on the model that it is given.
        """
        plain = self._plain_step(loss_fn, batch)
        self._random.restore()
        ours = self._our_step(loss_fn, batch)
        return first_difference(ours, plain, self._begun, steps=1)

    def _plain_step(self, loss_fn: Loss, batch: Any) -> Step:
        loss_fn(self._copy, batch).backward()
        trained = self._trained(self._copy)
        if all(param.grad is None for param in trained.values()):
            raise ValueError(
                "check: no parameter has a gradient of loss_fn(model, batch); use the"
                " model that it is given, which is a copy the first time"
            )
        self._plain.step()
        step = Step()
        for name, param in trained.items():
            step.use(name, param.grad)
        step.leave(_weights(self._copy))
        return step

    def _our_step(self, loss_fn: Loss, batch: Any) -> Step:
        optimizer = self._optimizer
        optimizer.zero_grad()
        loss_fn(self._model, batch).backward()
        gradients = optimizer.gradients_to_use()
        step = Step()
        for name, param in self._trained(self._model).items():
            if id(param) in gradients:
                step.use(name, gradients[id(param)])
        optimizer.coordinator.step(optimizer.max_grad_norm)
        with optimizer.full_params():
            step.leave(_weights(self._model))
        return step

    def _trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        names = set()
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    names.add(self._name_of(param))
        return {n: p for n, p in model.named_parameters() if n in names}

    @torch.no_grad()
    def undo(self) -> None:
        """Restore weights, state, buffers and random numbers; no gradient is left."""
        self._optimizer.zero_grad()
        with self._optimizer.full_params():
            for name, param in self._model.named_parameters():
                param.copy_(self._begun[name])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._buffers[name])
        self._optimizer.load_state_dict(self._state)
        self._random.restore()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class _Randomness:
    """The states of the generators that a forward may draw from."""

    def __init__(self) -> None:
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        numpy = sys.modules.get("numpy")
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if has_cuda else None
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Have them go on from there."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
