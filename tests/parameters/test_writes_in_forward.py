"""Writes to weights inside of a forward. Where a rank has weights whole they are kept;
in stage 3 they would be made to a copy that is thrown away, and are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, differing, rank, sharded, whole, world
from registry import cases_of
from torch import Tensor, nn
from units import WIDTH, Stack, Unit, batch, squares

case = cases_of("parameters")


class Clamped(Unit):
    """Clamps its weight before it is used, as critics of Wasserstein GANs do."""

    bound: float | None = 0.3

    def forward(self, x: Tensor) -> Tensor:
        if self.bound is not None:
            with torch.no_grad():
                self.weight.clamp_(-self.bound, self.bound)
        return super().forward(x)


class Written(Clamped):
    """Writes through a detached one, of which torch knows all the same."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bound is not None:
            self.inner.bias.detach().add_(1.0)
        return Unit.forward(self, x)


class Embedded(nn.Module):
    """A table in a unit whose rows are bounded when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(11, WIDTH, max_norm=1.0)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.tables[0](tokens))


class InRoot(nn.Module):
    """The same in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, max_norm=1.0)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens))


def tokens_of(step: int) -> Tensor:
    """Return a batch that is the same on all ranks: else they would write other
    rows."""
    return torch.arange(8) + step


MODELS: dict[str, Any] = {
    "clamped": (lambda: Stack(Clamped, 2), "units.0.weight", lambda s: batch(s, 0)),
    "by detach": (
        lambda: Stack(Written, 2),
        "units.0.inner.bias",
        lambda s: batch(s, 0),
    ),
    "max_norm": (Embedded, "tables.0.weight", tokens_of),
    "max_norm in the root": (InRoot, "table.weight", tokens_of),
}
"""Model, the parameter that is written to, batches."""

of_models = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name][0]()


def loss_of(
    name: str,
    model: nn.Module,
    step: int,
) -> Tensor:
    return squares(model(MODELS[name][2](step)))


def stop_writing(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.max_norm = None
        if isinstance(module, Clamped):
            module.bound = None


def train(
    name: str,
    model: nn.Module,
    optimizer: Any,
    steps: range,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(name, model, step).backward()
        optimizer.step()


def torchs(name: str, *, writing: bool) -> dict[str, Tensor]:
    """Return what torch makes of three steps."""
    model = made(name)
    if not writing:
        stop_writing(model)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    train(
        name,
        model,
        plain,
        range(3),
    )
    return {n: p.detach() for n, p in model.named_parameters()}


def _written(stage: int, name: str) -> Any:
    """Where weights are whole: train three steps. In stage 3 of several ranks: return
    what is said, in training and in evaluation, and go on without the write."""
    model = made(name)
    optimizer = sharded(
        model,
        stage,
        model.named_parameters(),
        lr=1e-2,
        eps=1e-3,
    )
    said = []
    if stage == 3 and world() > 1:
        before = whole(model, optimizer)
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError) as error:
                loss_of(name, model, 0)
            said.append(str(error.value))
            assert optimizer.memory().buffers == 0
        assert differing(whole(model, optimizer), before) == []
        stop_writing(model)
    train(
        name,
        model,
        optimizer,
        range(3),
    )
    return said, whole(model, optimizer), optimizer.memory().buffers


@case
def written_in_forward(stage: int) -> dict[str, Any]:
    return {name: _written(stage, name) for name in MODELS}


@at_worlds
@in_stages
@of_models
def test_a_write_is_kept_or_refused_by_name(
    name: str,
    stage: int,
    at: int,
) -> None:
    """After a refusal nothing stays gathered, and training goes on without it."""
    expected = torchs(name, writing=stage < 3 or at == 1)
    for results in case.done(at)["written_in_forward", stage]:
        said, found, buffers = results[name]
        assert apart(found, expected) == {}
        assert buffers == 0
        for message in said:
            assert repr(MODELS[name][1]) in message
            assert "full_params" in message and "stage 2" in message


@case
def written_in_full_params(stage: int) -> dict[str, Tensor]:
    """Clamp all weights between steps, where that is allowed."""
    torch.manual_seed(0)
    model = Stack(Unit, 2)
    optimizer = sharded(
        model,
        stage,
        lr=1e-2,
        eps=1e-3,
    )
    for step in range(3):
        optimizer.zero_grad()
        squares(model(batch(step, rank()))).backward()
        optimizer.step()
        with optimizer.full_params():
            for param in model.parameters():
                param.clamp_(-0.3, 0.3)
            model(batch(step, rank()))  # reads, and gives nothing back
    return whole(model, optimizer)


@at_worlds
@in_stages
def test_writes_inside_of_full_params_are_kept(stage: int, at: int) -> None:
    torch.manual_seed(0)
    model = Stack(Unit, 2)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        plain.zero_grad()
        for r in range(at):
            (squares(model(batch(step, r))) / at).backward()
        plain.step()
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.3, 0.3)
    expected = {n: p.detach() for n, p in model.named_parameters()}
    for found in case.done(at)["written_in_full_params", stage]:
        assert apart(found, expected) == {}


@case
def forward_that_writes_in_full_params(stage: int) -> Any:
    """Run a forward that writes, inside of full_params: return what it has written."""
    model = made("clamped")
    optimizer = sharded(model, stage)
    with optimizer.full_params():
        model(batch(0, 0))
    largest = whole(model, optimizer)["units.1.weight"].abs().max()
    return float(largest), optimizer.memory().buffers


@at_worlds
@in_stages
def test_a_forward_may_write_inside_of_full_params(stage: int, at: int) -> None:
    for largest, buffers in case.done(at)["forward_that_writes_in_full_params", stage]:
        assert largest == pytest.approx(0.3)
        assert buffers == 0


class WritesInBackward(Unit):
    """A hook on what it has computed writes to a weight, while backward is in it."""

    writes = True

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if self.writes:
            hidden.register_hook(self._write)
        return hidden

    def _write(self, gradient: Tensor) -> None:
        with torch.no_grad():
            self.inner.bias.mul_(0.5)


@case(stages=(3,))
def written_in_backward(stage: int) -> Any:
    torch.manual_seed(0)
    model = Stack(WritesInBackward, 2)
    optimizer = sharded(
        model,
        stage,
        model.named_parameters(),
        lr=1e-2,
    )
    loss = squares(model(batch(0, rank())))
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    for unit in model.units:
        unit.writes = False
    optimizer.zero_grad()
    buffers = optimizer.memory().buffers
    squares(model(batch(1, rank()))).backward()
    optimizer.step()
    return str(error.value), buffers, int(optimizer.skipped_steps)


@pytest.mark.parametrize("at", (2,), ids="world{}".format)
def test_a_write_in_backward_is_refused_by_name(at: int) -> None:
    for message, buffers, skipped in case.done(at)["written_in_backward", 3]:
        assert "inner.bias" in message and "written to" in message
        assert buffers == skipped == 0
