"""Resetting: the state of an optimizer is emptied, zeroed or replaced in mid-training,
as torch's users do it."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor, nn

from scripts.regrouping import three_groups

Reset = Callable[[Any, nn.Module], Any]
MOMENTS = "exp_avg", "exp_avg_sq"
DULL = {"eps": 1e-3}


def _new_mapping(optimizer: Any, model: nn.Module) -> None:
    optimizer.state = collections.defaultdict(dict)


def _cleared(optimizer: Any, model: nn.Module) -> None:
    optimizer.state.clear()


def _emptied_each(optimizer: Any, model: nn.Module) -> None:
    for param in model.parameters():
        optimizer.state[param] = {}


def _emptied_each_in_place(optimizer: Any, model: nn.Module) -> None:
    for entry in optimizer.state.values():
        entry.clear()


def _deleted_each(optimizer: Any, model: nn.Module) -> None:
    for param in model.parameters():
        del optimizer.state[param]


def _deleted_some(optimizer: Any, model: nn.Module) -> None:
    """Of a layer that was initialised anew."""
    for param in model.blocks[1].parameters():  # type: ignore[index, union-attr]
        optimizer.state.pop(param)


def _zeroed_in_place(optimizer: Any, model: nn.Module) -> None:
    for param in model.parameters():
        for name in MOMENTS:
            optimizer.state[param][name].zero_()


def _pruned_in_place(optimizer: Any, model: nn.Module) -> None:
    """The smallest of the moments are dropped, as ReLoRA does."""
    for param in model.parameters():
        moment = optimizer.state[param]["exp_avg"]
        moment.mul_(moment.abs() > 1e-3)


def _replaced_by_zeros(optimizer: Any, model: nn.Module) -> None:
    for param in model.parameters():
        for name in MOMENTS:
            value = optimizer.state[param][name]
            optimizer.state[param][name] = torch.zeros_like(value)


def _replaced_by_multiples(optimizer: Any, model: nn.Module) -> None:
    """For a batch of another size."""
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"] * 0.5
        entry["exp_avg_sq"] = entry["exp_avg_sq"] * 0.25


def _new_entries(optimizer: Any, model: nn.Module) -> None:
    for param, entry in list(optimizer.state.items()):
        copied = {n: v.clone() for n, v in entry.items() if isinstance(v, Tensor)}
        copied["exp_avg"] *= 0.5
        optimizer.state[param] = copied


def _steps_set_back(optimizer: Any, model: nn.Module) -> None:
    """Warm up the correction of the bias again."""
    for entry in optimizer.state.values():
        entry["step"] = torch.tensor(1.0)


def _steps_filled_in_place(optimizer: Any, model: nn.Module) -> None:
    for entry in optimizer.state.values():
        entry["step"].fill_(7)


def _loaded_empty(optimizer: Any, model: nn.Module) -> None:
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})


RESETS: dict[str, Reset] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (
        *(_new_mapping, _cleared, _emptied_each, _emptied_each_in_place),
        *(_deleted_each, _deleted_some, _zeroed_in_place, _pruned_in_place),
        *(_replaced_by_zeros, _replaced_by_multiples, _new_entries),
        *(_steps_set_back, _steps_filled_in_place, _loaded_empty),
    )
}


def _looped(reset: Reset) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        for step in range(5):
            if step == 2:
                with warnings.catch_warnings():
                    # That state_dict() is a shard: only its groups are wanted.
                    warnings.simplefilter("ignore")
                    reset(run.optimizer, run.model)
            run.optimizer.zero_grad()
            run.backward(step)
            run.step()
            run.rest()

    return loop


for _name, _reset in RESETS.items():
    script(f"state {_name}", **DULL)(_looped(_reset))
for _name in ("cleared", "replaced by multiples", "deleted some"):
    script(f"state of three groups {_name}", groups=three_groups, **DULL)(
        _looped(RESETS[_name])
    )
    script(f"state {_name}, amsgrad", amsgrad=True, **DULL)(_looped(RESETS[_name]))


@script(**DULL)
def reset_between_backward_and_step(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        if step == 2:
            run.optimizer.state.clear()
        run.step()


@script(**DULL)
def reset_between_a_bound_and_the_step(run: Run) -> None:
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.1)
        if step == 2:
            _deleted_some(run.optimizer, run.model)
        run.step()


@script(**DULL)
def reset_every_other_step(run: Run) -> None:
    for step in range(5):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        if step % 2:
            _emptied_each(run.optimizer, run.model)


@script(**DULL)
def reset_after_the_last_step(run: Run) -> None:
    """What is saved then is empty, or zeros."""
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    _deleted_some(run.optimizer, run.model)


@script(**DULL)
def reset_and_loaded(run: Run) -> None:
    """What was loaded stays."""
    optimizer = run.optimizer
    save = optimizer.state_dict if run.torch else optimizer.full_state_dict
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        if step == 1:
            saved = copy.deepcopy(save())
            optimizer.state.clear()
            optimizer.load_state_dict(saved)


@script(**DULL)
def reset_before_parts_have_a_gradient(run: Run) -> None:
    """What is not used in the next step has no state before it is used again."""
    uses = ("both", "both", "left", "both")
    for step, use in enumerate(uses):
        if step == 2:
            run.optimizer.state.clear()
        run.optimizer.zero_grad()
        run.backward(step, use=use)
        run.step()
        state = [run.optimizer.state[p] for p in run.model.blocks[2].right.parameters()]
        run.seen += [_of(entry, "step") for entry in state]


def _of(entry: dict[str, Any], name: str) -> Tensor:
    """Return a copy of a value; zero where torch has none yet."""
    return torch.as_tensor(entry.get(name, 0.0)).clone()


@script(**DULL)
def something_of_ones_own_in_the_state(run: Run) -> None:
    """It stays, also where moments go."""
    params = list(run.model.parameters())
    for step in range(4):
        if step == 2:
            for index, param in enumerate(params):
                run.optimizer.state[param]["note"] = index
        if step == 3:
            _replaced_by_zeros(run.optimizer, run.model)
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    for index, param in enumerate(params):
        assert run.optimizer.state[param].pop("note") == index
