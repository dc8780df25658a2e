"""Gradients with respect to parameters that a loop asks for beside those of its step:
`autograd.grad` leaves p.grad alone."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor
from units import Stack, batch, loss_script, seeded, squares

import zerokern

SMOOTH = {"build": seeded(Stack), "eps": 1e-3}
"""A large eps: no gradient is so small that its sign is a matter of rounding."""
EARLY = zerokern.Buckets(bytes=600, update_in_backward=True)
LATE = zerokern.Buckets(bytes=600, gather_in_forward=True)


def loss_of(
    run: Run,
    step: int,
    of_rank: int,
) -> Tensor:
    return squares(run.model(batch(step, of_rank)))


def backward(run: Run, step: int) -> None:
    run.backward(step, lambda rank: loss_of(run, step, rank))


def probe(run: Run, step: int, params: Any = None, **options: Any) -> list[Any]:
    """Return the gradients of another loss, of one rank after the other."""
    params = list(run.model.parameters()) if params is None else params
    found = []
    for rank in run.each():
        output = run.model(batch(step, rank)).abs().mean()
        found.append(torch.autograd.grad(output, params, **options))
    return found


# -------------------------------------------------------------------- a weighted loss


def balanced(model: Any, x: Tensor) -> Tensor:
    """Return two losses, of which the second is weighted so that both pull at the last
    layer with the same force."""
    output = model(x)
    first, second = squares(output), (output - 3).abs().mean()
    last = model.last.weight
    (one,) = torch.autograd.grad(first, last, retain_graph=True)
    (other,) = torch.autograd.grad(second, last, retain_graph=True)
    weight = (one.norm() / (other.norm() + 1e-4)).clamp(0, 10).detach()
    return first + weight * second


@script(**SMOOTH)
def two_losses_balanced_in_each_micro_batch(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            run.backward(micro, lambda r, m=micro: balanced(run.model, batch(m, r)))
        run.step()
    run.rest()


@script(**SMOOTH)
def two_losses_balanced_without_sync(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(step, lambda r, s=step: balanced(run.model, batch(s, r)))
        run.backward(step, lambda r, s=step: balanced(run.model, batch(s + 9, r)))
        run.step()
    run.rest()


def _balanced(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, lambda r, s=step: balanced(run.model, batch(s, r)))
        run.step()


script("two losses balanced, updates in backward", buckets=EARLY, **SMOOTH)(_balanced)
script(
    "two losses balanced, late gathers",
    stages=(1, 2),
    buckets=LATE,
    **SMOOTH,
)(_balanced)


# ----------------------------------------------------------------- when it is asked for


@script(**SMOOTH)
def a_probe_before_backward(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        probe(run, step, [run.model.last.weight])
        backward(run, step)
        run.step()


@script(**SMOOTH)
def a_probe_between_backward_and_step(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        backward(run, step)
        probe(run, step)
        run.step()


@script(**SMOOTH)
def a_probe_after_the_step(run: Run) -> None:
    """And before gradients are zeroed."""
    for step in range(3):
        run.optimizer.zero_grad()
        backward(run, step)
        run.step()
        probe(run, step)


@script(**SMOOTH)
def a_probe_where_gradients_are_zeroed_in_place(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad(set_to_none=False)
        probe(run, step, [run.model.units[1].weight])
        backward(run, step)
        run.step()


@script(**SMOOTH)
def a_probe_where_gradients_are_never_zeroed(run: Run) -> None:
    for step in range(3):
        probe(run, step)
        backward(run, step)
        run.step()


@script(**SMOOTH)
def a_probe_without_sync(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            backward(run, step)
            probe(run, step, [run.model.last.weight, run.model.units[0].weight])
        backward(run, step + 9)
        run.step()


@script(**SMOOTH)
def a_probe_between_micro_batches(run: Run) -> None:
    """Their number changes, which stage 1 does not foresee."""
    for step, micros in enumerate((1, 3, 2)):
        run.optimizer.zero_grad()
        for micro in range(micros):
            backward(run, 10 * step + micro)
            probe(run, step)
        run.step()


@script(**SMOOTH)
def a_probe_after_clipping(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        backward(run, step)
        run.clip(0.05)
        probe(run, step)
        run.step()


@script(stages=(1, 2), **SMOOTH)
def a_probe_on_the_first_rank_only(run: Run) -> None:
    """Nothing of it communicates."""
    for step in range(3):
        run.optimizer.zero_grad()
        backward(run, step)
        if 0 in run.each():
            probe(run, step)
        run.step()


# ------------------------------------------------------------------ how it is asked for


@script(**SMOOTH)
def probes_of_what_a_loss_does_not_use(run: Run) -> None:
    """None, or zeros on demand."""
    params = list(run.model.parameters())
    for step in range(3):
        run.optimizer.zero_grad()
        backward(run, step)
        for rank in run.each():
            model = run.model
            hidden = model.units[0](model.first(batch(step, rank))).sum()
            options: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
            found = torch.autograd.grad(hidden, params, **options)
            assert found[-1] is None
            filled = torch.autograd.grad(hidden, params, materialize_grads=True)
            assert not filled[-1].any()
            assert filled[-1].shape == params[-1].shape
        run.step()


@loss_script(Stack)
def penalty_of_parameter_gradients(model: Any, x: Tensor) -> Tensor:
    loss = squares(model(x))
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([slope.square().sum() for slope in slopes]).sum()


@script(**SMOOTH)
def penalty_of_the_gradients_of_one_unit_in_each_micro_batch(run: Run) -> None:
    def loss(step: int, rank: int) -> Tensor:
        value = loss_of(run, step, rank)
        params = list(run.model.units[1].parameters())
        slopes = torch.autograd.grad(value, params, create_graph=True)
        return value + torch.stack([slope.norm() for slope in slopes]).sum()

    for step in range(3):
        run.optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            run.backward(micro, lambda rank, m=micro: loss(m, rank))
        run.step()


@loss_script(Stack)
def curvature_along_the_gradient(model: Any, x: Tensor) -> Tensor:
    """A Hessian times a vector, both of the parameters, that scales a loss."""
    params = list(model.parameters())
    loss = squares(model(x))
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    along = torch.stack([(s * s.detach()).sum() for s in slopes]).sum()
    curved = torch.autograd.grad(along, params, retain_graph=True)
    size = torch.stack([c.detach().square().sum() for c in curved]).sum().sqrt()
    return loss / (1 + size)


@script(**SMOOTH)
def gradients_of_two_tasks_projected(run: Run) -> None:
    """What is in conflict is taken out, and the sum assigned to p.grad."""

    def projected(step: int, rank: int) -> dict[str, Tensor]:
        params = dict(run.model.named_parameters())
        output = run.model(batch(step, rank))
        of_tasks = [
            torch.autograd.grad(task, list(params.values()), retain_graph=True)
            for task in (squares(output), output.mean())
        ]
        found = {}
        for name, one, other in zip(params, *of_tasks, strict=True):
            overlap = (one * other).sum().clamp(max=0)
            found[name] = one - overlap * other / other.square().sum() + other
        return found

    for step in range(3):
        of_ranks = {rank: projected(step, rank) for rank in run.each()}
        for name, _ in run.model.named_parameters():
            run.set_gradient(name, lambda rank, n=name, f=of_ranks: f[rank][n])
        run.step()
