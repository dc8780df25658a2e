"""Bounds beyond one call of `clip_grad_norm_`: what p.grad shows in a world of one,
norms that are not finite, loss scales, what is reported. The loops are in
`support/scripts/bounds.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, differing, sharded, whole, world
from registry import cases_of
from short_runs import loss_of_share, short
from torch import Tensor, nn
from training import everything

import zerokern

case = cases_of("gradients")

INF, NAN = float("inf"), float("nan")


# ------------------------------------------------------------ p.grad in a world of one

Clip = Callable[[Any, list[nn.Parameter]], Any]
"""Of an optimizer of ours, or of parameters by torch's functions if it is None."""


def _norm(
    bound: float,
    order: float,
    optimizer: Any,
    params: list[Any],
) -> Any:
    if optimizer is None:
        return nn.utils.clip_grad_norm_(params, bound, order)
    return optimizer.clip_grad_norm_(bound, order)


def _value(
    limit: float,
    optimizer: Any,
    params: list[Any],
) -> Any:
    if optimizer is None:
        return nn.utils.clip_grad_value_(params, limit)
    return optimizer.clip_grad_value_(limit)


def _in_turn(*clips: Clip) -> Clip:
    def clip(optimizer: Any, params: list[Any]) -> Any:
        return [one(optimizer, params) for one in clips][-1]

    return clip


def _of_norm(bound: float, order: float = 2.0) -> Clip:
    return functools.partial(_norm, bound, order)


SHOWN: dict[str, Clip] = {
    "norm": _of_norm(0.1),
    "norm above": _of_norm(1e3),
    "largest element": _of_norm(1e-3, INF),
    "sum of elements": _of_norm(0.5, 1.0),
    "twice": _in_turn(_of_norm(0.1), _of_norm(INF)),
    "tighter": _in_turn(_of_norm(0.3), _of_norm(0.1)),
    "every element": functools.partial(_value, 1e-3),
    "norm and elements": _in_turn(_of_norm(0.1), functools.partial(_value, 1e-3)),
}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        found[name] = param.grad.clone()
    return found


def add_noise(model: nn.Module) -> None:
    """As differential privacy does after clipping."""
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator)
        param.grad.add_(noise, alpha=1e-2)  # type: ignore[union-attr]


@in_stages
@pytest.mark.parametrize("name", SHOWN)
def test_what_was_clipped_is_in_p_grad_and_noise_added_to_it_is_used(
    name: str, stage: int
) -> None:
    ours, theirs = models.toy(), models.toy()
    optimizer = sharded(
        ours,
        stage,
        lr=1e-2,
        eps=1e-2,
    )
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=1e-2)
    for step in range(3):
        for model, o in ((ours, optimizer), (theirs, plain)):
            o.zero_grad()
            models.loss_of(model, *models.batch(step)).backward()
            SHOWN[name](None if o is plain else o, list(model.parameters()))
        # Clamped to a thousandth of what was rounded.
        assert apart(gradients_of(ours), gradients_of(theirs), limit=1e-4) == {}
        for model, o in ((ours, optimizer), (theirs, plain)):
            add_noise(model)
            o.step()
        assert apart(whole(ours, optimizer), whole(theirs, plain)) == {}


@in_stages
def test_gradients_of_single_samples_are_clipped_and_summed(stage: int) -> None:
    """By hand, as torch's users do it: the optimizer clips each, p.grad is copied and
    zeroed, and the sum put back."""
    ours, theirs = models.toy(), models.toy()
    optimizer = sharded(
        ours,
        stage,
        lr=1e-2,
        eps=1e-2,
    )
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=1e-2)
    for step in range(2):
        for model, o in ((ours, optimizer), (theirs, plain)):
            params = list(model.parameters())
            total = [torch.zeros_like(p) for p in params]
            tokens, targets = models.batch(step)
            for sample in range(4):
                o.zero_grad()
                own = tokens[sample : sample + 1], targets[sample : sample + 1]
                models.loss_of(model, *own).backward()
                _of_norm(0.2)(None if o is plain else o, params)
                for sum_, param in zip(total, params, strict=True):
                    assert param.grad is not None
                    sum_ += param.grad
            for sum_, param in zip(total, params, strict=True):
                param.grad = sum_ / 4
            o.step()
    assert apart(whole(ours, optimizer), whole(theirs, plain)) == {}


# ---------------------------------------------------------------- norms not finite

NORMS = (2.0, 1.0, 3.0, INF)


def _poisoned(
    stage: int | None,
    of: int,
    value: float,
) -> Any:
    """Return a run after a backward whose gradient on the last rank is not finite."""
    run = short(stage, of)
    run.optimizer.zero_grad()
    run.backward(0, lambda r: run.loss(0, r) * (value if r == of - 1 else 1.0))
    return run


def torchs_sentence(order: float) -> str:
    model = nn.Linear(2, 1)
    (model(torch.ones(1, 2)) * NAN).backward()
    with pytest.raises(RuntimeError) as error:
        nn.utils.clip_grad_norm_(
            model.parameters(), 1.0, order, error_if_nonfinite=True
        )
    return str(error.value)


@case
def not_finite(stage: int) -> dict[Any, Any]:
    """For each value and order, return what is said, what has changed and what differs
    from a run without a poisoned step."""
    found = {}
    for value, order in [*((INF, order) for order in NORMS), (NAN, 2.0), (NAN, INF)]:
        run, spared = _poisoned(stage, world(), value), short(stage, world())
        before = everything(run.model, run.optimizer)
        messages = []
        for ask in (
            lambda o, order=order: o.clip_grad_norm_(1.0, order, True),
            lambda o, order=order: o.get_total_norm(order, error_if_nonfinite=True),
        ):
            with pytest.raises(RuntimeError) as error:
                ask(run.optimizer)
            messages.append(str(error.value))
        changed = differing(everything(run.model, run.optimizer), before)
        for one in (run, spared):
            one.optimizer.zero_grad()
            one.backward(1)
            one.clip(0.1)
            one.step()
        after = [everything(one.model, one.optimizer) for one in (run, spared)]
        found[value, order] = messages, changed, differing(*after)
    return found


@at_worlds
@in_stages
def test_a_norm_that_is_not_finite_is_refused_in_torchs_words(
    stage: int, at: int
) -> None:
    """On all ranks, whichever has it. Nothing was changed; the next step is right."""
    for results in case.done(at)["not_finite", stage]:
        for (_, order), (messages, changed, apart_) in results.items():
            assert messages == [torchs_sentence(order)] * 2
            assert changed == []
            assert apart_ == []


@case
def not_finite_and_not_refused(stage: int) -> tuple[bool, int, list[str]]:
    run = _poisoned(stage, world(), NAN)
    before = everything(run.model, run.optimizer)
    norm = run.optimizer.clip_grad_norm_(1.0)
    run.optimizer.clip_grad_norm_(0.5)
    run.optimizer.clip_grad_value_(0.1)
    run.step()
    skipped = int(run.optimizer.skipped_steps)
    after = everything(run.model, run.optimizer)
    return bool(norm.isfinite()), skipped, differing(after, before)


@at_worlds
@in_stages
def test_a_step_of_a_norm_that_is_not_finite_is_skipped(stage: int, at: int) -> None:
    for is_finite, skipped, changed in case.done(at)[
        "not_finite_and_not_refused", stage
    ]:
        assert not is_finite
        assert skipped == 1
        assert changed == []


# --------------------------------------------------------------------- one number


@case
def norms_of_orders(stage: int) -> list[Tensor]:
    run = short(stage, world())
    run.backward(0)
    found = [run.optimizer.get_total_norm(order) for order in (*NORMS, 0.5)]
    found += [run.optimizer.clip_grad_norm_(0.1, order) for order in (3.0, 1.0, 2.0)]
    return [norm.clone() for norm in found]


@at_worlds
@in_stages
def test_norms_of_every_order_are_the_same_bits_on_all_ranks(
    stage: int, at: int
) -> None:
    first, *others = case.done(at)["norms_of_orders", stage]
    assert [norm.dtype for norm in first] == [torch.float64] * 5 + [torch.float32] * 3
    assert all(norm.shape == () for norm in first)
    for other in others:
        assert all(map(torch.equal, other, first))


@case
def reported(stage: int) -> dict[str, tuple[float, float, float]]:
    """Return the norm, what the metrics say it was and what they say it was multiplied
    with."""
    found = {}
    for name, bounds in {
        "two": (0.2, 0.1),
        "wider": (0.1, 0.2),
        "log": (0.1, INF),
    }.items():
        run = short(stage, world())
        run.backward(0)
        norms = [float(run.optimizer.clip_grad_norm_(bound)) for bound in bounds]
        run.step()
        metrics = run.optimizer.metrics()
        found[name] = norms[0], metrics["grad_norm"], metrics["clip_coefficient"]
    return found


@at_worlds
@in_stages
def test_metrics_tell_the_norm_before_all_bounds_and_the_tightest(
    stage: int, at: int
) -> None:
    for results in case.done(at)["reported", stage]:
        for norm, reported_, coefficient in results.values():
            assert reported_ == pytest.approx(norm, rel=1e-6)
            assert coefficient == pytest.approx(0.1 / (norm + 1e-6), rel=1e-5)


# ------------------------------------------------------------------- under a loss scale


def _unscaled(
    run: Any,
    ask: str,
    scale: float,
) -> None:
    """Train with a loss scale: the scale is divided out of what bounds are about."""
    scaler = zerokern.GradScaler("cpu", init_scale=scale)
    for step in range(3):
        run.optimizer.zero_grad()
        scaler.scale(loss_of_share(run.model, step)).backward()
        scaler.unscale_(run.optimizer)
        if "value" in ask:
            run.optimizer.clip_grad_value_(1e-2)
        if "largest" in ask:
            run.seen.append(run.optimizer.clip_grad_norm_(5e-3, INF))
        if "norm" in ask:
            run.seen.append(run.optimizer.clip_grad_norm_(0.2))
            run.seen.append(run.optimizer.clip_grad_norm_(0.1))
        scaler.step(run.optimizer)
        scaler.update()


ASKED = ("norm", "value", "largest", "value norm", "value largest norm")


@case
def under_a_loss_scale(stage: int) -> dict[str, dict[str, Any]]:
    found = {}
    for ask in ASKED:
        results = []
        for scale in (1.0, 2.0**12):
            run = short(stage, world(), eps=1e-2)
            _unscaled(run, ask, scale)
            results.append((whole(run.model, run.optimizer), run.seen))
        (params, seen), (expected, norms) = results
        named = dict(enumerate(seen)), dict(enumerate(norms))
        found[ask] = {**apart(params, expected), **apart(*named)}  # type: ignore[arg-type]
    return found


@at_worlds
@in_stages
def test_a_loss_scale_changes_no_bound(stage: int, at: int) -> None:
    for results in case.done(at)["under_a_loss_scale", stage]:
        assert results == {ask: {} for ask in ASKED}
