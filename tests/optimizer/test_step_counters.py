"""Step counters: each parameter counts its own steps, wherever its elements are, and a
skipped step does not count."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import differing, set_integer_gradients
from torch import nn
from training import everything

import zerokern


def steps_of(optimizer: Any) -> list[int]:
    """Return the step counter of every parameter, gathered."""
    state = optimizer.full_state_dict()["state"]
    return [int(entry["step"]) for entry in state.values()]


def step_on_ones(params: list[nn.Parameter], optimizer: Any) -> None:
    """Take a step on gradients that are 1."""
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def uneven(reverse: bool) -> tuple[list[int], list[int], bool]:
    """Train a model of which one rank holds no element of the second group; resume with
    the shards the other way."""

    def build(params: list[nn.Parameter], **options: Any) -> zerokern.AdamW:
        groups = [{"params": [param]} for param in params]
        return zerokern.AdamW(groups[::-1] if reverse else groups, **options)

    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (4096, 5)]
    optimizer = build(params)
    for _ in range(3):
        step_on_ones(params, optimizer)
    before = steps_of(optimizer)

    other = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = build(other, buckets=zerokern.Buckets(bytes=2**16))
    resumed.load_state_dict(optimizer.full_state_dict())
    step_on_ones(params, optimizer)
    step_on_ones(other, resumed)
    return before, steps_of(resumed), all(map(torch.equal, params, other))


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_count_where_a_rank_holds_nothing_of_a_group(reverse: bool) -> None:
    for before, after, same in ranks.run(2, uneven, reverse):
        assert before == [3, 3]
        assert after == [4, 4]
        assert same


def test_each_parameter_counts_its_own_steps() -> None:
    """One has a gradient in every step, one in every second; dtypes are mixed."""
    torch.manual_seed(0)
    always = nn.Parameter(torch.randn(100))
    sometimes = nn.Parameter(torch.randn(100))
    narrow = nn.Parameter(torch.randn(100).bfloat16())
    ours = zerokern.AdamW([always, sometimes, narrow], lr=1e-2)
    twins = [nn.Parameter(p.detach().clone()) for p in (always, sometimes)]
    theirs = torch.optim.AdamW(twins, lr=1e-2)
    for step in range(6):
        for index, param in enumerate((always, sometimes, narrow)):
            has_one = index != 1 or step % 2
            gradient = torch.full_like(param, 0.1 * (step + 1))
            param.grad = gradient if has_one else None
        for twin, param in zip(twins, (always, sometimes), strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        ours.step()
        theirs.step()
    assert steps_of(ours) == [6, 3, 6]
    for twin, param in zip(twins, (always, sometimes), strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)


def test_a_skipped_step_does_not_count_in_a_checkpoint() -> None:
    model, twin = models.toy(), models.toy()
    ours, other = (zerokern.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    for step in range(4):
        for m, optimizer in ((model, ours), (twin, other)):
            optimizer.zero_grad()
            set_integer_gradients(m, step)
            if step == 2:
                next(m.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            optimizer.step()
        if step == 2:
            assert set(steps_of(ours)) == {2}
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert differing(everything(model, ours), everything(twin, other)) == []
