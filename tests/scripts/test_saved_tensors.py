"""Between forward and backward: what torch refuses is refused in stage 3 as well, and
what it allows goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import ranks
import torch
from oracle import apart, rank, whole
from registry import cases_of
from torch import Tensor, nn
from units import Stack, Unit, batch, seeded, squares

import zerokern

STEPS = 3
case = cases_of("scripts")

at_worlds = pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))


@contextmanager
def small(unit: type[nn.Module] = Unit) -> Iterator[tuple[Any, Any]]:
    model = seeded(lambda: Stack(unit))()
    yield model, zerokern.AdamW(model.parameters(), stage=3, model=model)


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


@case(stages=(3,))
def a_step_between_forward_and_backward(stage: int) -> str:
    with small() as (model, optimizer):
        squares(model(batch(0, rank()))).backward()
        loss = squares(model(batch(1, rank())))
        optimizer.step()
        return refusal(loss.backward)


@case(stages=(3,))
def an_edit_between_forward_and_backward(stage: int) -> str:
    with small() as (model, optimizer):
        loss = squares(model(batch(0, rank())))
        with optimizer.full_params():
            model.units[1].weight.mul_(2)
        return refusal(loss.backward)


class WritesHidden(Unit):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        output = x + self.inner(hidden)
        hidden.add_(1)
        return output


@case(stages=(3,))
def a_write_to_an_activation(stage: int) -> str:
    with small(WritesHidden) as (model, _):
        return refusal(squares(model(batch(0, rank()))).backward)


@at_worlds
@pytest.mark.parametrize(
    "name",
    [
        "a_step_between_forward_and_backward",
        "an_edit_between_forward_and_backward",
        "a_write_to_an_activation",
    ],
)
def test_a_write_before_backward_is_refused_as_by_torch(name: str, at: int) -> None:
    for message in case.done(at)[name, 3]:
        assert "modified by an inplace operation" in message


@case(stages=(3,))
def gradients_with_respect_to_weights(stage: int) -> dict[str, float]:
    """Return what differs from those of a plain copy."""
    with small() as (model, _):
        plain = seeded(Stack)()
        sides = []
        for side in (model, plain):
            loss = squares(side(batch(0, rank())))
            found = torch.autograd.grad(loss, [*side.parameters()])
            names = [name for name, _ in side.named_parameters()]
            sides.append(dict(zip(names, found, strict=True)))
        return apart(*sides)


@at_worlds
def test_gradients_with_respect_to_sharded_weights(at: int) -> None:
    """As of a plain model: whole, of this rank, and not reduced."""
    for differs in case.done(at)["gradients_with_respect_to_weights", 3]:
        assert differs == {}


@case(stages=(3,))
def backward_twice(stage: int) -> tuple[bool, str]:
    with small() as (model, optimizer):
        loss = squares(model(batch(0, rank())))
        loss.backward(retain_graph=True)
        once = optimizer.full_grad(model.units[1].weight)
        loss.backward()
        twice = optimizer.full_grad(model.units[1].weight)
        again = refusal(loss.backward)
        optimizer.zero_grad()
        return torch.equal(2 * once, twice), again


@at_worlds
def test_a_graph_that_is_retained_can_be_used_again(at: int) -> None:
    for doubled, message in case.done(at)["backward_twice", 3]:
        assert doubled
        assert "backward through the graph a second time" in message


@case(stages=(3,))
def backward_without_its_optimizer(stage: int) -> str:
    with small() as (model, optimizer):
        loss = squares(model(batch(0, rank())))
        del optimizer
    return refusal(loss.backward)


@at_worlds
def test_backward_after_its_optimizer_is_gone_says_so(at: int) -> None:
    for message in case.done(at)["backward_without_its_optimizer", 3]:
        assert "Run backward before you drop the optimizer" in message


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@case(stages=(3,))
def interrupted(stage: int) -> dict[str, Tensor]:
    """Stop inside of a unit's forward; torch's hooks tell nobody of that."""
    with small() as (model, optimizer):
        hook = model.units[1].inner.register_forward_hook(interrupt)
        with suppress(KeyboardInterrupt):
            model(batch(9, rank()))
        hook.remove()
        for step in range(STEPS):
            optimizer.zero_grad()
            squares(model(batch(step, rank()))).backward()
            optimizer.step()
        assert optimizer.memory().buffers == 0
        return whole(model, optimizer)


@case(stages=(3,))
def interrupted_and_not_zeroed(stage: int) -> dict[str, Tensor]:
    """The next thing is a forward."""
    with small() as (model, optimizer):
        hook = model.units[1].inner.register_forward_hook(interrupt)
        with suppress(KeyboardInterrupt):
            model(batch(9, rank()))
        hook.remove()
        for step in range(STEPS):
            squares(model(batch(step, rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.memory().buffers == 0
        return whole(model, optimizer)


@case(stages=(3,))
def uninterrupted(stage: int) -> dict[str, Tensor]:
    with small() as (model, optimizer):
        for step in range(STEPS):
            squares(model(batch(step, rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model, optimizer)


@at_worlds
@pytest.mark.parametrize("name", ["interrupted", "interrupted_and_not_zeroed"])
def test_training_goes_on_after_an_interrupt(name: str, at: int) -> None:
    for ours, expected in zip(
        case.done(at)[name, 3], case.done(at)["uninterrupted", 3], strict=True
    ):
        assert apart(ours, expected, 0.0) == {}


@case(stages=(3,))
def hooks_left(stage: int) -> list[bool]:
    """Whether torch's stack of hooks is as it was, after a forward and after a
    backward."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with small() as (model, _):
        loss = squares(model(batch(0, rank())))
        after_forward = top(False) is None
        loss.backward()
        return [after_forward, top(False) is None]


@at_worlds
def test_no_hook_of_ours_is_left_on_torchs_stack(at: int) -> None:
    for found in case.done(at)["hooks_left", 3]:
        assert found == [True, True]


@case(stages=(3,))
def memory_of_a_graph(stage: int) -> tuple[int, int]:
    """Return the bytes of gathered units while a graph waits for its backward, and of
    all parameters."""
    with small() as (model, optimizer):
        loss = squares(model(batch(0, rank())))
        held = optimizer.memory().buffers
        loss.backward()
        return held, 4 * sum(p.numel() for p in model.parameters())


@at_worlds
def test_a_graph_holds_no_parameters(at: int) -> None:
    for held, _ in case.done(at)["memory_of_a_graph", 3]:
        assert held == 0
