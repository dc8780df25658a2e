"""Misuse while training: it raises, nothing has changed, and the next step is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import differing, rank, set_integer_gradients, sharded, whole
from torch import nn
from training import everything, step_by_hand

import zerokern


def assert_unchanged_by(
    error: type[Exception], match: str, misuse: Callable[[nn.Module, Any], Any]
) -> None:
    """Assert that a misuse raises, that nothing changed, and that the next step is
    right."""
    model, twin = models.toy(), models.toy()
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-2)
    plain = zerokern.AdamW(twin.parameters(), lr=1e-2)
    for m, o in ((model, optimizer), (twin, plain)):
        step_by_hand(m, o, 0)
        o.zero_grad()

    with pytest.raises(error, match=match):
        misuse(model, optimizer)
    assert differing(everything(model, optimizer), everything(twin, plain)) == []

    for m, o in ((model, optimizer), (twin, plain)):
        step_by_hand(m, o, 1)
    assert differing(everything(model, optimizer), everything(twin, plain)) == []


def test_a_closure_without_a_loss() -> None:
    def misuse(model: nn.Module, optimizer: Any) -> None:
        optimizer.step(lambda: set_integer_gradients(model, 5))

    assert_unchanged_by(TypeError, r"NoneType.*return the loss", misuse)


def test_a_closure_that_raises() -> None:
    def misuse(model: nn.Module, optimizer: Any) -> None:
        set_integer_gradients(model, 5)
        optimizer.step(lambda: 1 / 0)

    assert_unchanged_by(ZeroDivisionError, "division", misuse)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("-inf"), float("nan")])
def test_a_norm_that_has_no_parts(norm_type: float) -> None:
    assert_unchanged_by(
        ValueError,
        r"norm_type=.*positive",
        lambda model, optimizer: optimizer.clip_grad_norm_(1.0, norm_type),
    )


@pytest.mark.parametrize("bound", [-1.0, float("nan")])
def test_a_negative_bound(bound: float) -> None:
    assert_unchanged_by(
        ValueError,
        r"max_norm",
        lambda model, optimizer: optimizer.clip_grad_norm_(bound),
    )


def test_a_late_group_that_needs_other_states() -> None:
    group = {"params": [nn.Parameter(torch.ones(3))], "amsgrad": True}
    assert_unchanged_by(
        ValueError,
        r"amsgrad differs between param groups",
        lambda model, optimizer: optimizer.add_param_group(group),
    )


def test_a_late_parameter_on_another_device() -> None:
    group = {"params": [nn.Parameter(torch.ones(3, device="meta"))]}
    assert_unchanged_by(
        ValueError,
        r"is on meta.*on cpu.*move it",
        lambda model, optimizer: optimizer.add_param_group(group),
    )


@in_stages
def test_a_sparse_gradient(stage: int) -> None:
    """It names the parameter and the remedy; the next dense step is right."""

    def case() -> list[str]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))

        model, twin = build(), build()
        optimizer = sharded(model, stage, model.named_parameters())
        plain = sharded(twin, stage)
        with pytest.raises(TypeError, match=r"0\.weight.*sparse.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.zero_grad()
        model[0].sparse = twin[0].sparse = False
        for m, o in ((model, optimizer), (twin, plain)):
            m(torch.tensor([1, 2 + rank()])).square().sum().backward()
            o.step()
        return differing(whole(model, optimizer), whole(twin, plain))

    assert ranks.run(2, case) == [[], []]


def test_a_sparse_gradient_set_by_hand() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = zerokern.AdamW(model.parameters())
    before = model.weight.detach().clone()
    model.weight.grad = torch.sparse_coo_tensor(
        [[1]], torch.ones(1, 4), (10, 4), check_invariants=True
    )
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_torch_clipping_works_or_says_what_to_call() -> None:
    """torch's own clip_grad_norm_ must not be a silent no-op on reduced gradients."""

    def case() -> bool:
        norms, params = [], []
        options = {"weight_decay": 0.0, "betas": (0.0, 0.0), "eps": 1.0}
        for clip in ("torch", "ours"):
            model = models.toy()
            optimizer = zerokern.AdamW(model.parameters(), stage=2, **options)
            models.loss_of(model, *models.batch(0)).backward()
            try:
                if clip == "torch":
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                else:
                    norm = optimizer.clip_grad_norm_(1e-3)
            except RuntimeError as error:
                return "clip_grad_norm_" in str(error) or "memory" in str(error)
            optimizer.step()
            norms.append(float(norm))
            params.append(whole(model, optimizer))
        return norms[0] == pytest.approx(norms[1]) and differing(*params) == []

    assert ranks.run(2, case) == [True, True]
