"""Thawing: parameters that were frozen when the optimizer was built, or that it was not
given, and that are trained later."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import models
import torch
from oracle import Run
from registry import SMALL, script
from torch import nn

import zerokern

SMOOTH = {"eps": 1e-3}
Part = str
"""The beginning of the names of some parameters."""


def of_part(model: nn.Module, part: Part) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith(part)]


def freeze(model: nn.Module, *parts: Part) -> None:
    for part in parts:
        for param in of_part(model, part):
            param.requires_grad_(False)


def thaw(model: nn.Module, *parts: Part) -> None:
    for part in parts:
        for param in of_part(model, part):
            param.requires_grad_(True)


def frozen(*parts: Part) -> Callable[[], nn.Module]:
    """Return a function that builds a model with frozen parts."""

    def build() -> nn.Module:
        model = models.forked()
        freeze(model, *parts)
        return model

    return build


def iterate(run: Run, steps: Iterable[int], **forward: Any) -> None:
    for step in steps:
        run.optimizer.zero_grad()
        run.backward(step, **forward)
        run.step()
        run.rest()


# ---------------------------------------------------------------------- which, and when


def a_backbone_is_thawed(run: Run) -> None:
    iterate(run, range(2))
    thaw(run.model, "blocks")
    iterate(run, range(2, 4))


LAST_TO_FIRST = "blocks.2", "blocks.1", "blocks.0", "embedding"


def from_the_last_to_the_first(run: Run) -> None:
    """A unit more in each step, at last the embedding."""
    for step, part in enumerate(("", *LAST_TO_FIRST)):
        if part:
            thaw(run.model, part)
        iterate(run, [step])


def a_part_of_a_unit(run: Run) -> None:
    """Then the rest of it."""
    iterate(run, range(2))
    thaw(run.model, "blocks.1.norm.weight", "blocks.0.up.bias")
    iterate(run, range(2, 4))
    thaw(run.model, "blocks.1")
    iterate(run, range(4, 6))


def frozen_again(run: Run) -> None:
    """And thawed again: the state of before is still there."""
    iterate(run, range(1))
    thaw(run.model, "blocks")
    iterate(run, range(1, 3))
    freeze(run.model, "blocks.0", "blocks.1")
    iterate(run, range(3, 5))
    thaw(run.model, "blocks")
    iterate(run, range(5, 7))


ALL_BUT_HEAD = "embedding", "blocks"
USUAL: dict[str, tuple[Callable[[Run], None], tuple[Part, ...]]] = {
    "a backbone is thawed": (a_backbone_is_thawed, ("blocks",)),
    "from the last to the first": (from_the_last_to_the_first, ALL_BUT_HEAD),
    "a part of a unit": (a_part_of_a_unit, ("blocks",)),
    "frozen again": (frozen_again, ("blocks",)),
    "all but the head": (a_backbone_is_thawed, ALL_BUT_HEAD),
}
for _name, (_loop, _parts) in USUAL.items():
    script(f"thawed, {_name}", build=frozen(*_parts), **SMOOTH)(_loop)
    script(
        f"thawed, {_name}, updates in backward",
        build=frozen(*_parts),
        buckets=zerokern.Buckets(bytes=3000, update_in_backward=True),
        **SMOOTH,
    )(_loop)
    script(
        f"thawed, {_name}, late gathers",
        stages=(1, 2),
        build=frozen(*_parts),
        buckets=zerokern.Buckets(bytes=3000, gather_in_forward=True),
        **SMOOTH,
    )(_loop)


@script(build=frozen("blocks"), **SMOOTH)
def thawed_between_micro_batches(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(10 * step)
        if step == 1:
            thaw(run.model, "blocks")
        run.backward(10 * step + 1)
        run.step()
        run.rest()


@script(build=frozen("blocks"), **SMOOTH)
def thawed_inside_of_no_sync(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step)
            if step == 1:
                thaw(run.model, "blocks")
            run.backward(10 * step + 1)
        run.backward(10 * step + 2)
        run.step()
        run.rest()


@script(build=frozen("blocks"), **SMOOTH)
def thawed_between_forward_and_backward(run: Run) -> None:
    """The graph of this step does not know of it."""

    def loss(step: int, rank: int) -> torch.Tensor:
        value = run.loss(step, rank)
        if step == 1:
            thaw(run.model, "blocks.1")
        return value

    for step in range(4):
        run.optimizer.zero_grad()
        # With a reference that plays many ranks, only the last one's graph may miss it.
        if run.torch and step == 1:
            values = [run.loss(step, rank) for rank in run.each()]
            thaw(run.model, "blocks.1")
            run.part(torch.stack(values).sum()).backward()
        else:
            run.backward(step, lambda rank, s=step: loss(s, rank))
        run.step()
        run.rest()


@script(build=frozen("blocks"), **SMOOTH)
def thawed_between_backward_and_step(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        if step == 1:
            thaw(run.model, "blocks")
        run.step()
        run.rest()


@script(build=frozen("blocks"), **SMOOTH)
def thawed_and_not_used_yet(run: Run) -> None:
    iterate(run, range(2))
    thaw(run.model, "blocks")
    iterate(run, range(2, 4), order=())
    iterate(run, range(4, 6), order=(1,), use="left")
    iterate(run, range(6, 7))


@script(build=frozen("blocks"), **SMOOTH)
def thawed_for_a_single_rank(run: Run) -> None:
    """On all of them, but only one has a gradient of it."""
    iterate(run, range(2))
    thaw(run.model, "blocks.2")
    for step in range(2, 5):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, s=step: run.loss(s, rank, use="left" if rank else "both"),
        )
        run.step()
        run.rest()


# ---------------------------------------------------------------------- beside the rest


@script(build=frozen("blocks"), **SMOOTH)
def thawed_under_a_bound(run: Run) -> None:
    for step in range(5):
        if step == 2:
            thaw(run.model, "blocks")
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.1)
        run.step()


@script(build=frozen("blocks"), max_grad_norm=0.1, **SMOOTH)
def thawed_after_a_bound_and_before_the_step(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.15)
        if step == 1:
            thaw(run.model, "blocks")
        run.step()


def _body_and_ends(model: nn.Module) -> list[dict[str, Any]]:
    ends = of_part(model, "embedding") + of_part(model, "head")
    return [{"params": ends}, {"params": of_part(model, "blocks"), "lr": 2e-3}]


@script(build=frozen("blocks"), groups=_body_and_ends, **SMOOTH)
def thawed_under_a_scheduler(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.7)
    for step in range(5):
        if step == 2:
            thaw(run.model, "blocks")
        iterate(run, [step])
        scheduler.step()


def _saved(run: Run) -> Any:
    optimizer = run.optimizer
    save = optimizer.state_dict if run.torch else optimizer.full_state_dict
    return copy.deepcopy(save())


@script(build=frozen("blocks"), **SMOOTH)
def thawed_then_saved_and_loaded(run: Run) -> None:
    iterate(run, range(2))
    thaw(run.model, "blocks")
    iterate(run, range(2, 4))
    saved = _saved(run)
    iterate(run, range(4, 5))
    run.optimizer.load_state_dict(saved)
    iterate(run, range(5, 7))


@script(build=frozen("blocks"), **SMOOTH)
def a_state_of_before_the_thaw_is_loaded(run: Run) -> None:
    """Which has nothing for what was thawed since."""
    iterate(run, range(2))
    saved = _saved(run)
    thaw(run.model, "blocks")
    iterate(run, range(2, 4))
    run.optimizer.load_state_dict(saved)
    iterate(run, range(4, 6))


@script(build=frozen("blocks"), **SMOOTH)
def a_run_is_resumed_after_its_thaw(run: Run) -> None:
    """Thawed as it was, then loaded, before any step."""
    iterate(run, range(2))
    thaw(run.model, "blocks")
    iterate(run, range(2, 4))
    saved = _saved(run)
    freeze(run.model, "blocks")
    iterate(run, range(4, 5))
    thaw(run.model, "blocks")
    run.optimizer.load_state_dict(saved)
    iterate(run, range(5, 6))


@script(build=frozen("blocks"), **SMOOTH)
def loaded_right_after_a_first_thaw(run: Run) -> None:
    """A state of many steps for parameters that had none yet."""
    iterate(run, range(2))
    thaw(run.model, "blocks")
    saved = _saved(run)
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    for index, param in enumerate(params):
        filled = {n: torch.full(param.shape, 0.01) for n in ("exp_avg", "exp_avg_sq")}
        saved["state"][index] = {"step": torch.tensor(9.0), **filled}
    run.optimizer.load_state_dict(saved)
    iterate(run, range(2, 4))


@script(build=frozen("blocks"), **SMOOTH)
def thawed_before_evaluation(run: Run) -> None:
    iterate(run, range(2))
    thaw(run.model, "blocks")
    run.evaluate(2)
    iterate(run, range(3, 5))
    run.evaluate(5)


@script(build=functools.partial(models.toy, tied=True), **SMOOTH)
def a_tied_weight_frozen_and_thawed(run: Run) -> None:
    iterate(run, range(2))
    freeze(run.model, "embedding")
    iterate(run, range(2, 3))
    thaw(run.model, "embedding")
    iterate(run, range(3, 5))


# ------------------------------------------------------------------------- added groups


def _ends(model: nn.Module) -> list[nn.Parameter]:
    return of_part(model, "embedding") + of_part(model, "head")


@script(build=frozen("blocks"), groups=_ends, **SMOOTH)
def a_group_is_added(run: Run) -> None:
    """Of parameters that were frozen, with a rate of its own."""
    for step in range(5):
        if step == 2:
            thaw(run.model, "blocks")
            params = of_part(run.model, "blocks")
            run.optimizer.add_param_group({"params": params, "lr": 3e-3})
        iterate(run, [step])


@script(groups=_ends, build=frozen("blocks"), buckets=SMALL, **SMOOTH)
def a_group_is_added_between_backward_and_step(run: Run) -> None:
    """Its gradients are there already."""
    for step in range(5):
        if step == 2:
            thaw(run.model, "blocks")
        run.model.zero_grad()
        run.backward(step)
        if step == 2:
            run.optimizer.add_param_group({"params": of_part(run.model, "blocks")})
        run.step()


@script(build=frozen("blocks"), groups=_ends, max_grad_norm=0.2, **SMOOTH)
def a_frozen_group_is_added_and_thawed_later(run: Run) -> None:
    iterate(run, range(1))
    group = {"params": of_part(run.model, "blocks"), "weight_decay": 0.3}
    run.optimizer.add_param_group(group)
    iterate(run, range(1, 3))
    thaw(run.model, "blocks")
    iterate(run, range(3, 5))


def _biases(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() < 2]


@script(groups=_biases, **SMOOTH)
def weights_are_added_that_were_never_frozen(run: Run) -> None:
    """They have gradients from the start, which nobody averages or zeroes before."""
    for step in range(6):
        if step in (2, 3):
            names = (
                ("blocks.0", "blocks.1") if step == 2 else ("em", "head", "blocks.2")
            )
            params = [p for n in names for p in of_part(run.model, n) if p.dim() > 1]
            run.optimizer.add_param_group({"params": params, "lr": 2e-3 * step})
        run.model.zero_grad()
        run.backward(step)
        run.step()


@script(groups=lambda model: of_part(model, "blocks.0"), stages=(1, 2), **SMOOTH)
def units_are_added_that_were_never_frozen(run: Run) -> None:
    for step in range(4):
        if step == 2:
            params = of_part(run.model, "blocks.1") + _ends(run.model)
            run.optimizer.add_param_group({"params": params})
        run.model.zero_grad()
        run.backward(step)
        run.step()
