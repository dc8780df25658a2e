"""Plain torch.optim.AdamW in one process: what the sharded runs are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .theory import StateBytes


class PlainAdamW(torch.optim.AdamW):
    """torch's AdamW, with fp32 master weights if the model is 16 bits wide, as a single
    process would keep them.

    It answers to the methods of `zerokern.AdamW` that the job calls, so that one
    training loop serves both.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self.parameters = list(parameters)
        self.mixed = self.parameters[0].dtype != torch.float32
        self.weights = (
            [p.detach().float() for p in self.parameters]
            if self.mixed
            else self.parameters
        )
        super().__init__(self.weights, fused=True, **options)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; return
        the norm before."""
        self._take_gradients()
        return nn.utils.clip_grad_norm_(self.weights, max_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the weights and, from them, the parameters of the model."""
        self._take_gradients()
        loss: float | None = super().step(closure)
        if self.mixed:
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                parameter.copy_(weight)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the weights and of the model."""
        super().zero_grad(set_to_none)
        for parameter in self.parameters:
            parameter.grad = None

    def full_params(self) -> nullcontext[None]:
        """Nothing to gather: the parameters are whole."""
        return nullcontext()

    def state_bytes(self) -> StateBytes:
        """Return what is held now, counted from the tensors themselves."""
        moments = [
            state[name]
            for state in self.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        gradients = [
            p.grad for p in {*self.parameters, *self.weights} if p.grad is not None
        ]
        return StateBytes(
            parameters=_bytes(self.parameters),
            gradients=_bytes(gradients),
            master=_bytes(self.weights) if self.mixed else 0,
            moments=_bytes(moments),
        )

    def _take_gradients(self) -> None:
        """Give the fp32 weights the 16-bit gradients, once between two calls of
        zero_grad."""
        if self.mixed:
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                if parameter.grad is not None and weight.grad is None:
                    weight.grad = parameter.grad.float()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
