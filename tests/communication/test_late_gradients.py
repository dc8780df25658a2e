"""A reduction sends what a gradient has become, however late: filled in by another
thread, in a backward of another thread, changed by users' hooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import models
import pytest
import torch
from marks import in_stages
from oracle import differing, rank, sharded, whole
from registry import cases_of
from short_runs import loss_of_share
from torch import Tensor, nn
from wire import TWO_PARAMETERS, hostile

import zerokern
from zerokern.groups import Group
from zerokern.transport import Pending, Transport

case = cases_of("communication")

# --------------------------------------------------------------------- of other threads


class LateTwin(torch.autograd.Function):
    """x * scale, whose gradient is filled in by another thread, late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        for_x = torch.full_like(x, torch.nan)
        for_scale = torch.full_like(scale, torch.nan)

        def fill() -> None:
            with torch.no_grad():
                time.sleep(0.005)
                for_x.copy_(grad * scale)
                for_scale.copy_((grad * x).sum_to_size(scale.shape))

        producer = threading.Thread(target=fill)
        producer.start()
        producer.join()
        return for_x, for_scale


class Scaled(nn.Module):
    """Linear, times a scale."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return LateTwin.apply(y, self.scale) if self.late else y * self.scale


class Stack(nn.Module):
    """Units one after the other."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(Scaled(late) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x


def _produced(stage: int, late: bool, thread: bool) -> dict[str, Tensor]:
    """Train; gradients come late from a thread, and backward itself runs in one that
    was just started."""
    with hostile(stage, 5.0):
        torch.manual_seed(0)
        model = Stack(late)
        optimizer = sharded(model, stage, lr=1e-2, buckets=zerokern.Buckets(bytes=64))
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(7 * step + rank())
            loss = model(torch.randn(4, 6, generator=generator)).square().sum()
            if thread:
                backward = threading.Thread(target=loss.backward)
                backward.start()
                backward.join()
            else:
                loss.backward()
            optimizer.step()
        return whole(model, optimizer)


PRODUCERS = {
    "plain": (False, False),
    "late": (True, False),
    "another thread": (False, True),
    "both": (True, True),
}
"""Whether gradients come late, and whether backward runs in another thread."""


@case
def produced(stage: int) -> dict[str, dict[str, Tensor]]:
    return {name: _produced(stage, *given) for name, given in PRODUCERS.items()}


@in_stages
@pytest.mark.parametrize("producer", [name for name in PRODUCERS if name != "plain"])
def test_a_reduction_waits_for_who_makes_the_gradient(
    stage: int, producer: str
) -> None:
    for results in case.done(2)["produced", stage]:
        assert differing(results[producer], results["plain"]) == []


# ---------------------------------------------------------------------- of users' hooks

HOOKS = (
    "before the optimizer",
    "after the optimizer",
    "accumulated, before the optimizer",
)


def _half() -> Tensor:
    """Return a late number."""
    time.sleep(0.001)
    return torch.tensor(0.5)


def _halved(grad: Tensor) -> Tensor:
    return grad * _half()


def _halve_in_place(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(_half())


def _sent(stage: int, when: str | None) -> list[tuple[str, Tensor]]:
    """Return the title and the content of every bucket that was sent, where a hook
    halves every gradient."""
    model = models.forked()
    for param in model.parameters():
        if when == "before the optimizer":
            param.register_hook(_halved)
        elif when == "accumulated, before the optimizer":
            param.register_post_accumulate_grad_hook(_halve_in_place)
    optimizer = sharded(model, stage, buckets=TWO_PARAMETERS)
    for param in model.parameters():
        if when == "after the optimizer":
            param.register_hook(_halved)
    sent: list[tuple[str, Tensor]] = []
    start = Transport.start

    def spy(
        transport: Transport,
        op: str,
        title: str,
        phase: str,
        pairs: Any,
        buffers: Sequence[Tensor],
        group: Group,
    ) -> Pending:
        if op == "reduce_scatter":
            sent.append((title, buffers[0].clone()))
        return start(transport, op, title, phase, pairs, buffers, group)

    with mock.patch.object(Transport, "start", spy):
        loss_of_share(model, 0).backward()
        optimizer.step()
    return sent


@case
def sent_after_hooks(stage: int) -> dict[str | None, list[tuple[str, Tensor]]]:
    return {hook: _sent(stage, hook) for hook in (None, *HOOKS)}


@in_stages
@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_sent_has_passed_the_users_hooks(stage: int, hook: str) -> None:
    for results in case.done(2)["sent_after_hooks", stage]:
        scaled, plain = results[hook], results[None]
        assert [title for title, _ in scaled] == [title for title, _ in plain] != []
        for (_, ours), (_, theirs) in zip(scaled, plain, strict=True):
            assert theirs.any()
            assert torch.equal(ours, 0.5 * theirs)
