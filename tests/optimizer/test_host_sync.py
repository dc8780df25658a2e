"""Nothing in backward() or step() waits for the device: every way to read a tensor on
the host is made to raise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import STAGES, Run, apart, whole, world
from torch import Tensor

import zerokern

READS = (
    "item",
    "cpu",
    "tolist",
    "numpy",
    "nonzero",
    "argwhere",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__contains__",
    "is_nonzero",
    "equal",
    "unique",
)
FUNCTIONS = (
    "nonzero",
    "equal",
    "allclose",
    "is_nonzero",
    "unique",
    "masked_select",
    "argwhere",
)


class HostSync(AssertionError):
    """Somebody read a tensor on the host."""


@contextmanager
def forbidden() -> Iterator[None]:
    """Make reads of tensors raise."""

    def refuse(name: str) -> Callable[..., Any]:
        def read(*_: Any, **__: Any) -> Any:
            raise HostSync(f"{name} waits for the device")

        return read

    saved = {name: Tensor.__dict__.get(name) for name in READS}
    saved_functions = {name: getattr(torch, name) for name in FUNCTIONS}
    for name in READS:
        setattr(Tensor, name, refuse(f"Tensor.{name}"))
    for name in FUNCTIONS:
        setattr(torch, name, refuse(f"torch.{name}"))
    try:
        yield
    finally:
        for name, value in saved.items():
            delattr(Tensor, name) if value is None else setattr(Tensor, name, value)
        for name, value in saved_functions.items():
            setattr(torch, name, value)


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "max_grad_norm": lambda: {"max_grad_norm": 0.5},
    "clip_grad_norm_": dict,
    "lr tensor": lambda: {"lr": torch.tensor(1e-2)},
    "beta tensors": lambda: {"betas": (torch.tensor(0.9), torch.tensor(0.999))},
    "no_sync": dict,
    "checkpoint": dict,
    "bf16": dict,
    "unused": dict,
    "not finite": dict,
}


def train(stage: int, variant: str, *, watched: bool = True) -> dict[str, Tensor]:
    """Train three steps; forward, backward, clipping and step may not read a tensor."""
    options: dict[str, Any] = VARIANTS[variant]()
    if variant == "bf16":
        options["build"] = lambda: models.toy().bfloat16()
    run = Run(stage, world(), **options)
    run.model.checkpoint = False if variant == "checkpoint" else None

    def infinite_loss(of_rank: int) -> Tensor:
        return run.loss(1, of_rank) * float("inf")

    for step in range(3):
        losses = [lambda step=step: run.backward(step)]
        if variant == "no_sync":
            losses.insert(0, lambda step=step: run.backward(step + 10))
        if variant == "unused":
            losses = [lambda step=step: run.backward(step, use="left")]
        if variant == "not finite" and step == 1:
            losses = [lambda: run.backward(1, infinite_loss)]
        *first, last = losses
        with forbidden() if watched else nullcontext():
            for backward in first:
                with run.no_sync():
                    backward()
            last()
            if variant == "clip_grad_norm_":
                run.optimizer.clip_grad_norm_(0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()
    return whole(run.model, run.optimizer)


@functools.cache
def trained(at: int) -> ranks.Cases:
    """Train all variants on one group."""
    cases = itertools.product(STAGES, VARIANTS)
    return ranks.run_cases(at, {c: functools.partial(train, *c) for c in cases})


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_reads_nothing_on_the_host(at: int, stage: int, variant: str) -> None:
    for result in trained(at)[stage, variant]:
        for value in result.values():
            assert torch.isfinite(value).all()


def test_watching_changes_nothing() -> None:
    """The result under the watch is that without it."""
    watched = train(1, "plain")
    unwatched = train(1, "plain", watched=False)
    assert apart(watched, unwatched, limit=0.0) == {}


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        float,
        bool,
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: [0, 1, 2][t],
        lambda t: torch.nonzero(t),
        lambda t: 1.0 if t else 0.0,
    ],
    ids=["item", "float", "bool", "cpu", "nonzero", "index", "torch.nonzero", "if"],
)
def test_the_watch_sees_reads(read: Callable[[Tensor], Any]) -> None:
    with forbidden(), pytest.raises(HostSync):
        read(torch.tensor(1))


def test_the_watch_ends() -> None:
    with forbidden():
        pass
    assert torch.tensor(2.5).item() == 2.5
    assert float(torch.tensor(1.5)) == 1.5
    assert bool(torch.tensor(True))
    assert zerokern
