"""`full_grad` and `local_grad`: whenever they are asked, the whole gradient is torch's,
and the parts are the whole."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from marks import at_odd_worlds, in_stages
from oracle import (
    STAGES,
    Run,
    apart,
    integer_gradient,
    quiet_state_dict,
    set_integer_gradients,
    sharded,
    whole,
)
from registry import SMALL, cases_of
from torch import Tensor, nn

import zerokern

case = cases_of("gradients at odd worlds")

# ------------------------------------------------------------------- when they are read

Read = Callable[[Run], None]
Script = Callable[[Run, Read], None]
READING: dict[str, Script] = {}


def reading(function: Script) -> Script:
    """Register a script that reads gradients."""
    READING[function.__name__] = function
    return function


@reading
def after_each_backward(run: Run, read: Read) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        read(run)
        run.step()


@reading
def twice(run: Run, read: Read) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        read(run)
        read(run)
        run.step()


@reading
def between_backwards(run: Run, read: Read) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        for micro in range(3):
            run.backward(10 * step + micro)
            if micro != 1:
                read(run)
        run.step()


@reading
def inside_no_sync(run: Run, read: Read) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step)
            read(run)
            run.backward(10 * step + 1)
        read(run)
        run.step()


@reading
def after_no_sync_and_a_last_backward(run: Run, read: Read) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(10 * step)
        run.backward(10 * step + 1)
        read(run)
        run.step()


@reading
def never_zeroed(run: Run, read: Read) -> None:
    for step in range(2):
        run.backward(step)
        read(run)
        run.step()
        read(run)


@reading
def zeroed_in_place(run: Run, read: Read) -> None:
    for step in range(2):
        run.backward(step)
        run.optimizer.zero_grad(set_to_none=False)
        read(run)
        run.backward(10 + step)
        read(run)
        run.step()
        run.optimizer.zero_grad(set_to_none=False)


@reading
def nothing_there(run: Run, read: Read) -> None:
    read(run)
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    read(run)


@reading
def unused_on_all_ranks(run: Run, read: Read) -> None:
    for step, use in enumerate(("left", "right", "both")):
        run.optimizer.zero_grad()
        run.backward(step, use=use)
        read(run)
        run.step()


@reading
def unused_on_one_rank(run: Run, read: Read) -> None:
    for step in range(2):
        run.optimizer.zero_grad()

        def loss(r: int, step: int = step) -> Tensor:
            return run.loss(step, r, use="left" if r == 0 else "both")

        run.backward(step, loss)
        read(run)
        run.step()


@reading
def beside_clipping(run: Run, read: Read) -> None:
    """In torch clipping changes p.grad, so it is read before."""
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        read(run)
        run.clip(0.1)
        run.step()


@reading
def set_by_hand(run: Run, read: Read) -> None:
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)

        def of_rank(r: int, step: int = step) -> Tensor:
            return torch.full((models.VOCABULARY,), step + r + 1.0)

        run.set_gradient("head.bias", of_rank)
        read(run)
        run.step()


WATCHED = (
    *("embedding.weight", "blocks.0.up.weight", "blocks.1.norm.bias"),
    *("blocks.2.left.weight", "blocks.2.right.bias", "head.bias"),
)


Gradients = dict[str, Tensor | None]


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()


def _shard(run: Run, name: str) -> tuple[Any, Tensor | None]:
    """Return which elements this rank has of a gradient, and their values."""
    params = dict(run.model.named_parameters())
    index = list(params).index(name)
    entry = quiet_state_dict(run.optimizer)["state"][index]
    everything = 0, params[name].numel()
    part = run.optimizer.local_grad(params[name])
    return entry.get("range", everything), _copy(part)


def _watched(name: str, stage: int | None, of: int) -> dict[str, Any]:
    """Run a script, and return what it read of some parameters."""
    run = Run(stage, of, buckets=SMALL)
    found: list[Gradients] = []
    shards: list[dict[str, Any]] = []

    def read(run: Run) -> None:
        params = dict(run.model.named_parameters())
        if run.torch:
            found.append({name: _copy(params[name].grad) for name in WATCHED})
            return
        full_grad = run.optimizer.full_grad
        found.append({name: full_grad(params[name]) for name in WATCHED})
        shards.append({name: _shard(run, name) for name in WATCHED})
        run.note_buffers()

    READING[name](run, read)
    return {
        "found": found,
        "shards": shards,
        "params": whole(run.model, run.optimizer),
        "buffers": run.buffers,
    }


@functools.cache
def watched_on_torch(name: str, of: int) -> dict[str, Any]:
    return _watched(name, None, of)


@functools.cache
def watched(at: int) -> ranks.Cases:
    """Run all scripts in all stages on one group."""
    runs = {
        (name, stage): functools.partial(_watched, name, stage, at)
        for name in READING
        for stage in STAGES
    }
    return ranks.run_cases(at, runs)


def _formed(grads: Gradients) -> dict[str, Tensor]:
    return {name: grad for name, grad in grads.items() if grad is not None}


@at_odd_worlds
@in_stages
@pytest.mark.parametrize("name", READING)
def test_a_whole_gradient_is_torchs(name: str, stage: int, at: int) -> None:
    """In fp32, of the parameter's shape, averaged over ranks; None where no rank has
    one; training goes on alike."""
    expected = watched_on_torch(name, at)
    for result in watched(at)[name, stage]:
        assert len(result["found"]) == len(expected["found"]) > 0
        for ours, theirs in zip(result["found"], expected["found"], strict=True):
            assert ours.keys() == theirs.keys()
            assert {g.dtype for g in _formed(ours).values()} <= {torch.float32}
            assert apart(_formed(ours), _formed(theirs), 1e-5) == {}
        assert apart(result["params"], expected["params"]) == {}
        assert not any(result["buffers"])


@at_odd_worlds
@in_stages
@pytest.mark.parametrize("name", READING)
def test_the_parts_of_a_gradient_are_the_whole(name: str, stage: int, at: int) -> None:
    """Each rank has the elements that `range` says, and together they are all, to the
    bit."""
    results = watched(at)[name, stage]
    for index, grads in enumerate(results[0]["found"]):
        for n, grad in grads.items():
            parts = [result["shards"][index][n] for result in results]
            if grad is None:
                assert {part for _, part in parts} == {None}
                continue
            for (start, end), part in parts:
                assert part.shape == (end - start,)
            held = [(start, part) for (start, end), part in parts if start < end]
            held.sort(key=operator.itemgetter(0))
            joined = torch.cat([part for _, part in held])
            assert torch.equal(joined, grad.flatten())


# ------------------------------------------------------------------ of which parameters


@case
def odd_gradients(stage: int) -> list[bool]:
    """Parameters of other memory orders, of one element and of none, in 16 bits."""
    torch.manual_seed(0)
    values = [
        torch.randn(6, 7).T,
        torch.randn(3, 5, 7).permute(2, 0, 1),
        torch.randn(()),
        torch.zeros(0, 4),
    ]
    model = nn.Module()
    params = nn.ParameterList(nn.Parameter(v.bfloat16()) for v in values)
    model.units = nn.ModuleList([params])
    optimizer = sharded(model, stage)
    set_integer_gradients(model, 0)

    found = []
    state = quiet_state_dict(optimizer)["state"].values()
    for index, (param, entry) in enumerate(zip(params, state, strict=True)):
        mean = integer_gradient(param.shape, 0, index, 0, 1)
        grad = optimizer.full_grad(param)
        part = optimizer.local_grad(param)
        size = param.numel()
        in_memory = torch.empty_strided(param.shape, values[index].stride())
        flat = in_memory.copy_(mean).as_strided((size,), (1,))
        start, end = entry.get("range", (0, size))
        found.append(
            torch.equal(grad, mean)
            and grad.dtype == torch.float32
            and torch.equal(part.float(), flat[start:end])
        )
    return found


@at_odd_worlds
@in_stages
def test_gradients_of_odd_parameters_can_be_read(stage: int, at: int) -> None:
    """The whole one has the parameter's indices, the part has the order of its
    memory."""
    assert case.done(at)["odd_gradients", stage] == [[True] * 4] * at


def test_the_gradient_of_a_stranger_is_refused() -> None:
    optimizer = zerokern.AdamW(models.toy().parameters())
    for method in (optimizer.full_grad, optimizer.local_grad):
        with pytest.raises(ValueError, match=r"\(3,\)"):
            method(nn.Parameter(torch.ones(3)))
