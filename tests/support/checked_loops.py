"""Loops under ZEROKERN_CHECK inside of one process, and faults that zerokern could
have: what the check has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from unittest import mock

import models
import torch
from oracle import STAGES, rank, world
from scripts.thawing import freeze, thaw
from torch import Tensor, nn
from torch.nn import functional as F
from units import Stack, batch, squares

import zerokern
from zerokern import ops
from zerokern.checking import checked, session
from zerokern.checking.session import Phase, Session
from zerokern.sharding import clipping, coordinator
from zerokern.sharding.gradients import GradientBucket

STEPS = 4
SMALL = zerokern.Buckets(bytes=3000)

Loop = Callable[[int], None]
Fault = Callable[[], AbstractContextManager[Any]]


class _Enough(BaseException):
    """Ends a run."""


class InProcess(Session):
    """Ends runs by an exception, where a script would be run again."""

    def end_plain(self) -> NoReturn:
        self.refuse_chance()
        raise _Enough

    def succeed(self) -> NoReturn:
        raise _Enough


def verdicts(loop: Loop, faults: Mapping[str, Fault]) -> dict[tuple[str, int], str]:
    """Return what the check says of a loop, by fault and stage: "" if all agrees. A
    fault is there in our run only."""
    checking = InProcess(STEPS, rank())
    no_script = mock.patch.object(session, "_refuse_no_script")
    said = {}
    with mock.patch.object(checked, "SESSION", checking), no_script:
        for phase in (Phase.PLAIN, Phase.AGAIN):
            assert _run(checking, phase, loop, 1) == ""
        for name, fault in faults.items():
            for stage in STAGES:
                checking.forget(Phase.OURS)
                with fault():
                    said[name, stage] = _run(checking, Phase.OURS, loop, stage)
    return said


def _run(checking: Session, phase: Phase, loop: Loop, stage: int) -> str:
    checking.begin(phase)
    try:
        loop(stage)
    except _Enough:
        return ""
    except RuntimeError as error:
        return str(error)
    return "the loop ended early"


def small(stage: int, **options: Any) -> tuple[Any, Any]:
    """Return a model and an optimizer of it."""
    torch.manual_seed(0)
    model = Stack()
    made = {"buckets": SMALL, "model": model, "stage": stage, "lr": 1e-2, **options}
    return model, zerokern.AdamW(options.pop("params", model.parameters()), **made)


def loss_of(model: Any, step: int) -> Tensor:
    return squares(model(batch(step, rank())))


def train(model: Any, optimizer: Any, steps: range) -> None:
    """Take plain steps."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


# --------------------------------------------------------------------------- the loops


def plain(stage: int) -> None:
    train(*small(stage), range(STEPS))


def clipped_twice(stage: int) -> None:
    """To a bound, then only to read the norm."""
    model, optimizer = small(stage, eps=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.clip_grad_norm_(0.02)
        optimizer.clip_grad_norm_(float("inf"))
        optimizer.step()


def accumulated(stage: int) -> None:
    model, optimizer = small(stage)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, 10 * step).backward()
        loss_of(model, 10 * step + 1).backward()
        optimizer.step()


def probed(stage: int) -> None:
    """Gradients for a look between backward and step."""
    model, optimizer = small(stage)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, step).backward()
        loss = loss_of(model, step + 1)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()


def thawed(stage: int) -> None:
    torch.manual_seed(0)
    model = Stack()
    freeze(model, "units.1")
    made = {"buckets": SMALL, "model": model, "stage": stage, "lr": 1e-2}
    optimizer = zerokern.AdamW(model.parameters(), **made)
    train(model, optimizer, range(2))
    thaw(model, "units.1")
    train(model, optimizer, range(2, STEPS))


def regrouped(stage: int) -> None:
    """A group is sorted, and one of another learning rate."""
    torch.manual_seed(0)
    model = Stack()
    params = list(model.parameters())
    groups = [{"params": params[:4], "lr": 1e-2}, {"params": params[4:], "lr": 1e-4}]
    optimizer = zerokern.AdamW(groups, model=model, stage=stage, buckets=SMALL)
    train(model, optimizer, range(2))
    optimizer.param_groups.reverse()
    train(model, optimizer, range(2, STEPS))


def written(stage: int) -> None:
    """bf16 weights are halved, which torch does not see."""
    torch.manual_seed(0)
    model = Stack().bfloat16()
    optimizer = zerokern.AdamW(
        model.parameters(), model=model, stage=stage, buckets=SMALL, lr=1e-2
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        squares(model(batch(step, rank()).bfloat16())).backward()
        optimizer.step()
        if step == 1:
            with optimizer.full_params():
                for param in model.parameters():
                    param.data.mul_(0.5)


def penalised(stage: int) -> None:
    """A gradient penalty, with a double backward."""
    model, optimizer = small(stage)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, rank()).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (squares(output) + squares(slope)).backward()
        optimizer.step()


def with_a_closure(stage: int) -> None:
    model, optimizer = small(stage)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def unused_on_some_ranks(stage: int) -> None:
    model = models.forked()
    optimizer = zerokern.AdamW(model.parameters(), model=model, stage=stage, lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, targets = models.batch(step)
        logits = model(tokens, use=("left", "right", "both")[(step + rank()) % 3])
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


def with_a_scaler(stage: int) -> None:
    model, optimizer = small(stage)
    scaler = zerokern.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()


def two_optimizers(stage: int) -> None:
    """They step in turn, over disjoint parts."""
    torch.manual_seed(0)
    models_ = nn.ModuleList([Stack(), Stack()])
    pair = [
        zerokern.SGD(m.parameters(), model=m, stage=stage, lr=0.1, momentum=0.9)
        for m in models_
    ]
    for step in range(STEPS):
        for optimizer in pair:
            optimizer.zero_grad()
        x = models_[0](batch(step, rank()))
        squares(models_[1](x)).backward()
        for optimizer in reversed(pair):
            optimizer.step()


LOOPS: dict[str, Loop] = {
    f.__name__.replace("_", " "): f
    for f in (
        plain,
        clipped_twice,
        accumulated,
        probed,
        thawed,
        regrouped,
        written,
        penalised,
        with_a_closure,
        unused_on_some_ranks,
        with_a_scaler,
        two_optimizers,
    )
}


# -------------------------------------------------------------------------- the faults


@contextmanager
def _latest_bound() -> Iterator[None]:
    """Of two bounds the later one holds."""

    def latest(bound: Any, other: Any) -> Any:
        return bound if other is None else other

    with (
        mock.patch.object(clipping, "tighter", latest),
        mock.patch.object(coordinator, "tighter", latest),
    ):
        yield


def _never_accumulates() -> AbstractContextManager[Any]:
    """A gradient takes the place of what was there."""
    take = GradientBucket.take

    def replace(bucket: Any, slot: Any) -> None:
        if slot.view is not None and slot.param.grad is not slot.view:
            slot.view.zero_()
        take(bucket, slot)

    return mock.patch.object(GradientBucket, "take", replace)


def _deaf_to_edits() -> AbstractContextManager[Any]:
    """Param groups are read once."""

    def keep(optimizer: Any) -> Any:
        return optimizer.coordinator

    return mock.patch.object(zerokern.AdamW, "_follow_edits", keep)


@contextmanager
def _half_a_gradient() -> Iterator[None]:
    """One parameter's gradient is halved."""
    take = GradientBucket.take

    def halved(bucket: Any, slot: Any) -> None:
        if slot.handle.name == "units.1.weight" and slot.param.grad is not None:
            slot.param.grad.mul_(0.5)
        take(bucket, slot)

    with mock.patch.object(GradientBucket, "take", halved):
        yield


@contextmanager
def _local_gradients() -> Iterator[None]:
    """Gradients are not averaged: a wrong factor on what is summed."""
    reduce = ops.prepared_reduce

    def unscaled(*args: Any, scale: float, **options: Any) -> Any:
        return reduce(*args, scale=1.0, **options)

    with mock.patch.object(ops, "prepared_reduce", unscaled):
        yield


FAULTS: dict[str, tuple[str, Fault, int, str]] = {
    "the later of two bounds holds": ("clipped twice", _latest_bound, 2, "gradient"),
    "gradients do not add up": (
        "accumulated",
        _never_accumulates,
        2,
        "the gradient of",
    ),
    "thawed parameters are not trained": (
        "thawed",
        _deaf_to_edits,
        1,
        "'units.1",
    ),
    "groups are read once": ("regrouped", _deaf_to_edits, 1, "in step 3 '"),
    "half a gradient": ("plain", _half_a_gradient, 1, "'units.1.weight'"),
    "sums in place of means": ("plain", _local_gradients, 2, "the gradient of"),
}
"""The loop that shows a fault, the fault, from how many ranks on, and what is said."""


NONE = "no fault"


def everything_said() -> dict[tuple[str, str, int], str]:
    """Return what the check says, by loop, fault and stage."""
    said = {}
    for name, loop in LOOPS.items():
        faults: dict[str, Fault] = {NONE: nullcontext}
        for title, (of_loop, fault, ranks, _) in FAULTS.items():
            if of_loop == name and world() >= ranks:
                faults[title] = fault
        for (title, stage), clause in verdicts(loop, faults).items():
            said[name, title, stage] = clause
    return said
