"""full_params: parameters are whole inside, edits are kept, and a body that raises
changes nothing on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages, in_stages_1_and_2
from oracle import differing, rank, set_integer_gradients, sharded, whole, world
from registry import cases_of
from torch import nn
from training import everything, params_of, step_by_hand

case = cases_of("parameters")


def sharded_model() -> tuple[nn.Module, Any]:
    """Return a model of 16 bits in stage 3."""
    model = models.toy().bfloat16()
    return model, sharded(model, 3, lr=1e-2)


# ----------------------------------------------------------------- what is there inside


def refusal_of(use: Callable[[], Any]) -> str:
    """Return what a use is refused with; nothing if it is not."""
    try:
        use()
    except RuntimeError as error:
        return str(error)
    return ""


@case(stages=(3,))
def state_dict_outside(stage: int) -> tuple[str, str, list[str]]:
    """Return what is said outside, of saving and of loading, and what has changed."""
    model, optimizer = sharded_model()
    saved = models.toy(seed=1).bfloat16().state_dict()
    reading = refusal_of(model.state_dict)
    loading = refusal_of(lambda: model.load_state_dict(saved))
    with optimizer.full_params():
        inside = model.state_dict()
    assert list(inside) == list(models.toy().state_dict())
    start = params_of(models.toy().bfloat16())
    return reading, loading, differing(whole(model, optimizer), start)


def test_state_dict_of_a_sharded_model_is_refused_outside_of_full_params() -> None:
    """Never silent placeholders."""
    for reading, loading, changed in case.done(2)["state_dict_outside", 3]:
        assert "with optimizer.full_params()" in reading
        assert "with optimizer.full_params()" in loading
        assert changed == []


@case(stages=(3,))
def nested(stage: int) -> list[str]:
    model, optimizer = sharded_model()
    before = whole(model, optimizer)
    with optimizer.full_params():
        with optimizer.full_params():
            pass
        inside = params_of(model)
    return differing(inside, before)


def test_full_params_can_be_nested() -> None:
    assert case.done(2)["nested", 3] == [[], []]


@case(stages=(3,))
def forward_inside(stage: int) -> tuple[bool, int]:
    """Evaluate a gathered model; return whether outputs agree, and scratch memory."""
    model, optimizer = sharded_model()
    tokens, _ = models.batch(0)
    with torch.no_grad():
        outside = model(tokens)
        with optimizer.full_params():
            inside = model(tokens)
            again = model(tokens)
    agree = torch.equal(outside, inside) and torch.equal(inside, again)
    return agree, optimizer.memory().buffers


def test_a_forward_inside_full_params() -> None:
    for agree, scratch in case.done(2)["forward_inside", 3]:
        assert agree
        assert scratch == 0


@case(stages=(3,))
def loaded_inside(stage: int) -> list[str]:
    model, optimizer = sharded_model()
    source = models.toy(seed=1).bfloat16()
    with optimizer.full_params():
        model.load_state_dict(source.state_dict())
    return differing(whole(model, optimizer), params_of(source))


def test_a_checkpoint_is_loaded_inside_full_params() -> None:
    assert case.done(2)["loaded_inside", 3] == [[], []]


# -------------------------------------------------------------------------------- edits

EDITED = [
    "blocks.1.up.weight",
    "blocks.1.up.weight/master",
    "head.bias",
    "head.bias/master",
]


@case(stages=(3,))
def edits(stage: int) -> dict[bool, tuple[list[str], list[str], int]]:
    """Return, for a body that returns and one that raises: what it has changed, what
    the next step changed, and scratch memory."""
    return {fails: _edit(fails=fails) for fails in (False, True)}


def _edit(*, fails: bool) -> tuple[list[str], list[str], int]:
    model, optimizer = sharded_model()
    set_integer_gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = everything(model, optimizer)
    try:
        with optimizer.full_params(), torch.no_grad():
            model.head.bias.fill_(3.0)
            model.blocks[1].up.weight.mul_(2.0)
            if fails:
                raise KeyError("by the user")
    except KeyError:
        assert fails
    changed = differing(everything(model, optimizer), before)
    scratch = optimizer.memory().buffers
    edited = whole(model, optimizer)
    set_integer_gradients(model, 1)
    optimizer.step()
    return changed, differing(whole(model, optimizer), edited), scratch


def test_edits_inside_full_params_are_kept() -> None:
    """In the masters too; the memory goes back, and the next step works."""
    for found in case.done(2)["edits", 3]:
        changed, trained, scratch = found[False]
        assert changed == EDITED
        assert trained != []
        assert scratch == 0


def test_edits_are_dropped_when_the_body_raises() -> None:
    for found in case.done(2)["edits", 3]:
        changed, trained, scratch = found[True]
        assert changed == []
        assert trained != []
        assert scratch == 0


def _edit_in_place(stage: int, *, fails: bool) -> list[str]:
    model = models.toy().bfloat16()
    optimizer = sharded(model, stage)
    before = everything(model, optimizer)
    try:
        with optimizer.full_params(), torch.no_grad():
            model.head.bias.fill_(3.0)
            if fails:
                raise KeyError("by the user")
    except KeyError:
        assert fails
    return differing(everything(model, optimizer), before)


@case(stages=(1, 2))
def edits_in_place(stage: int) -> dict[bool, list[str]]:
    return {fails: _edit_in_place(stage, fails=fails) for fails in (False, True)}


@in_stages_1_and_2
@pytest.mark.parametrize("fails", (False, True), ids=["returns", "raises"])
def test_edits_inside_full_params_are_kept_in_stages_1_and_2(
    stage: int, fails: bool
) -> None:
    """The model is edited in place there; the master weights follow, whatever became of
    the body."""
    for changed in case.done(2)["edits_in_place", stage]:
        assert changed[fails] == ["head.bias", "head.bias/master"]


# ------------------------------------------------------------ the body raises somewhere


def _failing_body(
    stage: int, failing: Callable[[int], bool], *, enter: bool = True
) -> dict[str, Any]:
    model = models.toy().bfloat16()
    optimizer = sharded(model, stage, lr=1e-2)
    step_by_hand(model, optimizer, 0)
    before = everything(model, optimizer)
    error: BaseException | None = None
    if enter:
        try:
            with optimizer.full_params():
                model.head.bias.fill_(3.0)
                model.blocks[1].up.weight.mul_(2.0)
                if failing(rank()):
                    raise KeyError("by the user")
        except (KeyError, RuntimeError) as raised:
            error = raised
    after = everything(model, optimizer)
    step_by_hand(model, optimizer, 1)
    return {
        "error": f"{type(error).__name__}: {error}",
        "changed": differing(after, before),
        "scratch": optimizer.memory().buffers,
        "next": everything(model, optimizer),
    }


FAILING: dict[str, Callable[[int], bool]] = {
    "all ranks": lambda r: True,
    "rank 0": lambda r: r == 0,
    "the last rank": lambda r: r == world() - 1,
}


@case
def failing_bodies(stage: int) -> dict[str, dict[str, Any]]:
    return {who: _failing_body(stage, failing) for who, failing in FAILING.items()}


@case
def never_entered(stage: int) -> dict[str, Any]:
    return _failing_body(stage, lambda r: False, enter=False)


@case
def edited_without_a_failure(stage: int) -> dict[str, Any]:
    return _failing_body(stage, lambda r: False)


@at_worlds
@in_stages
@pytest.mark.parametrize("who", FAILING)
def test_a_body_of_full_params_that_raises(who: str, stage: int, at: int) -> None:
    """The exception comes through; parameters are what they were on every rank, also
    where the body went well.

    Stages 1 and 2 gather nothing: the user's code has edited the model itself, and the
    edits stand on every rank.
    """
    sharded_parameters = stage == 3 and at > 1
    twin = "never_entered" if sharded_parameters else "edited_without_a_failure"
    failed = case.done(at)["failing_bodies", stage]
    twins = case.done(at)[twin, stage]
    for r, (results, expected) in enumerate(zip(failed, twins, strict=True)):
        result = results[who]
        raises = {
            "all ranks": True,
            "rank 0": r == 0,
            "the last rank": r == at - 1,
        }
        if raises[who]:
            assert result["error"] == "KeyError: 'by the user'"
        elif sharded_parameters:
            assert result["error"].startswith("RuntimeError")
            assert "full_params" in result["error"]
        assert result["changed"] == ([] if sharded_parameters else EDITED)
        assert result["scratch"] == 0
        assert differing(result["next"], expected["next"]) == []
