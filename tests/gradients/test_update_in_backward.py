"""Updates in backward: gradients take the memory of a few buckets, and what needs all
gradients at once is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import differing, rank, sharded, whole
from registry import cases_of
from torch import Tensor, nn

import zerokern
from zerokern import Buckets

case = cases_of("gradients")

IN_BACKWARD = Buckets(bytes=6000, update_in_backward=True)


def updating(stage: int, **options: Any) -> tuple[models.Toy, Any]:
    """Return a model and an optimizer that updates in backward."""
    model = models.toy()
    return model, sharded(model, stage, lr=1e-2, buckets=IN_BACKWARD, **options)


@case
def memory_in_backward(stage: int) -> list[tuple[int, int, int]]:
    """Return, per step, the peak of scratch memory in backward, gradients after it, and
    the largest bucket."""
    model = models.Toy(blocks=16)
    optimizer = sharded(model, stage, buckets=IN_BACKWARD)
    scratch = optimizer.coordinator.transport
    largest = max(4 * b.numel for b in optimizer.coordinator.layout.buckets)
    size = 4 * sum(param.numel() for param in model.parameters())
    assert size > 10 * largest
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        loss = models.loss_of(model, *models.batch(step))
        scratch.peak_bytes = scratch.live_bytes
        loss.backward()
        optimizer.step()
        gradients = optimizer.memory().gradients
        seen.append((scratch.peak_bytes, gradients, largest))
    return seen


@in_stages
def test_gradients_take_the_memory_of_a_few_buckets(stage: int) -> None:
    """Two under way, with as much again of chunks and shards, and one that fills. Stage
    3 has four gathered units besides: the root, the last one, the one in use and the
    next."""
    for result in case.done(2)["memory_in_backward", stage]:
        for step, (peak, gradients, bucket) in enumerate(result):
            assert gradients == 0
            if step:
                assert peak <= (5 if stage < 3 else 9) * bucket


@case
def refused_in_backward(stage: int) -> dict[str, str]:
    """Return what is said to those who come too late, or need all gradients; and that
    training goes on."""
    said = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)

    model, optimizer = updating(stage)

    def loss(step: int) -> Tensor:
        return models.loss_of(model, *models.batch(step))

    for step in range(2):
        loss(step).backward()
        attempt("clip", lambda: optimizer.clip_grad_norm_(1.0))
        attempt("scale", lambda: optimizer.unscale_(torch.ones(1)))
        attempt("read", lambda: optimizer.full_grad(model.head.bias))
        if step:
            attempt("late", lambda: loss(9).backward())
        optimizer.step()
        optimizer.zero_grad()
    attempt("max_grad_norm", lambda: updating(stage, max_grad_norm=1.0))
    loss(3).backward()
    optimizer.step()
    return said


@in_stages
def test_what_needs_all_gradients_is_refused(stage: int) -> None:
    for said in case.done(2)["refused_in_backward", stage]:
        assert set(said) == {"clip", "scale", "read", "late", "max_grad_norm"}
        assert "no_sync" in said.pop("late")
        assert all("update_in_backward" in message for message in said.values())


@case
def not_finite_in_backward(stage: int) -> bool:
    """Return whether a gradient that is not finite reaches the weights, as in torch."""
    model, optimizer = updating(stage)
    loss = models.loss_of(model, *models.batch(0))
    (loss * math.inf).backward()
    optimizer.step()
    params = whole(model, optimizer).values()
    finite = all(param.isfinite().all() for param in params)
    return int(optimizer.skipped_steps) == 0 and not finite


@in_stages
def test_without_the_guard_a_bad_gradient_reaches_the_weights(stage: int) -> None:
    assert case.done(2)["not_finite_in_backward", stage] == [True, True]


@case
def interrupted_in_backward(stage: int) -> list[str]:
    """An exception in a backward; what was updated is updated, and the next steps are
    like those of any other state."""
    model, optimizer = updating(stage)
    for step in range(2):
        models.loss_of(model, *models.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fail(grad: Tensor) -> None:
        raise KeyError("a user's")

    hook = model.blocks[1].down.weight.register_hook(fail)
    with suppress(KeyError):
        models.loss_of(model, *models.batch(2)).backward()
    hook.remove()
    buffers = optimizer.memory().buffers
    optimizer.zero_grad()

    twin = models.toy()
    other = sharded(twin, stage, lr=1e-2)
    with other.full_params(), torch.no_grad():
        for name, value in whole(model, optimizer).items():
            twin.get_parameter(name).copy_(value)
    other.load_state_dict(optimizer.full_state_dict())
    for net, its in ((model, optimizer), (twin, other)):
        models.loss_of(net, *models.batch(3)).backward()
        its.step()
    return [
        *differing(whole(model, optimizer), whole(twin, other)),
        *(["buffers"] if buffers else []),
    ]


@in_stages
def test_after_an_exception_the_next_step_is_right(stage: int) -> None:
    assert case.done(2)["interrupted_in_backward", stage] == [[], []]


def test_a_graph_that_still_needs_the_old_values_raises_torch_s_own_error() -> None:
    """The weight's gradient is there before a detached use of the weight has its own
    backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight.detach() * x).exp().sum() + self.weight.sum()

    model = Net()
    optimizer = zerokern.AdamW(model.parameters(), buckets=IN_BACKWARD)
    model(torch.ones(3)).backward()
    optimizer.step()
    early = torch.ones(3, requires_grad=True)
    product = model.weight.detach() * early
    model.weight.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ------------------------------------------------------- ranks that begin differently


def _backwards(optimizer: Any, model: nn.Module, step: int, count: int) -> None:
    """Accumulate a number of backwards, all but the last without communication."""
    for number in range(count):
        with nullcontext() if number == count - 1 else optimizer.no_sync():
            models.loss_of(model, *models.batch(step)).div(count).backward()


COUNTS: dict[str, Callable[[int, int], int]] = {
    "no backward in the first step": lambda rank, step: int(rank != 1 or step > 0),
    "no backward in the second step": lambda rank, step: int(rank != 1 or step != 1),
    "more micro-batches on some ranks": lambda rank, step: 1 + rank,
    "more of them in the first step": lambda rank, step: 1 + rank * (step == 0),
}


@case(stages=(1, 2))
def ranks_that_begin_differently(stage: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, count in COUNTS.items():
        for late in (False, True):
            options = {} if late else {"buckets": IN_BACKWARD}
            model = models.toy()
            optimizer = sharded(model, stage, lr=1e-2, **options)
            for step in range(4):
                optimizer.zero_grad()
                _backwards(optimizer, model, step, count(rank(), step))
                optimizer.step()
            found[f"{name}, {late}"] = whole(model, optimizer)
    return found


@pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", COUNTS)
def test_ranks_may_begin_differently(name: str, stage: int, at: int) -> None:
    """With other numbers of backwards; the weights are those of updates at the step."""
    for results in case.done(at)["ranks_that_begin_differently", stage]:
        assert differing(results[f"{name}, False"], results[f"{name}, True"]) == []
