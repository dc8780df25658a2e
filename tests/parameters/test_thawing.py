"""Parameters that are thawed or added after construction: the same bits, bytes and
memory as if the optimizer had been built that way. The loops are in
`support/scripts/thawing.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import differing, sharded
from registry import cases_of
from scripts.thawing import freeze, of_part, thaw
from short_runs import loss_of_share
from torch import nn
from training import everything

import zerokern
from zerokern import Precision

case = cases_of("parameters")

# ------------------------------------------------------------------- the same numbers

FORMATS: dict[str, tuple[torch.dtype, Precision]] = {
    "fp32": (torch.float32, Precision()),
    "fp32, 8-bit moments": (torch.float32, Precision(moments="8bit")),
    "bf16, fp32 masters": (torch.bfloat16, Precision()),
    "bf16, split24, 8-bit moments": (
        torch.bfloat16,
        Precision(master="split24", moments="8bit"),
    ),
    "bf16, split32, bf16 moments": (
        torch.bfloat16,
        Precision(master="split32", moments="bf16"),
    ),
    "bf16 alone": (torch.bfloat16, Precision(master="none")),
}
ONE_EACH = zerokern.Buckets(bytes=1)
"""A bucket for each parameter: those that are thawed are cut as all others."""
STEPS, THAW = 5, 2
REDUCTION = "reduce_scatter"


def _trained(stage: int, name: str, *, is_frozen: bool) -> dict[str, Any]:
    """Train with blocks that are frozen for some steps; or whose gradients are dropped
    in these steps, which torch leaves alone as well."""
    dtype, precision = FORMATS[name]
    model = models.toy(blocks=2).to(dtype)
    if is_frozen:
        freeze(model, "blocks")
    optimizer = sharded(
        model, stage, lr=1e-2, precision=precision, buckets=ONE_EACH, max_grad_norm=0.5
    )
    for step in range(STEPS):
        if step == THAW:
            thaw(model, "blocks")
        optimizer.zero_grad()
        loss_of_share(model, step).backward()
        if step < THAW:
            for param in of_part(model, "blocks"):
                param.grad = None
        optimizer.step()
    return everything(model, optimizer)


@case
def thawed_in_formats(stage: int) -> dict[str, list[str]]:
    """Return what differs between the two, by format."""
    found = {}
    for name in FORMATS:
        results = [_trained(stage, name, is_frozen=f) for f in (True, False)]
        found[name] = differing(*results)
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", FORMATS)
def test_thawed_parameters_train_as_if_they_had_waited_for_gradients(
    name: str, stage: int, at: int
) -> None:
    """Bit for bit, with masters, quantized moments and stochastic rounding."""
    for results in case.done(at)["thawed_in_formats", stage]:
        assert results[name] == []


# ------------------------------------------------------------ the same bytes and memory


def _step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model.zero_grad()
    loss_of_share(model, step).backward()
    optimizer.step()


def _sent(model: nn.Module, optimizer: Any) -> Any:
    """Return what a step sends once everything is warm: calls by kind and size."""
    for step in range(3):
        optimizer.comm_log(clear=True)
        _step(model, optimizer, step)
    return Counter(
        (call.op, call.elements, call.dtype, call.bytes)
        for call in optimizer.comm_log(clear=True)
    )


def _from_the_start(stage: int) -> tuple[nn.Module, Any]:
    model = models.toy(blocks=2)
    return model, sharded(model, stage, buckets=ONE_EACH)


def _thawed(stage: int) -> tuple[nn.Module, Any]:
    model = models.toy(blocks=2)
    freeze(model, "blocks")
    optimizer = sharded(model, stage, buckets=ONE_EACH)
    _step(model, optimizer, 0)
    thaw(model, "blocks")
    return model, optimizer


def _thawed_one_by_one(stage: int) -> tuple[nn.Module, Any]:
    model = models.toy(blocks=2)
    freeze(model, "blocks")
    optimizer = sharded(model, stage, buckets=ONE_EACH)
    for step, part in enumerate(("blocks.1", "blocks.0")):
        _step(model, optimizer, step)
        thaw(model, part)
    return model, optimizer


def _added(stage: int) -> tuple[nn.Module, Any]:
    model = models.toy(blocks=2)
    freeze(model, "blocks")
    ends = of_part(model, "embedding") + of_part(model, "head")
    optimizer = sharded(model, stage, ends, buckets=ONE_EACH)
    _step(model, optimizer, 0)
    thaw(model, "blocks")
    optimizer.add_param_group({"params": of_part(model, "blocks")})
    return model, optimizer


def _regrouped(stage: int) -> tuple[nn.Module, Any]:
    """Edits of groups change no bucket."""
    model = models.toy(blocks=2)
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2]}]
    optimizer = sharded(model, stage, groups, buckets=ONE_EACH)
    _step(model, optimizer, 0)
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].insert(0, moved)
    optimizer.param_groups.reverse()
    return model, optimizer


WAYS = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (_thawed, _thawed_one_by_one, _added, _regrouped)
}


@case
def volumes(stage: int) -> dict[str, Any]:
    expected_model, expected = _from_the_start(stage)
    found: dict[str, Any] = {
        "from the start": (_sent(expected_model, expected), expected.memory())
    }
    for name, way in WAYS.items():
        model, optimizer = way(stage)
        found[name] = _sent(model, optimizer), optimizer.memory()
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("way", WAYS)
def test_a_step_sends_and_holds_what_it_would_from_the_start(
    way: str, stage: int, at: int
) -> None:
    """Calls of the same sizes, byte for byte, and the same memory by role."""
    for results in case.done(at)["volumes", stage]:
        sent, memory = results[way]
        expected, held = results["from the start"]
        assert sent == expected
        assert memory == held
        assert bool(expected) == (at > 1)


@case
def reduced_elements(stage: int) -> tuple[list[int], int]:
    """Return how much a step reduces before parameters are thawed and after, and how
    much these are."""
    model = models.toy(blocks=2)
    freeze(model, "blocks")
    optimizer = sharded(model, stage, buckets=ONE_EACH)
    found = []
    for part in ("", "blocks"):
        if part:
            thaw(model, part)
        calls = _sent(model, optimizer).items()
        found.append(sum(n * call[1] for call, n in calls if call[0] == REDUCTION))
    return found, sum(p.numel() for p in of_part(model, "blocks"))


@at_worlds
@in_stages
def test_frozen_parameters_are_not_reduced(stage: int, at: int) -> None:
    for (before, after), elements in case.done(at)["reduced_elements", stage]:
        if at > 1:
            assert after - before >= elements
        else:
            assert before == after == 0


# --------------------------------------------------------------------------- refused


def _added_late(stage: int, name: str) -> tuple[str, list[str]]:
    """Return what is said of a group that is added, and, if it is refused, what differs
    from a run in which nobody tried."""
    model: Any = models.toy(blocks=2)
    optimizer = sharded(model, stage, lr=1e-2)
    _step(model, optimizer, 0)
    params = {
        "unknown unit": [],
        "not in the model": [nn.Parameter(torch.ones(5))],
        "known already": [model.head.weight],
    }[name]
    if name == "unknown unit":
        model.blocks.append(models.Block())
        params = list(model.blocks[-1].parameters())
    try:
        optimizer.add_param_group({"params": params})
    except ValueError as error:
        message = str(error)
    else:
        return "", []
    if name == "unknown unit":
        del model.blocks[-1]
    twin = models.toy(blocks=2)
    plain = sharded(twin, stage, lr=1e-2)
    _step(twin, plain, 0)
    for m, o in ((model, optimizer), (twin, plain)):
        _step(m, o, 1)
    return message, differing(everything(model, optimizer), everything(twin, plain))


@case
def refused_groups(stage: int) -> dict[str, tuple[str, list[str]]]:
    names = ("unknown unit", "not in the model", "known already")
    return {name: _added_late(stage, name) for name in names}


@at_worlds
@in_stages
def test_groups_that_cannot_be_trained_are_refused_and_change_nothing(
    stage: int, at: int
) -> None:
    """Stage 3 gathers units that it knows; alone, and in the other stages, any
    parameter can be trained."""
    for results in case.done(at)["refused_groups", stage]:
        assert "more than one parameter group" in results["known already"][0]
        for name in ("unknown unit", "not in the model"):
            message = results[name][0]
            assert ("no hook gathers" in message) == (stage == 3 and at > 1)
        assert all(changed == [] for _, changed in results.values())
