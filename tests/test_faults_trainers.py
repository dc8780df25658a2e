"""Faults that users of sharded training have met with trainers: how Lightning,
Accelerate and torch's scaler call."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import ranks
import torch
import torch._dynamo  # an optimizer imports it: here, before ranks are forked
from oracle import (
    STAGES,
    Run,
    apart,
    differing,
    quiet_state_dict,
    rank,
    set_integer_gradients,
    sharded,
    whole,
    world,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zerokern
from zerokern import GradScaler, Precision

at_worlds = pytest.mark.parametrize("at", ranks.worlds(1, 2, rarely=3))
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


# ---------------------------------------------- L2: forward and backward inside of step

Script = Callable[[Run], None]
SCRIPTS: dict[str, Script] = {}
STEPS = 3


def script(function: Script) -> Script:
    """Register a loop that runs on torch's AdamW and on ours."""
    SCRIPTS[function.__name__] = function
    return function


def closure_of(run: Run, step: int, *, zero: bool = True) -> Callable[[], Tensor]:
    """Return what automatic optimisation passes to step."""

    def closure() -> Tensor:
        if zero:
            run.optimizer.zero_grad()
        run.backward(step)
        return torch.tensor(float(step))

    return closure


@script
def by_keyword(run: Run) -> None:
    for step in range(STEPS):
        run.seen.append(run.optimizer.step(closure=closure_of(run, step)))


@script
def by_position(run: Run) -> None:
    for step in range(STEPS):
        run.seen.append(run.optimizer.step(closure_of(run, step)))


@script
def none_by_keyword_and_by_position(run: Run) -> None:
    """Accelerate passes on the None that it got."""
    for step in range(STEPS):
        closure_of(run, step)()
        assert (
            run.optimizer.step(closure=None) if step == 1 else run.optimizer.step(None)
        ) is None


@script
def wrapped_with_clipping_inside(run: Run) -> None:
    """Lightning wraps the user's closure, and clips inside of the wrapper, after
    backward and before the update."""

    def wrap(closure: Callable[[], Tensor]) -> Tensor:
        loss = closure()
        run.clip(0.1)
        return loss

    for step in range(STEPS):
        run.seen.append(
            run.optimizer.step(closure=functools.partial(wrap, closure_of(run, step)))
        )


@script
def called_once_more_by_hand(run: Run) -> None:
    """A first call to look at the gradients, as sharpness-aware training does; step
    calls again."""
    for step in range(STEPS):
        closure = closure_of(run, step)
        run.seen.append(closure())
        run.seen.append(run.optimizer.step(closure))


@script
def called_twice_inside(run: Run) -> None:
    """The second call starts afresh; without zero_grad it adds."""
    for step in range(STEPS):
        first, second = (
            closure_of(run, step),
            closure_of(run, 10 + step, zero=step != 1),
        )

        def both(
            first: Callable[[], Tensor] = first, second: Callable[[], Tensor] = second
        ) -> Tensor:
            first()
            return second()

        run.seen.append(run.optimizer.step(both))


@script
def with_accumulation_before(run: Run) -> None:
    """All but the last micro-batch come before step, under no_sync; the last inside."""
    for step in range(STEPS):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(30 + 2 * step)
        run.optimizer.step(closure_of(run, 31 + 2 * step, zero=False))


@script
def with_several_backwards_inside(run: Run) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            run.optimizer.zero_grad()
            for micro in range(3):
                run.backward(10 * step + micro)
            return 1.0

        assert run.optimizer.step(closure) == 1.0


@script
def without_a_backward(run: Run) -> None:
    """A closure that only looks: nothing is updated in its place, and the step before
    stands."""
    run.optimizer.step(closure_of(run, 0))
    run.optimizer.zero_grad()
    run.optimizer.step(lambda: torch.tensor(1.0))
    run.optimizer.step(closure_of(run, 1))


@script
def through_a_scheduler_s_wrapper(run: Run) -> None:
    """A scheduler replaces optimizer.step by a wrapper of its own; so does
    Accelerate."""
    scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.7**step)
    original = run.optimizer.step
    calls = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    for step in range(STEPS):
        run.optimizer.step = watched
        run.seen.append(run.optimizer.step(closure=closure_of(run, step)))
        run.optimizer.step = original
        scheduler.step()
    assert len(calls) == STEPS


@script
def through_a_disabled_scaler(run: Run) -> None:
    """How one loop serves all precisions."""
    scaler = (torch.amp.GradScaler if run.torch else GradScaler)("cpu", enabled=False)
    for step in range(STEPS):
        run.seen.append(scaler.step(run.optimizer, closure_of(run, step)))
        scaler.update()


def play(name: str, stage: int | None, of: int) -> dict[str, Any]:
    """Run one loop."""
    run = Run(stage, of, build=functools.partial(models.toy, blocks=2))
    SCRIPTS[name](run)
    return run.result()


@functools.cache
def played(at: int) -> ranks.Cases:
    """Run all loops in all stages on one group of ranks."""
    return ranks.run_cases(
        at, {(n, s): functools.partial(play, n, s, at) for n in SCRIPTS for s in STAGES}
    )


@functools.cache
def played_by_torch(name: str, of: int) -> dict[str, Any]:
    return play(name, None, of)


@at_worlds
@in_stages
@pytest.mark.parametrize("name", SCRIPTS)
def test_closures_work_as_in_torch(name: str, stage: int, at: int) -> None:
    """L2: parameters, moments, step counters and losses."""
    expected = played_by_torch(name, at)
    for result in played(at)[name, stage]:
        assert apart(result["params"], expected["params"]) == {}
        assert apart(result["state"], expected["state"], 1e-4) == {}
        assert apart(result["seen"], expected["seen"]) == {}


# ------------------------------------------------------- L4, L5: steps that are skipped


def _scheduled(make: Any, scaler: Any, stage: int | None, skips: str) -> dict[str, Any]:
    """Train with a scale; the last rank overflows in two steps, and the schedule must
    not advance then."""
    run = Run(
        stage, world() if stage else 1, build=functools.partial(models.toy, blocks=1)
    )
    optimizer = run.optimizer
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rates, skipped = [], []
    for step in range(5):
        bad = step in (1, 2) and rank() == world() - 1
        optimizer.zero_grad()
        tokens, targets = models.batch(step)
        scaler.scale(
            models.loss_of(run.model, tokens, targets) * (math.inf if bad else 1.0)
        ).backward()
        before = scaler.get_scale(), int(getattr(optimizer, "skipped_steps", 0))
        scaler.step(optimizer)
        scaler.update()
        by_scale = scaler.get_scale() < before[0]
        by_counter = int(getattr(optimizer, "skipped_steps", 0)) > before[1]
        skipped.append(by_counter if skips == "counter" else by_scale)
        if not skipped[-1]:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return {"rates": rates, "skipped": skipped, "params": whole(run.model, optimizer)}


SCALER = {"init_scale": 2.0**10, "growth_interval": 100}


@functools.cache
def scheduled(at: int) -> ranks.Cases:
    """Run with our scaler, in every stage."""

    def one(stage: int, skips: str) -> dict[str, Any]:
        return _scheduled(zerokern.AdamW, GradScaler("cpu", **SCALER), stage, skips)

    return ranks.run_cases(
        at,
        {
            (s, k): functools.partial(one, s, k)
            for s in STAGES
            for k in ("counter", "scale")
        },
    )


@at_worlds
@in_stages
@pytest.mark.parametrize("skips", ("counter", "scale"))
def test_a_schedule_can_wait_for_skipped_steps(skips: str, stage: int, at: int) -> None:
    """L4: both ways in which trainers notice them, on every rank, though one alone
    overflowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _scheduled(
            torch.optim.AdamW, torch.amp.GradScaler("cpu", **SCALER), None, "scale"
        )
    assert expected["skipped"] == [False, True, True, False, False]
    for result in scheduled(at)[stage, skips]:
        assert (result["skipped"], result["rates"]) == (
            expected["skipped"],
            expected["rates"],
        )
        assert apart(result["params"], expected["params"]) == {}


def _called_like(how: str, stage: int) -> tuple[list[str], float]:
    """Let a scaler step, called as trainers do."""
    run, twin = (
        Run(stage, world(), build=functools.partial(models.toy, blocks=1))
        for _ in range(2)
    )
    scalers = GradScaler("cpu", **SCALER), GradScaler("cpu", **SCALER)
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "accelerate": lambda scaler, optimizer: scaler.step(optimizer, None),
        "lightning": lambda scaler, optimizer: scaler.step(optimizer, closure=None),
        "plain": lambda scaler, optimizer: scaler.step(optimizer),
    }
    for step in range(2):
        for script, scaler, call in (
            (run, scalers[0], calls[how]),
            (twin, scalers[1], calls["plain"]),
        ):
            script.optimizer.zero_grad()
            script.backward(
                step,
                lambda r, script=script, scaler=scaler, step=step: scaler.scale(
                    script.loss(step, r)
                ),
            )
            call(scaler, script.optimizer)
            scaler.update()
    return (
        differing(whole(run.model, run.optimizer), whole(twin.model, twin.optimizer)),
        scalers[0].get_scale(),
    )


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("how", ("accelerate", "lightning"))
def test_our_scaler_takes_the_closure_that_is_none(
    how: str, stage: int, at: int
) -> None:
    """L2, L5: a trainer without a closure passes None on, by position or by name."""
    assert ranks.run(at, _called_like, how, stage) == [([], SCALER["init_scale"])] * at


ORDERS = ("step", "unscale step", "unscale ours step", "unscale torch step")


def _torchs_scaler(stage: int | None, order: str, overflow: bool) -> dict[str, Any]:
    """Train with torch's own scaler, in a world of one."""
    model = models.toy(blocks=1)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2)
        if stage is None
        else sharded(model, stage, lr=1e-2)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        bad = math.inf if overflow and step in (1, 2) else 1.0
        scaler.scale(models.loss_of(model, *models.batch(step)) * bad).backward()
        for call in order.split():
            if call == "unscale":
                scaler.unscale_(optimizer)
            elif call == "ours" and stage is not None:
                optimizer.clip_grad_norm_(0.3)
            elif call in ("torch", "ours"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            else:
                scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    return {"scales": scales, "params": whole(model, optimizer)}


@in_stages
@pytest.mark.parametrize("overflow", (False, True), ids=["finite", "overflow"])
@pytest.mark.parametrize("order", ORDERS)
def test_torchs_scaler_unscales_once(order: str, overflow: bool, stage: int) -> None:
    """L5: in a world of one, the only one where it is right; elsewhere it is refused by
    name."""
    expected = _torchs_scaler(None, order, overflow)
    result = _torchs_scaler(stage, order, overflow)
    assert result["scales"] == expected["scales"]
    assert apart(result["params"], expected["params"]) == {}


# --------------------------------------------------------------------- L6: plain values

RECIPES: dict[str, tuple[Any, torch.dtype, Precision]] = {
    "fp32": (zerokern.AdamW, torch.float32, Precision()),
    "bf16 with masters": (zerokern.AdamW, torch.bfloat16, Precision()),
    "8 bits": (
        zerokern.AdamW,
        torch.bfloat16,
        Precision(master="split24", moments="8bit"),
    ),
    "momentum": (
        functools.partial(zerokern.SGD, momentum=0.9),
        torch.float32,
        Precision(),
    ),
}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a nest of dicts and lists by path."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else None
    )
    if items is None:
        return {path: value}
    return {
        k: leaf
        for key, item in items
        for k, leaf in _flat(item, f"{path}/{key}").items()
    }


def _plain_state(recipe: str, stage: int) -> list[str]:
    """Write the optimizer's and the scaler's state as safetensors and JSON; return what
    does not come back."""
    import safetensors.torch

    make, dtype, precision = RECIPES[recipe]
    model = models.toy(blocks=1).to(dtype)
    optimizer = sharded(model, stage, adam=make, lr=1e-2, precision=precision)
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = GradScaler("cpu", **SCALER)
    optimizer.zero_grad()
    set_integer_gradients(model, 0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    wrong = []
    for name, state in (
        ("full", optimizer.full_state_dict()),
        ("sharded", quiet_state_dict(optimizer)),
        ("scaler", scaler.state_dict()),
    ):
        leaves = _flat(state)
        tensors = {k: v for k, v in leaves.items() if isinstance(v, Tensor)}
        others = {k: v for k, v in leaves.items() if not isinstance(v, Tensor)}
        wrong += [f"{name}{k}" for k, v in tensors.items() if type(v) is not Tensor]
        wrong += [
            f"{name}{k}"
            for k, v in others.items()
            if not isinstance(v, int | float | str | bool | None)
        ]
        wrong += [f"{name}: JSON"] * (json.loads(json.dumps(others)) != others)
        loaded = safetensors.torch.load(safetensors.torch.save(tensors))
        wrong += [f"{name}{k}" for k in differing(loaded, tensors)]
        file = io.BytesIO()
        torch.save(state, file)
        again = _flat(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        wrong += [f"{name}{k}" for k in leaves if type(again[k]) is not type(leaves[k])]
    return wrong


@functools.cache
def plain_states(at: int) -> ranks.Cases:
    return ranks.run_cases(
        at,
        {
            (r, s): functools.partial(_plain_state, r, s)
            for r in RECIPES
            for s in STAGES
        },
    )


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_is_tensors_and_plain_values(recipe: str, stage: int, at: int) -> None:
    """L6: it can be stored without pickle, in every recipe, whole or sharded; the
    scaler's too."""
    pytest.importorskip("safetensors")
    assert plain_states(at)[recipe, stage] == [[]] * at


# ------------------------------------------------------------------ the real Accelerate


def _environment() -> dict[str, str]:
    """Return what a launcher sets, for ranks that have their process group already."""
    if world() == 1:
        return {}
    return {
        "RANK": str(rank()),
        "LOCAL_RANK": str(rank()),
        "WORLD_SIZE": str(world()),
        "LOCAL_WORLD_SIZE": str(world()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _accelerated(stage: int) -> dict[str, Any]:
    """Train ours under Accelerate with accumulation, a schedule, clipping, a save and a
    resume."""
    from accelerate import Accelerator

    with mock.patch.dict(os.environ, _environment()):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = models.toy(blocks=1)
    optimizer = sharded(model, stage, lr=1e-2)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    before = len(optimizer.comm_log())
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".*state_dict\(\) holds this rank's shards only"
        )
        # Loads the optimizer's own state, at once.
        prepared, schedule = accelerator.prepare(optimizer, scheduler)
    sent = len(optimizer.comm_log()) - before
    saved: dict[str, Any] = {}
    for step in range(3):
        for micro in range(2):
            with accelerator.accumulate(model):
                tokens, targets = (
                    models.share(t, rank(), world())
                    for t in models.batch(10 * step + micro)
                )
                accelerator.backward(models.loss_of(model, tokens, targets))
                if accelerator.sync_gradients:
                    optimizer.clip_grad_norm_(0.3)
                prepared.step()
                schedule.step()
                prepared.zero_grad()
        if step == 1:
            saved = copy.deepcopy(quiet_state_dict(optimizer))
            prepared.load_state_dict(saved)
    return {
        "params": whole(model, optimizer),
        "lr": optimizer.param_groups[0]["lr"],
        "sent": sent,
        "skipped": prepared.step_was_skipped,
        "groups": prepared.param_groups is optimizer.param_groups,
    }


def _accelerated_reference(of: int) -> dict[str, Any]:
    run = Run(None, of, build=functools.partial(models.toy, blocks=1))
    scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(2):
            for r in range(of):
                (run.loss(10 * step + micro, r) / of / 2).backward()
        run.clip(0.3)
        run.step()
        for _ in range(of):  # Accelerate's scheduler makes one step for each process
            scheduler.step()
    return {
        "params": whole(run.model, run.optimizer),
        "lr": run.optimizer.param_groups[0]["lr"],
    }


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
def test_accelerate_prepares_our_optimizer_and_schedule(stage: int, at: int) -> None:
    """L2, L4, G32: loading its own state at once sends and changes nothing; then
    accumulation, clipping, a resume."""
    pytest.importorskip("accelerate")
    expected = _accelerated_reference(at)
    for result in ranks.run(at, _accelerated, stage):
        assert apart(result["params"], expected["params"]) == {}
        assert result["lr"] == expected["lr"]
        assert (result["sent"], result["skipped"], result["groups"]) == (0, False, True)


def _prepared_whole(folder: Path, ours: bool) -> dict[str, Tensor]:
    """In a world of one Accelerate may have the model, too; it saves and loads
    everything by itself."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = models.toy(blocks=1)
    make = zerokern.AdamW if ours else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(4):
        accelerator.backward(models.loss_of(model, *models.batch(step)))
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1:
            accelerator.save_state(str(folder), safe_serialization=False)
    accelerator.load_state(str(folder))
    for step in range(2, 4):
        accelerator.backward(models.loss_of(model, *models.batch(step)))
        optimizer.step(closure=None)
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_accelerate_trains_saves_and_resumes_in_a_world_of_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ours, theirs = (
        ranks.run(1, _prepared_whole, tmp_path / str(which), which)[0]
        for which in (True, False)
    )
    assert apart(ours, theirs) == {}


def _skipped_by_accelerate(stage: int) -> list[tuple[bool, float]]:
    """Overflow on the last rank in one step; return whether Accelerate knows, and the
    rate of its schedule."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    with mock.patch.dict(os.environ, _environment()):
        Accelerator(cpu=True)
    model = models.toy(blocks=1)
    optimizer = sharded(model, stage, lr=1.0)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".*state_dict\(\) holds this rank's shards only"
        )
        prepared = AcceleratedOptimizer(optimizer, scaler=GradScaler("cpu", **SCALER))
    scheduler = AcceleratedScheduler(schedule, prepared, split_batches=True)
    found = []
    for step in range(4):
        bad = math.inf if step in (1, 2) and rank() == world() - 1 else 1.0
        prepared.scaler.scale(
            models.loss_of(model, *models.batch(step)) * bad
        ).backward()
        prepared.step()
        scheduler.step()
        prepared.zero_grad()
        found.append((prepared.step_was_skipped, optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
def test_accelerate_knows_of_a_skipped_step(stage: int, at: int) -> None:
    """L4: it sees whether the scaler has called step; its schedule waits on all
    ranks."""
    pytest.importorskip("accelerate")
    expected = [(False, 0.5), (True, 0.5), (True, 0.5), (False, 0.25)]
    assert ranks.run(at, _skipped_by_accelerate, stage) == [expected] * at
