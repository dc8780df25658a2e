"""Graphs of gradients: penalties, derivatives of a higher order, torch.func."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from units import Stack, loss_script, squares


@loss_script(Stack)
def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    output = model(x).square().sum(1)
    (slopes,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean() + output.mean()


@loss_script(Stack)
def third_derivative(model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    value = model(x).sum(1).tanh()
    for _ in range(2):
        (slopes,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        value = slopes.square().sum(1)
    return value.mean()


class Forces(Stack):
    def forward(self, x: Tensor) -> Tensor:
        """Return forces, formed inside of the forward, and then scaled by the root."""
        x = x.requires_grad_()
        energy = super().forward(x).square().sum()
        (slopes,) = torch.autograd.grad(energy, x, create_graph=True)
        return -slopes * self.last.weight


@loss_script(Forces)
def a_backward_inside_the_forward(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loss_script(Stack)
def hessian_times_a_vector(model: Any, x: Tensor) -> Tensor:
    """Of the inputs, by two backward passes."""
    x = x.requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    (curved,) = torch.autograd.grad(slopes.sum(), x, create_graph=True)
    return squares(curved)


@loss_script(Stack)
def jacobian_by_function(model: Any, x: Tensor) -> Tensor:
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    return squares(jacobian)


@loss_script(Stack)
def forward_derivative(model: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # Torch's rules for it are TorchScript.
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        output, slopes = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return squares(output) + squares(slopes)
