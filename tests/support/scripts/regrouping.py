"""Regrouping: param groups that are sorted, emptied, split or joined between steps, and
parameters that are taken out of them and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import nn

from scripts.thawing import iterate, of_part

Edit = Callable[[Any, nn.Module], Any]
"""Of an optimizer, between two steps."""


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups of different rates, one of which has most parameters."""
    return [
        {"params": of_part(model, "embedding"), "lr": 3e-2},
        {"params": of_part(model, "blocks"), "lr": 1e-2, "weight_decay": 0.2},
        {"params": of_part(model, "head"), "lr": 1e-3},
    ]


OPTIONS = {"groups": three_groups, "eps": 1e-3}


# ---------------------------------------------------------------------------- one edit


def _reverse(optimizer: Any, model: nn.Module) -> None:
    optimizer.param_groups.reverse()


def _sort(optimizer: Any, model: nn.Module) -> None:
    """Into a new list."""
    by_rate = sorted(optimizer.param_groups, key=lambda group: group["lr"])
    optimizer.param_groups = by_rate


def _sort_inside(optimizer: Any, model: nn.Module) -> None:
    for group in optimizer.param_groups:
        group["params"].sort(key=lambda param: param.numel())


def _pop(optimizer: Any, model: nn.Module) -> None:
    optimizer.param_groups.pop()


def _pop_the_first(optimizer: Any, model: nn.Module) -> None:
    del optimizer.param_groups[0]


def _clear_a_group(optimizer: Any, model: nn.Module) -> None:
    optimizer.param_groups[1]["params"].clear()


def _clear_all(optimizer: Any, model: nn.Module) -> None:
    """A step of no group at all does nothing."""
    optimizer.param_groups.clear()


def _take_some_out(optimizer: Any, model: nn.Module) -> None:
    del optimizer.param_groups[1]["params"][3:7]


def _take_some_out_by_a_new_list(optimizer: Any, model: nn.Module) -> None:
    group = optimizer.param_groups[1]
    group["params"] = [p for p in group["params"] if p.dim() > 1]


def _move_one(optimizer: Any, model: nn.Module) -> None:
    param = optimizer.param_groups[1]["params"].pop(2)
    optimizer.param_groups[0]["params"].append(param)


def _swap_two(optimizer: Any, model: nn.Module) -> None:
    """Both groups keep their sizes."""
    first, _, last = (group["params"] for group in optimizer.param_groups)
    first[0], last[0] = last[0], first[0]


def _replace_a_dict(optimizer: Any, model: nn.Module) -> None:
    optimizer.param_groups[1] = {**optimizer.param_groups[1], "lr": 5e-2}


def _split_a_group(optimizer: Any, model: nn.Module) -> None:
    group = optimizer.param_groups[1]
    params = group["params"]
    group["params"] = params[::2]
    optimizer.param_groups.append({**group, "params": params[1::2], "lr": 1e-4})


def _join_all(optimizer: Any, model: nn.Module) -> None:
    first, *others = optimizer.param_groups
    for group in others:
        first["params"] += group["params"]
    optimizer.param_groups[:] = [first]


def _one_group_each(optimizer: Any, model: nn.Module) -> None:
    """Layer-wise rates."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    defaults = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    optimizer.param_groups.clear()
    for depth, param in enumerate(params):
        rate = 2e-2 * 0.9**depth
        optimizer.add_param_group({**defaults, "params": [param], "lr": rate})


def _options(optimizer: Any, model: nn.Module) -> None:
    first, second, third = optimizer.param_groups
    first["betas"] = 0.5, 0.7
    second["eps"] = 1e-2
    second["maximize"] = True
    third["weight_decay"] = 0.5


def _leave_and_come_back_by_another_group(optimizer: Any, model: nn.Module) -> None:
    group = optimizer.param_groups.pop(0)
    optimizer.add_param_group({"params": group["params"], "lr": 2e-3})


EDITS: dict[str, Edit] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (
        *(_reverse, _sort, _sort_inside, _pop, _pop_the_first, _clear_a_group),
        *(_clear_all, _take_some_out, _take_some_out_by_a_new_list, _move_one),
        *(_swap_two, _replace_a_dict, _split_a_group, _join_all, _one_group_each),
        *(_options, _leave_and_come_back_by_another_group),
    )
}


def _looped(edit: Edit) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        for step in range(4):
            if step == 2:
                edit(run.optimizer, run.model)
            # What is in no group is not zeroed by the optimizer.
            run.optimizer.zero_grad()
            run.model.zero_grad()
            run.backward(step)
            run.step()
        put_back(run)

    return loop


def put_back(run: Run) -> None:
    """Put back what was taken out: torch's state_dict fails over what is in no
    group."""
    groups = run.optimizer.param_groups
    known = {id(p) for group in groups for p in group["params"]}
    missing = [p for p in run.model.parameters() if id(p) not in known]
    if missing:
        run.optimizer.add_param_group({"params": missing})


for _name, _edit in EDITS.items():
    script(f"groups edited: {_name}", **OPTIONS)(_looped(_edit))


# ------------------------------------------------------------------------- some of them


@script(**OPTIONS)
def taken_out_and_put_back(run: Run) -> None:
    """It keeps its state and its number of steps."""
    group = run.optimizer.param_groups[1]
    iterate(run, range(2))
    taken, group["params"] = group["params"][4:], group["params"][:4]
    for step in range(2, 4):
        run.optimizer.zero_grad()
        run.model.zero_grad()
        run.backward(step)
        run.step()
    run.model.zero_grad()
    group["params"] += taken
    iterate(run, range(4, 6))


@script(**OPTIONS)
def taken_out_with_a_gradient_and_put_back(run: Run) -> None:
    """Nobody zeroes what is in no group: it accumulates."""
    group = run.optimizer.param_groups[2]
    iterate(run, range(2))
    run.optimizer.param_groups.pop()
    for step in range(2, 4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    run.optimizer.param_groups.append(group)
    run.backward(4)
    run.step()


@script(**OPTIONS)
def each_group_in_turn(run: Run) -> None:
    """Block coordinate descent: the list holds one group at a time."""
    groups = list(run.optimizer.param_groups)
    for step in range(6):
        run.optimizer.param_groups = [groups[step % 3]]
        run.model.zero_grad()
        run.backward(step)
        run.step()
    run.optimizer.param_groups = groups
    iterate(run, [6])


@script(**OPTIONS)
def edited_between_backward_and_step(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        if step == 1:
            _move_one(run.optimizer, run.model)
            _reverse(run.optimizer, run.model)
        run.step()


@script(**OPTIONS)
def edited_between_micro_batches(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(10 * step)
        if step == 2:
            _swap_two(run.optimizer, run.model)
        run.backward(10 * step + 1)
        run.step()


@script(**OPTIONS)
def edited_between_a_bound_and_the_step(run: Run) -> None:
    """Of as many parameters as before: torch's function clips those of the model."""
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.1)
        if step == 1:
            _split_a_group(run.optimizer, run.model)
        run.step()


@script(**OPTIONS)
def edited_under_a_scheduler(run: Run) -> None:
    """Which has a rate for each index."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.8)
    for step in range(5):
        if step == 2:
            _swap_two(run.optimizer, run.model)
        if step == 3:
            run.optimizer.param_groups[0]["params"].reverse()
        iterate(run, [step])
        scheduler.step()


@script(**OPTIONS)
def edited_then_saved_and_loaded(run: Run) -> None:
    optimizer = run.optimizer
    save = optimizer.state_dict if run.torch else optimizer.full_state_dict
    iterate(run, range(2))
    _move_one(optimizer, run.model)
    optimizer.param_groups.reverse()
    iterate(run, range(2, 4))
    saved = copy.deepcopy(save())
    iterate(run, range(4, 5))
    optimizer.load_state_dict(saved)
    iterate(run, range(5, 7))


@script(**OPTIONS)
def edited_after_the_last_step(run: Run) -> None:
    """What is saved then follows the groups as they are."""
    iterate(run, range(2))
    _swap_two(run.optimizer, run.model)
    _reverse(run.optimizer, run.model)


@script(**OPTIONS)
def loaded_right_after_an_edit(run: Run) -> None:
    optimizer = run.optimizer
    save = optimizer.state_dict if run.torch else optimizer.full_state_dict
    iterate(run, range(2))
    optimizer.param_groups.reverse()
    saved = copy.deepcopy(save())
    optimizer.param_groups.reverse()
    iterate(run, range(2, 4))
    optimizer.param_groups.reverse()
    optimizer.load_state_dict(saved)
    iterate(run, range(4, 5))


@script(**OPTIONS)
def edited_often(run: Run) -> None:
    edits = [_reverse, _move_one, _sort_inside, _split_a_group, _join_all]
    for step, edit in enumerate(edits):
        iterate(run, [step])
        edit(run.optimizer, run.model)
    iterate(run, range(5, 7))
