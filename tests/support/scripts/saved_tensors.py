"""Others that handle saved tensors, too: checkpoints, offload, hooks of users, the
compiler."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from units import Stack, Unit, loss_script, of, squares

from scripts.doors import Keeps


class ChecksInside(Unit):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(self.hidden, x, use_reentrant=self.reentrant)
        return x + self.inner(inside)


class ChecksInsideReentrant(ChecksInside):
    reentrant = True


@loss_script(of(ChecksInside))
def checkpoint_inside_a_unit(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loss_script(of(ChecksInsideReentrant))
def reentrant_checkpoint_inside_a_unit(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


def through_checkpoints(model: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    x = model.first(x)
    for unit in model.units:
        x = checkpoint(unit, x, use_reentrant=reentrant)
    return squares(model.last(x))


@loss_script(Stack)
def checkpoint_around_units(model: Any, x: Tensor) -> Tensor:
    return through_checkpoints(model, x, reentrant=False)


@loss_script(Stack)
def reentrant_checkpoint_around_units(model: Any, x: Tensor) -> Tensor:
    return through_checkpoints(model, x, reentrant=True)


@loss_script(of(Keeps))
def checkpoint_around_units_that_keep(model: Any, x: Tensor) -> Tensor:
    loss = through_checkpoints(model, x, reentrant=False)
    return loss + sum((squares(unit.kept) for unit in model.units), torch.zeros(()))


@loss_script(Stack)
def checkpoint_around_everything(model: Any, x: Tensor) -> Tensor:
    return squares(checkpoint(model, x, use_reentrant=False))


@loss_script(of(ChecksInside))
def checkpoint_around_a_checkpoint(model: Any, x: Tensor) -> Tensor:
    return squares(checkpoint(model, x, use_reentrant=False))


@loss_script(Stack)
def offload_around_everything(model: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return squares(model(x))


class OffloadsInside(Unit):
    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x)


@loss_script(of(OffloadsInside))
def offload_inside_units(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loss_script(of(OffloadsInside))
def offload_inside_of_checkpoints(model: Any, x: Tensor) -> Tensor:
    return through_checkpoints(model, x, reentrant=False)


def to_bytes(tensor: Tensor) -> tuple[Tensor, torch.dtype, torch.Size]:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.clone(), tensor.dtype, tensor.shape


def from_bytes(packed: tuple[Tensor, torch.dtype, torch.Size]) -> Tensor:
    flat, dtype, shape = packed
    return flat.view(dtype).view(shape)


@loss_script(Stack)
def hooks_of_a_user_around(model: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(to_bytes, from_bytes):
        return squares(model(x))


class HooksInside(Unit):
    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(to_bytes, from_bytes):
            return super().forward(x)


@loss_script(of(HooksInside))
def hooks_of_a_user_inside(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loss_script(of(HooksInside))
def hooks_of_a_user_inside_of_offload(model: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return squares(model(x))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return slopes @ weight.t(), x.t() @ slopes


class OwnFunction(Unit):
    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(Saves.apply(x, self.weight))


@loss_script(of(OwnFunction))
def functions_of_a_user(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loss_script(Stack)
def compiled_units(model: Any, x: Tensor) -> Tensor:
    for unit in model.units:
        if not hasattr(unit, "is_compiled"):
            unit.compile(backend="aot_eager")
            unit.is_compiled = True
    with warnings.catch_warnings():
        # The compiler asks every tensor for its .grad.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        return squares(model(x))
