"""Stage 3 gathers what backward reads, by whatever door a tensor has left its unit:
containers, attributes, graphs of gradients, checkpoints, hooks of users."""

from __future__ import annotations

import functools
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import ranks
import torch
from oracle import apart, rank, whole
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import zerokern

WIDTH = 6
STEPS = 3
CLOSE = 1e-5
ADAM = {"lr": 1e-2, "eps": 1e-3}
"""A large eps: no gradient is so small that its sign is a matter of rounding."""

Loss = Callable[[nn.Module, Tensor], Tensor]
LOOPS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {}


def loop(build: Callable[[], nn.Module]) -> Callable[[Loss], Loss]:
    """Register a loss of a model and a batch [4, WIDTH]."""

    def register(function: Loss) -> Loss:
        LOOPS[function.__name__] = build, function
        return function

    return register


class Unit(nn.Module):
    """x + tanh(x W) V, with a weight of its own beside a module's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)

    def forward(self, x: Any) -> Any:
        return x + self.inner(self.hidden(x))


class Stack(nn.Module):
    """A linear layer of the root, units, a norm of the root."""

    def __init__(self, unit: type[nn.Module] = Unit, number: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(unit() for _ in range(number))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for unit in self.units:
            x = unit(x)
        return self.last(x)


def of(unit: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Stack(unit)


def squares(x: Tensor) -> Tensor:
    return (x - 1).square().mean()


# ------------------------------------------------------------------ doors out of a unit


@dataclass
class Output:
    value: Tensor
    detail: Any = None


class ReturnsDataclass(Unit):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x), {"hidden": [self.hidden(x)]})


@loop(of(ReturnsDataclass))
def a_dataclass(model: Any, x: Tensor) -> Tensor:
    x, total = model.first(x), torch.zeros(())
    for unit in model.units:
        output = unit(x)
        x = output.value
        total = total + output.detail["hidden"][0].square().mean()
    return squares(x) + total


class ReturnsMapping(Unit):
    def forward(self, x: Tensor) -> UserDict[str, Tensor]:
        return UserDict(value=super().forward(x), hidden=self.hidden(x))


@loop(of(ReturnsMapping))
def a_mapping_that_is_no_dict(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for unit in model.units:
        output = unit(x)
        x = output["value"] + output["hidden"]
    return squares(x)


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


class ChangesGraph(Unit):
    def forward(self, graph: Graph) -> None:
        graph.nodes = super().forward(graph.nodes)


@loop(of(ChangesGraph))
def an_object_that_is_changed(model: Any, x: Tensor) -> Tensor:
    graph = Graph(model.first(x))
    for unit in model.units:
        unit(graph)
    return squares(model.last(graph.nodes))


class Keeps(Unit):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.hidden(x)
        return super().forward(x)


@loop(of(Keeps))
def attributes_alone(model: Any, x: Tensor) -> Tensor:
    """Deep supervision by what units keep; the output is not used."""
    model(x)
    return sum((squares(unit.kept) for unit in model.units), torch.zeros(()))


@loop(of(Keeps))
def attributes_and_the_output(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    kept = [squares(unit.kept) for unit in model.units]
    return squares(output) + sum(kept, torch.zeros(()))


@loop(Stack)
def features_of_a_forward_hook(model: Any, x: Tensor) -> Tensor:
    features: list[Tensor] = []
    handles = [
        unit.inner.register_forward_hook(lambda *call: features.append(call[-1]))
        for unit in model.units
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return squares(torch.stack(features))


class Fills(Unit):
    def forward(self, cache: dict[str, Tensor]) -> None:
        cache[f"layer {len(cache)}"] = super().forward([*cache.values()][-1])


@loop(of(Fills))
def a_cache_that_is_filled(model: Any, x: Tensor) -> Tensor:
    cache = {"layer 0": model.first(x)}
    for unit in model.units:
        unit(cache)
    return squares(torch.stack([*cache.values()]))


class ShowsWeight(Unit):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight.t()


@loop(of(ShowsWeight))
def a_view_of_a_weight(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for unit in model.units:
        x, weight = unit(x)
        x = torch.tanh(x @ weight)
    return squares(x)


class Recursive(Unit):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        return super().forward(x)


@loop(of(Recursive))
def a_unit_that_calls_itself(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loop(Stack)
def one_unit_many_times(model: Any, x: Tensor) -> Tensor:
    for _ in range(4):
        x = model.units[1](x)
    return squares(x)


@loop(Stack)
def two_forwards_one_backward(model: Any, x: Tensor) -> Tensor:
    """Contrastive learning."""
    return squares(model(x) * model(x.flip(0)))


@loop(Stack)
def evaluation_in_between(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    with torch.no_grad():
        target = model(x.flip(0))
    return squares(output * target)


# ---------------------------------------------------------------- graphs of gradients


@loop(Stack)
def gradient_penalty(model: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    output = model(x).square().sum(1)
    (slopes,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean() + output.mean()


@loop(Stack)
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


@loop(Forces)
def a_backward_inside_the_forward(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loop(Stack)
def hessian_times_a_vector(model: Any, x: Tensor) -> Tensor:
    """Of the inputs, by two backward passes."""
    x = x.requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    (curved,) = torch.autograd.grad(slopes.sum(), x, create_graph=True)
    return squares(curved)


@loop(Stack)
def jacobian_by_function(model: Any, x: Tensor) -> Tensor:
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    return squares(jacobian)


@loop(Stack)
def forward_derivative(model: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # Torch's rules for it are TorchScript.
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        output, slopes = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return squares(output) + squares(slopes)


# -------------------------------------------------- checkpoints, hooks, and ours between


class ChecksInside(Unit):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(self.hidden, x, use_reentrant=self.reentrant)
        return x + self.inner(inside)


class ChecksInsideReentrant(ChecksInside):
    reentrant = True


@loop(of(ChecksInside))
def checkpoint_inside_a_unit(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loop(of(ChecksInsideReentrant))
def reentrant_checkpoint_inside_a_unit(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


def through_checkpoints(model: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    x = model.first(x)
    for unit in model.units:
        x = checkpoint(unit, x, use_reentrant=reentrant)
    return squares(model.last(x))


@loop(Stack)
def checkpoint_around_units(model: Any, x: Tensor) -> Tensor:
    return through_checkpoints(model, x, reentrant=False)


@loop(Stack)
def reentrant_checkpoint_around_units(model: Any, x: Tensor) -> Tensor:
    return through_checkpoints(model, x, reentrant=True)


@loop(of(Keeps))
def checkpoint_around_units_that_keep(model: Any, x: Tensor) -> Tensor:
    loss = through_checkpoints(model, x, reentrant=False)
    return loss + sum((squares(unit.kept) for unit in model.units), torch.zeros(()))


@loop(Stack)
def checkpoint_around_everything(model: Any, x: Tensor) -> Tensor:
    return squares(checkpoint(model, x, use_reentrant=False))


@loop(of(ChecksInside))
def checkpoint_around_a_checkpoint(model: Any, x: Tensor) -> Tensor:
    return squares(checkpoint(model, x, use_reentrant=False))


@loop(Stack)
def offload_around_everything(model: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return squares(model(x))


class OffloadsInside(Unit):
    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x)


@loop(of(OffloadsInside))
def offload_inside_units(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loop(of(OffloadsInside))
def offload_inside_of_checkpoints(model: Any, x: Tensor) -> Tensor:
    return through_checkpoints(model, x, reentrant=False)


def to_bytes(tensor: Tensor) -> tuple[Tensor, torch.dtype, torch.Size]:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.clone(), tensor.dtype, tensor.shape


def from_bytes(packed: tuple[Tensor, torch.dtype, torch.Size]) -> Tensor:
    flat, dtype, shape = packed
    return flat.view(dtype).view(shape)


@loop(Stack)
def hooks_of_a_user_around(model: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(to_bytes, from_bytes):
        return squares(model(x))


class HooksInside(Unit):
    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(to_bytes, from_bytes):
            return super().forward(x)


@loop(of(HooksInside))
def hooks_of_a_user_inside(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loop(of(HooksInside))
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


@loop(of(OwnFunction))
def functions_of_a_user(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loop(Stack)
def compiled_units(model: Any, x: Tensor) -> Tensor:
    for unit in model.units:
        if not hasattr(unit, "is_compiled"):
            unit.compile(backend="aot_eager")
            unit.is_compiled = True
    with warnings.catch_warnings():
        # The compiler asks every tensor for its .grad.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        return squares(model(x))


# ------------------------------------------------------------------------ they agree


def batch(step: int, of_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    return torch.randn(4, WIDTH, generator=generator)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def trained_by_torch(name: str, of: int) -> dict[str, Tensor]:
    build, loss = LOOPS[name]
    model = made(build)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        for of_rank in range(of):
            (loss(model, batch(step, of_rank)) / of).backward()
        optimizer.step()
    return whole(model, optimizer)


def trained_in_stage_3(name: str) -> tuple[dict[str, Tensor], int, int]:
    """Return the parameters, the skipped steps and the bytes that are left over."""
    build, loss = LOOPS[name]
    model = made(build)
    optimizer = zerokern.AdamW(model.parameters(), stage=3, model=model, **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(step, rank())).backward()
        optimizer.step()
    left = optimizer.memory().buffers
    return whole(model, optimizer), int(optimizer.skipped_steps), left


CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register what every rank does."""
    CASES[function.__name__] = function
    return function


@functools.cache
def done(at: int) -> ranks.Cases:
    loops = {name: functools.partial(trained_in_stage_3, name) for name in LOOPS}
    return ranks.run_cases(at, {**loops, **CASES})


at_worlds = pytest.mark.parametrize("at", ranks.worlds(2, rarely=3))


@at_worlds
@pytest.mark.parametrize("name", LOOPS)
def test_trains_like_torch(name: str, at: int) -> None:
    expected = trained_by_torch(name, at)
    for params, skipped, left in done(at)[name]:
        assert skipped == 0
        assert left == 0
        assert apart(params, expected, CLOSE) == {}


# ------------------------------------------------------------- what torch refuses, too


@contextmanager
def small(unit: type[nn.Module] = Unit) -> Iterator[tuple[Any, Any]]:
    model = made(of(unit))
    yield model, zerokern.AdamW(model.parameters(), stage=3, model=model)


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


@case
def a_step_between_forward_and_backward() -> str:
    with small() as (model, optimizer):
        squares(model(batch(0, rank()))).backward()
        loss = squares(model(batch(1, rank())))
        optimizer.step()
        return refusal(loss.backward)


@case
def an_edit_between_forward_and_backward() -> str:
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


@case
def a_write_to_an_activation() -> str:
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
    for message in done(at)[name]:
        assert "modified by an inplace operation" in message


@case
def a_gradient_with_respect_to_weights() -> str:
    with small() as (model, _):
        loss = squares(model(batch(0, rank())))
        return refusal(lambda: torch.autograd.grad(loss, [*model.parameters()]))


@at_worlds
def test_gradients_with_respect_to_sharded_weights_are_refused_by_name(at: int) -> None:
    for message in done(at)["a_gradient_with_respect_to_weights"]:
        assert "grad cannot read a parameter" in message


@case
def backward_twice() -> tuple[bool, str]:
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
    for doubled, message in done(at)["backward_twice"]:
        assert doubled
        assert "backward through the graph a second time" in message


@case
def backward_without_its_optimizer() -> str:
    with small() as (model, optimizer):
        loss = squares(model(batch(0, rank())))
        del optimizer
    return refusal(loss.backward)


@at_worlds
def test_backward_after_its_optimizer_is_gone_says_so(at: int) -> None:
    for message in done(at)["backward_without_its_optimizer"]:
        assert "Run backward before you drop the optimizer" in message


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@case
def interrupted() -> dict[str, Tensor]:
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


@case
def interrupted_and_not_zeroed() -> dict[str, Tensor]:
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


@case
def uninterrupted() -> dict[str, Tensor]:
    with small() as (model, optimizer):
        for step in range(STEPS):
            squares(model(batch(step, rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model, optimizer)


@at_worlds
@pytest.mark.parametrize("name", ["interrupted", "interrupted_and_not_zeroed"])
def test_training_goes_on_after_an_interrupt(name: str, at: int) -> None:
    for ours, expected in zip(done(at)[name], done(at)["uninterrupted"], strict=True):
        assert apart(ours, expected, 0.0) == {}


@case
def hooks_left() -> list[bool]:
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
    for found in done(at)["hooks_left"]:
        assert found == [True, True]


@case
def memory_of_a_graph() -> tuple[int, int]:
    """Return the bytes of gathered units while a graph waits for its backward, and of
    all parameters."""
    with small() as (model, optimizer):
        loss = squares(model(batch(0, rank())))
        held = optimizer.memory().buffers
        loss.backward()
        return held, 4 * sum(p.numel() for p in model.parameters())


@at_worlds
def test_a_graph_holds_no_parameters(at: int) -> None:
    for held, _ in done(at)["memory_of_a_graph"]:
        assert held == 0
