"""Modes of torch that a program switches on for all it does. None changes a bit of what
is trained."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import differing, rank, sharded, world
from registry import cases_of
from torch import Tensor, nn
from training import everything

import zerokern
from zerokern import Precision

case = cases_of("programs")

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    """Also fills fresh memory with NaN."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.set_detect_anomaly(True):
            yield


@contextmanager
def precise_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


MODES: dict[str, Mode] = {
    "default bf16": lambda: default_dtype(torch.bfloat16),
    "default fp16": lambda: default_dtype(torch.float16),
    "default fp64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: default_device("meta"),
    "on the meta device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomaly": anomaly,
    "precise products": precise_products,
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "16 bits": {"precision": Precision(master="split24", moments="8bit")},
    "clipped": {"max_grad_norm": 0.5},
}


def losses(of: int = 4) -> list[Callable[[nn.Module], Tensor]]:
    """Return losses of batches that are there already: modes are for the optimizer, not
    for the data."""

    def loss(model: nn.Module, shares: list[Tensor]) -> Tensor:
        return models.loss_of(model, *shares)

    made = []
    for step in range(of):
        shares = [models.share(t, rank(), world()) for t in models.batch(step)]
        made.append(functools.partial(loss, shares=shares))
    return made


def _trained(
    stage: int,
    kind: str,
    build: Mode,
    train: Mode,
) -> dict[str, Tensor]:
    """Build an optimizer in one mode and train it in another; return everything."""
    model = models.toy(blocks=2)
    if kind == "16 bits":
        model.bfloat16()
    batches = losses()
    with build():
        optimizer = sharded(
            model,
            stage,
            lr=1e-2,
            **OPTIONS[kind],
        )
    with train():
        for step, loss in enumerate(batches):
            if step != 1:
                optimizer.zero_grad()
            with optimizer.no_sync() if step == 0 else nullcontext():
                loss(model).backward()
            if step == 2:
                optimizer.clip_grad_norm_(0.3)
            if step > 0:
                optimizer.step()
    return everything(model, optimizer)


@case
def modes(stage: int) -> dict[Any, list[str]]:
    """Return where a training differs in each mode from one in none."""
    found = {}
    for kind in OPTIONS:
        expected = _trained(
            stage,
            kind,
            nullcontext,
            nullcontext,
        )
        for name, mode in MODES.items():
            for when, build, train in (
                ("always", mode, mode),
                ("construction", mode, nullcontext),
                ("training", nullcontext, mode),
            ):
                if when == "always" or kind == "plain":
                    differences = differing(
                        _trained(
                            stage,
                            kind,
                            build,
                            train,
                        ),
                        expected,
                    )
                    found[name, kind, when] = differences
    return found


RUNS = [
    (name, kind, when)
    for name in MODES
    for kind in OPTIONS
    for when in ("always", "construction", "training")
    if when == "always" or kind == "plain"
]


@at_worlds
@in_stages
@pytest.mark.parametrize(("name", "kind", "when"), RUNS)
def test_a_mode_changes_no_bit(
    name: str, kind: str, when: str, stage: int, at: int
) -> None:
    for found in case.done(at)["modes", stage]:
        assert found[name, kind, when] == []


AROUND: dict[str, Mode] = {
    name: MODES[name]
    for name in ("default fp64", "default bf16", "default device meta", "deterministic")
}


def _checkpointed(stage: int, mode: Mode) -> dict[str, Tensor]:
    """In a mode: save a state and load it into another optimizer, look at metrics,
    gradients and whole parameters, train on."""
    model, other = models.toy(blocks=2), models.toy(seed=1, blocks=2)
    batches = losses()
    first, second = sharded(model, stage, lr=1e-2), sharded(other, stage, lr=1e-2)
    with mode():
        batches[0](model).backward()
        gradient = first.full_grad(model.head.weight)
        first.step()
        with first.full_params():
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        with second.full_params():
            other.load_state_dict(weights)
        second.load_state_dict(first.full_state_dict())
        assert first.metrics()["step"] == 1 and first.memory().total > 0
        second.zero_grad()
        batches[1](other).backward()
        second.step()
    assert gradient is not None
    return {**everything(other, second), "gradient": gradient}


def _scaled(stage: int, mode: Mode) -> dict[str, Tensor]:
    """In a mode: train with a loss scale, of which one step overflows."""
    model = models.toy(blocks=2)
    batches = losses()
    scale = torch.tensor([1024.0])
    optimizer = sharded(model, stage, lr=1e-2)
    with mode():
        for step, loss in enumerate(batches):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 else scale
            (loss(model) * factor).backward()
            optimizer.unscale_(scale)
            optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    return everything(model, optimizer)


@case
def around_modes(stage: int) -> dict[Any, list[str]]:
    found = {}
    for what, function in (("checkpoint", _checkpointed), ("scale", _scaled)):
        expected = function(stage, nullcontext)
        for name, mode in AROUND.items():
            found[what, name] = differing(function(stage, mode), expected)
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("what", ["checkpoint", "scale"])
def test_what_is_around_training_in_a_mode(
    what: str, name: str, stage: int, at: int
) -> None:
    for found in case.done(at)["around_modes", stage]:
        assert found[what, name] == []


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("rule", [zerokern.SGD, zerokern.Lion, zerokern.Adam])
def test_other_rules_in_a_mode(rule: Any, name: str) -> None:
    options = {"momentum": 0.9} if rule is zerokern.SGD else {}
    results = []
    for mode in (nullcontext, MODES[name]):
        model = models.toy(blocks=1)
        batches = losses(2)
        with mode():
            optimizer = rule(model.parameters(), lr=1e-3, **options)
            for loss in batches:
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
        results.append(everything(model, optimizer))
    assert differing(*results) == []
