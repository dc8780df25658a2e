"""The lifetime of an optimizer: what belongs to it goes with it, without the help of
the garbage collector, and another one takes its parameters over."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest
import ranks
import torch
from marks import in_stages
from oracle import STAGES, Run, differing, sharded, whole, world
from torch import Tensor, nn

import zerokern

pytestmark = pytest.mark.slow

REBUILDS = 200
FLAT_KIB = 16
"""Allocated by Python over all rebuilds: less than 82 bytes for each."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off, after a last run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 8))


def tensors_alive() -> dict[int, Tensor]:
    return {id(x): x for x in gc.get_objects() if issubclass(type(x), Tensor)}


def hooks_of(model: nn.Module) -> int:
    """Return the number of hooks on a model's modules and parameters."""
    number = 0
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("hooks") or name.endswith("hooks_with_kwargs"):
                number += len(value)
        number += "forward" in vars(module)
    for param in model.parameters():
        number += len(param._backward_hooks or ())
        number += len(param._post_accumulate_grad_hooks or ())
    return number


def is_memory_of(model: nn.Module, tensor: Tensor) -> bool:
    """Return whether a tensor is, or shares memory with, what the model has to keep: a
    parameter or its gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        start = tensor.untyped_storage().data_ptr()
        end = start + tensor.untyped_storage().nbytes()
        for param in model.parameters():
            for kept in (param, param.grad):
                if kept is not None and start <= kept.data_ptr() < end:
                    return True
    return False


def options_of(stage: int, model: nn.Module) -> dict[str, Any]:
    return {"stage": stage, "model": model if stage == 3 else None}


def train(optimizer: zerokern.AdamW, model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def use_plainly(optimizer: zerokern.AdamW, model: nn.Module) -> None:
    train(optimizer, model)


def use_every_method(optimizer: zerokern.AdamW, model: nn.Module) -> None:
    with optimizer.no_sync():
        model(torch.ones(2, 8)).mean().backward()
    with optimizer.join():
        train(optimizer, model)
    with optimizer.full_params():
        model.state_dict()
    model(torch.ones(2, 8)).mean().backward()
    optimizer.full_grad(next(model.parameters()))
    optimizer.local_grad(next(model.parameters()))
    optimizer.step()
    optimizer.load_state_dict(optimizer.full_state_dict())
    optimizer.consolidate_state_dict()
    optimizer.register_forward_method(model, "extra_repr")
    optimizer.metrics()
    optimizer.memory()
    optimizer.comm_log()


def use_and_fail(optimizer: zerokern.AdamW, model: nn.Module) -> None:
    train(optimizer, model)

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    x = torch.ones(2, 8, requires_grad=True)
    hook = x.register_hook(fail)
    with suppress(KeyboardInterrupt):
        model(x).mean().backward()
    hook.remove()
    model.zero_grad()


def use_forward_only(optimizer: zerokern.AdamW, model: nn.Module) -> None:
    model(torch.ones(2, 8))
    with torch.no_grad():
        model(torch.ones(2, 8))


def use_not_at_all(optimizer: zerokern.AdamW, model: nn.Module) -> None:
    pass


USES = (
    use_plainly,
    use_every_method,
    use_and_fail,
    use_forward_only,
    use_not_at_all,
)


def left_behind(stage: int, use: Callable[[zerokern.AdamW, nn.Module], None]) -> Any:
    """Return the shapes of the tensors, the parts and the hooks that are still there
    after an optimizer was dropped."""
    model = small_model()
    hooks = hooks_of(model)
    with uncollected():
        before = tensors_alive()
        optimizer = zerokern.AdamW(model.parameters(), **options_of(stage, model))
        use(optimizer, model)
        parts = [weakref.ref(optimizer), weakref.ref(optimizer.coordinator)]
        del optimizer
        known = {*before, *map(id, model.parameters())}
        alive = []
        for key, tensor in tensors_alive().items():
            if key not in known and not is_memory_of(model, tensor):
                alive.append(tensor.shape)
        return (
            alive,
            [type(part()) for part in parts if part() is not None],
            hooks_of(model) - hooks,
        )


def rebuilt(stage: int) -> Any:
    """Return by how much hooks, tensors and the bytes that Python has allocated have
    grown while optimizers were rebuilt on one model, and how much of them was garbage.
    """
    model = small_model()
    optimizer = None

    def rebuild(times: int) -> None:
        nonlocal optimizer
        for _ in range(times):
            optimizer = zerokern.AdamW(model.parameters(), **options_of(stage, model))

    tracemalloc.start()
    with uncollected():
        # Until the pools of Python and torch are as full as they get.
        rebuild(REBUILDS)
        gc.collect()
        hooks, tensors = hooks_of(model), len(tensors_alive())
        allocated, _ = tracemalloc.get_traced_memory()
        rebuild(REBUILDS)
        hooks = hooks_of(model) - hooks
        tensors = len(tensors_alive()) - tensors
        # It also empties the interpreter's lists of free tuples, which count as used.
        garbage = gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - allocated
    tracemalloc.stop()
    return {
        "hooks": hooks,
        "tensors": tensors,
        "garbage": garbage,
        "allocated": allocated,
    }


@cache
def measured(at: int) -> ranks.Cases:
    cases: dict[Any, Callable[[], Any]] = {}
    for stage in STAGES:
        for use in USES:
            cases[stage, use] = lambda s=stage, u=use: left_behind(s, u)
        cases[stage, "rebuilt"] = lambda s=stage: rebuilt(s)
    return ranks.run_cases(at, cases)


at_worlds = pytest.mark.parametrize("at", (1, 2), ids="world{}".format)


@at_worlds
@in_stages
@pytest.mark.parametrize("use", USES)
def test_a_dropped_optimizer_leaves_nothing(
    at: int, stage: int, use: Callable[..., None]
) -> None:
    for alive, parts, hooks in measured(at)[stage, use]:
        assert not alive
        assert not parts
        assert hooks == 0


@at_worlds
@in_stages
def test_rebuilding_an_optimizer_leaves_nothing(at: int, stage: int) -> None:
    for grown in measured(at)[stage, "rebuilt"]:
        assert grown.pop("allocated") < FLAT_KIB * 1024
        assert grown == {"hooks": 0, "tensors": 0, "garbage": 0}


# -------------------------------------------------------------------- one after another


@in_stages
def test_a_second_optimizer_takes_the_parameters_over(stage: int) -> None:
    """The first refuses by name, and hooks of the first do nothing any more."""

    def case() -> tuple[list[str], list[str]]:
        first = Run(stage, world())
        plain = Run(stage, world())
        for run in (first, plain):
            run.backward(0)
            run.step()
            run.optimizer.zero_grad()
        old = first.optimizer
        first.optimizer = sharded(first.model, stage, lr=1e-2)
        without_steps = {**plain.optimizer.full_state_dict(), "state": {}}
        plain.optimizer.load_state_dict(without_steps)
        for method in (old.step, lambda: old.clip_grad_norm_(1.0), old.no_sync):
            with pytest.raises(RuntimeError, match="newer optimizer"):
                method()
        for run in (first, plain):
            for step in (1, 2):
                run.optimizer.zero_grad()
                run.backward(step)
                run.step()
        ours = whole(first.model, first.optimizer)
        theirs = whole(plain.model, plain.optimizer)
        log = first.optimizer.comm_log()
        in_forward = [call.op for call in log if call.phase == "forward"]
        reductions = [op for op in in_forward if op == "reduce_scatter"]
        return differing(ours, theirs), reductions

    for differs, reductions in ranks.run(2, case):
        assert differs == []
        assert reductions == []


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (1, 3), (2, 3), (3, 1), (3, 2), (3, 3)]
)
def test_the_stage_can_change_by_a_new_optimizer(before: int, after: int) -> None:
    def case() -> list[str]:
        run = Run(before, world())
        plain = Run(1, world())
        for step in range(4):
            for script in (run, plain):
                script.optimizer.zero_grad()
                script.backward(step)
                script.step()
            if step == 1:
                state = run.optimizer.full_state_dict()
                run.optimizer = sharded(run.model, after, lr=1e-2)
                run.optimizer.load_state_dict(state)
        ours = whole(run.model, run.optimizer)
        theirs = whole(plain.model, plain.optimizer)
        return differing(ours, theirs)

    assert ranks.run(2, case) == [[], []]


@in_stages
def test_a_model_whose_optimizer_is_gone_is_a_plain_model(stage: int) -> None:
    """Dropping the optimizer leaves no hook that fails."""
    run = Run(stage, 1)
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    run.optimizer = None
    gc.collect()
    run.backward(1)
    for param in run.model.parameters():
        assert param.grad is None or torch.isfinite(param.grad).all()
