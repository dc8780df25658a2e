"""Faults that users of sharded training have met with norms, clipping, loss scales,
accumulation and gradients."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import ranks
import torch
import torch._dynamo  # an optimizer imports it: here, before ranks are forked
import torch.distributed as dist
from oracle import (
    STAGES,
    Run,
    apart,
    differing,
    distance,
    integer_gradient,
    quiet_state_dict,
    rank,
    set_integer_gradients,
    sharded,
    state_of,
    whole,
    world,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zerokern
from zerokern import GradScaler, Precision

CASES: dict[str, Callable[[int], Any]] = {}
at_worlds = pytest.mark.parametrize("at", ranks.worlds(1, 3, rarely=2))
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Register what every rank does in a stage."""
    CASES[function.__name__] = function
    return function


@functools.cache
def done(at: int) -> ranks.Cases:
    """Run all cases in all stages on one group of ranks."""
    return ranks.run_cases(
        at, {(n, s): functools.partial(f, s) for n, f in CASES.items() for s in STAGES}
    )


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return parameters and state."""
    return whole(model, optimizer) | state_of(model, optimizer)


def short(stage: int | None, of: int, **options: Any) -> Run:
    """Return a run of a small model."""
    return Run(stage, of, build=functools.partial(models.toy, blocks=2), **options)


# -------------------------------------------------- E1, E6, E12: several process groups

EXPERTS = 2
BOUND = 0.1


def _expert(index: int) -> nn.Linear:
    torch.manual_seed(50 + index)
    return nn.Linear(9, 5)


def _trunk() -> nn.Linear:
    torch.manual_seed(49)
    return nn.Linear(7, 9)


def _loss(trunk: nn.Module, expert: nn.Module, of_rank: int) -> Tensor:
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(60 + of_rank))
    return expert(torch.tanh(trunk(x))).square().mean()


def _expected_norms(at: int) -> tuple[float, list[float]]:
    """Return the norm of the trunk's mean gradient over all ranks, and of each expert's
    over the ranks that have it."""
    trunk, experts = _trunk(), [_expert(i) for i in range(EXPERTS)]
    for r in range(at):
        own = r % EXPERTS
        loss = _loss(trunk, experts[own], r)
        members = at // EXPERTS
        grads = torch.autograd.grad(
            loss, [*trunk.parameters(), *experts[own].parameters()]
        )
        for index, (param, grad) in enumerate(
            zip([*trunk.parameters(), *experts[own].parameters()], grads, strict=True)
        ):
            share = grad / (at if index < 2 else members)
            param.grad = share if param.grad is None else param.grad + share
    norms = [
        float(nn.utils.get_total_norm([p.grad for p in m.parameters()]))
        for m in (trunk, *experts)
    ]  # type: ignore[misc]
    return norms[0], norms[1:]


def _norms_of_two_optimizers(stage: int) -> dict[str, Any]:
    """Every rank has the trunk; rank r has expert r mod 2, shared with the other ranks
    that have it."""
    groups = [
        dist.new_group([r for r in range(world()) if r % EXPERTS == i])
        for i in range(EXPERTS)
    ]
    trunk, expert = _trunk(), _expert(rank() % EXPERTS)
    optimizers = [
        sharded(trunk, stage, adam=zerokern.SGD, lr=1.0),
        sharded(
            expert,
            stage,
            adam=zerokern.SGD,
            lr=1.0,
            process_group=groups[rank() % EXPERTS],
        ),
    ]
    before = [whole(m, o) for m, o in zip((trunk, expert), optimizers, strict=True)]
    _loss(trunk, expert, rank()).backward()
    # Measures, and clips nothing.
    norms = [float(o.clip_grad_norm_(math.inf)) for o in optimizers]
    of_ranks: list[Any] = [None] * world()
    dist.all_gather_object(of_ranks, norms[1])
    # Each expert once; the bounds must agree on all ranks.
    total = math.hypot(norms[0], *of_ranks[:EXPERTS])
    for optimizer, norm in zip(optimizers, norms, strict=True):
        optimizer.clip_grad_norm_(BOUND * norm / total)
        optimizer.step()
    after = [whole(m, o) for m, o in zip((trunk, expert), optimizers, strict=True)]
    moved = [
        float(nn.utils.get_total_norm([b[n] - a[n] for n in b]))
        for b, a in zip(before, after, strict=True)
    ]
    return {
        "norms": norms,
        "moved": moved,
        "reported": [float(o.grad_norm) for o in optimizers],
    }


@functools.cache
def two_optimizers(at: int) -> ranks.Cases:
    return ranks.run_cases(
        at, {s: functools.partial(_norms_of_two_optimizers, s) for s in STAGES}
    )


@pytest.mark.parametrize("at", (2, 4), ids="world{}".format)
@in_stages
def test_each_optimizer_has_the_norm_over_its_own_group(stage: int, at: int) -> None:
    """E1, E6: an expert's gradients are averaged over the ranks that have it, and its
    norm is neither averaged nor counted twice."""
    trunk, experts = _expected_norms(at)
    for r, result in enumerate(two_optimizers(at)[stage]):
        assert result["norms"] == pytest.approx([trunk, experts[r % EXPERTS]], rel=1e-6)
        assert result["reported"] == pytest.approx(result["norms"], rel=1e-6)


@pytest.mark.parametrize("at", (2, 4), ids="world{}".format)
@in_stages
def test_a_total_norm_over_several_groups_is_a_root_of_squares(
    stage: int, at: int
) -> None:
    """E12: `clip_grad_norm_(inf)` measures; each is then clipped to its part of the
    bound, and all together to it."""
    trunk, experts = _expected_norms(at)
    total = math.hypot(trunk, *experts)
    assert total > BOUND
    for r, result in enumerate(two_optimizers(at)[stage]):
        expected = [BOUND * trunk / total, BOUND * experts[r % EXPERTS] / total]
        assert result["moved"] == pytest.approx(expected, rel=1e-4)


# ------------------------------------------- E5, E8: what is returned, and what is done


@case
def norms_returned(stage: int) -> list[dict[str, Any]]:
    run = short(stage, world())
    found = []
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync() if step == 1 else nullcontext():
            run.backward(step)
        norm = run.optimizer.clip_grad_norm_(0.01)
        run.step()
        found.append(
            {"norm": norm.clone(), "reported": run.optimizer.grad_norm.clone()}
        )
    return found


@at_worlds
@in_stages
def test_the_norm_is_one_global_number_on_every_rank(stage: int, at: int) -> None:
    """E5: to the bit, before clipping; that it is torch's is in test_gradients."""
    first, *others = done(at)["norms_returned", stage]
    for step, expected in enumerate(first):
        assert (expected["norm"].shape, expected["norm"].dtype) == ((), torch.float32)
        assert torch.equal(expected["reported"].float(), expected["norm"])
        assert expected["norm"] > 0.01
        for other in others:
            assert torch.equal(other[step]["norm"], expected["norm"])
            assert torch.equal(other[step]["reported"], expected["reported"])


BOUNDS: dict[str, float | Tensor] = {
    "above": 100.0,
    "below": 0.05,
    "tensor": torch.tensor(0.05),
    "zero": 0.0,
}


@case
def clipped_updates(stage: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, bound in BOUNDS.items():
        model = models.toy(blocks=1)
        optimizer = sharded(model, stage, adam=zerokern.SGD, lr=1.0)
        before = whole(model, optimizer)
        models.loss_of(model, *models.batch(0)).backward()
        norm = float(optimizer.clip_grad_norm_(bound))
        optimizer.step()
        after = whole(model, optimizer)
        metrics = optimizer.metrics()
        moved = float(nn.utils.get_total_norm([before[n] - after[n] for n in before]))
        found[name] = {
            "norm": norm,
            "moved": moved,
            "coefficient": metrics["clip_coefficient"],
        }
        assert metrics["grad_norm"] == pytest.approx(norm)
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("name", BOUNDS)
def test_the_norm_before_clipping_is_returned_and_the_one_after_is_applied(
    name: str, stage: int, at: int
) -> None:
    """E8: the update of SGD at rate 1 is the clipped gradient; the coefficient can be
    read."""
    bound = float(BOUNDS[name])
    for results in done(at)["clipped_updates", stage]:
        result = results[name]
        assert result["norm"] > 0.1
        assert result["moved"] == pytest.approx(
            min(result["norm"], bound), rel=1e-4, abs=1e-7
        )
        assert result["moved"] <= bound * (1 + 1e-5)
        assert result["coefficient"] == pytest.approx(
            min(1.0, bound / (result["norm"] + 1e-6)), rel=1e-5
        )


# ----------------------------------------------- E9: torch's own functions on gradients


def _clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def _clip_norm_one_by_one(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=False)


def _clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-2)


def _scale_by_own_norm(model: nn.Module) -> None:
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    for param in model.parameters():
        param.grad.mul_(0.3 / total)  # type: ignore[union-attr]


TORCHS = {
    f.__name__.strip("_"): f
    for f in (_clip_norm, _clip_norm_one_by_one, _clip_value, _scale_by_own_norm)
}
BACKWARDS = (1, 2, 1)
"""Backward passes of each step: stage 1 expects as many as in the step before, and is
wrong twice."""
ATTEMPTS = [
    ("clip_norm", 0),
    ("clip_norm", 1),
    ("clip_norm", 2),
    ("clip_norm_one_by_one", 2),
    ("clip_value", 1),
    ("scale_by_own_norm", 0),
]


def _with_torchs(
    stage: int | None, of: int, name: str | None, at_step: int
) -> dict[str, Any]:
    # Moves by what the gradients are.
    run = short(stage, of, lr=1.0, weight_decay=0.0, betas=(0.0, 0.0), eps=1.0)
    message = ""
    for step, micros in enumerate(BACKWARDS):
        run.optimizer.zero_grad()
        for micro in range(micros):
            run.backward(10 * step + micro)
        if step == at_step and name is not None:
            try:
                TORCHS[name](run.model)
            except RuntimeError as error:
                message = str(error)
        run.step()
    return {"params": whole(run.model, run.optimizer), "message": message}


@case
def torchs_functions(stage: int) -> dict[tuple[str, int], dict[str, Any]]:
    return {(n, s): _with_torchs(stage, world(), n, s) for n, s in ATTEMPTS}


@at_worlds
@in_stages
@pytest.mark.parametrize(("name", "at_step"), ATTEMPTS)
def test_torchs_clipping_is_right_or_refused_by_name(
    name: str, at_step: int, stage: int, at: int
) -> None:
    """E9: in the first step as in later ones; what is refused has changed nothing."""
    for results in done(at)["torchs_functions", stage]:
        result = results[name, at_step]
        if result["message"]:
            assert (
                "clip_grad_norm_" in result["message"]
                and "full_grad" in result["message"]
            )
        expected = _with_torchs(None, at, None if result["message"] else name, at_step)
        assert apart(result["params"], expected["params"]) == {}


# ----------------------------------------------------- E13, E17: not finite on one rank

BAD = (math.inf, math.nan, -math.inf)
"""By the rank that has it."""
RECIPES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16, scaled": (torch.bfloat16, True),
}


def _with_a_bad_gradient(
    stage: int, recipe: str, bad_rank: int | None
) -> dict[str, Any]:
    """Take three steps; in the second, one rank has one bad element. None: leave that
    step out."""
    dtype, scaled = RECIPES[recipe]
    model = models.toy(blocks=1).to(dtype)
    optimizer = sharded(model, stage, lr=1e-2, buckets=zerokern.Buckets(bytes=2000))
    scaler = GradScaler("cpu", init_scale=1.0, enabled=scaled, growth_interval=100)
    for step in (0, 2) if bad_rank is None else (0, 1, 2):
        optimizer.zero_grad()
        set_integer_gradients(model, step)
        scaler.scale(torch.ones(()))
        for param in model.parameters():
            param.grad.mul_(scaler.get_scale())  # type: ignore[union-attr]
        if step == 1 and rank() == bad_rank:
            place = list(model.parameters())[(bad_rank + stage) % 4]
            place.grad.view(-1)[-1] = BAD[bad_rank]  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    return {
        "all": everything(model, optimizer),
        "scale": scaler.get_scale(),
        "skipped": int(optimizer.skipped_steps),
        "metric": optimizer.metrics()["skipped_steps"],
    }


@case
def bad_gradients(stage: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for recipe in RECIPES:
        left_out = _with_a_bad_gradient(stage, recipe, None)["all"]
        for bad_rank in range(world()):
            result = _with_a_bad_gradient(stage, recipe, bad_rank)
            found[recipe, bad_rank] = {
                **result,
                "all": differing(result["all"], left_out),
            }
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bad_gradient_on_any_rank_skips_the_step_on_all(
    recipe: str, stage: int, at: int
) -> None:
    """E13, E17, E18: every bit stays, step counters too; all ranks count it, and go on
    alike."""
    scale = 0.5 if RECIPES[recipe][1] else 1.0
    for results in done(at)["bad_gradients", stage]:
        for bad_rank in range(at):
            result = results[recipe, bad_rank]
            assert result == {"all": [], "skipped": 1, "metric": 1, "scale": scale}


# --------------------------------------------------------- E15: a loss scale that falls


def _overflows(stage: int, init_scale: float, number: int, good: int) -> dict[str, Any]:
    """Overflow again and again on the last rank, then never; note the scale, and
    whether good steps are taken."""
    model = nn.Linear(3, 2)
    optimizer = sharded(model, stage, lr=1e-2)
    scaler = GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    scales = []
    for step in range(number + good):
        bad = step < number and rank() == world() - 1
        loss = model(torch.ones(4, 3)).square().mean() * (math.inf if bad else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {
        "scales": scales,
        "skipped": int(optimizer.skipped_steps),
        "steps": state_of(model, optimizer)["bias/step"],
    }


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
def test_a_loss_scale_recovers_after_overflows(stage: int, at: int) -> None:
    """E15: 20 overflows, then growth after each interval."""
    for result in ranks.run(at, _overflows, stage, 2.0**16, 20, 6):
        assert result["scales"][19] == 2.0**-4
        assert result["scales"][20:] == [
            2.0**-4,
            2.0**-3,
            2.0**-3,
            2.0**-2,
            2.0**-2,
            2.0**-1,
        ]
        assert (result["skipped"], result["steps"]) == (20, 6)


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
def test_a_loss_scale_has_a_floor(at: int) -> None:
    """E15: halved without end it would be 0, and no step would be finite any more."""
    for result in ranks.run(at, _overflows, 2, 2.0**-100, 60, 4):
        assert min(result["scales"]) > 0
        assert result["scales"][-1] > result["scales"][59]
        assert (result["skipped"], result["steps"]) == (60, 4)


# --------------------------------------------- E18: torch's scaler on sharded gradients


@case
def torchs_scaler(stage: int) -> list[dict[str, Any]]:
    run, twin = short(stage, world()), short(stage, world())
    found = []
    for step in range(2):  # later steps find gradients reduced already
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = everything(run.model, run.optimizer)
        run.optimizer.zero_grad()
        run.backward(
            step, lambda r, step=step, scaler=scaler: scaler.scale(run.loss(step, r))
        )
        message = ""
        try:
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
        except RuntimeError as error:
            message = str(error)
        changed = differing(everything(run.model, run.optimizer), before)
        found.append({"message": message, "changed": changed})
        for script in (run, twin):
            script.optimizer.zero_grad()
            script.backward(10 + step)
            script.step()
    found.append(
        {
            "differing": differing(
                everything(run.model, run.optimizer),
                everything(twin.model, twin.optimizer),
            )
        }
    )
    return found


@pytest.mark.parametrize("at", (2, 3), ids="world{}".format)
@in_stages
def test_torchs_scaler_that_unscales_is_refused_by_name(stage: int, at: int) -> None:
    """E18: it would look for infinities in one rank's part; training goes on as if it
    had not been tried."""
    for *tries, last in done(at)["torchs_scaler", stage]:
        for attempt in tries:
            assert (
                "zerokern.GradScaler" in attempt["message"]
                or "full_grad" in attempt["message"]
            )
            assert attempt["changed"] == []
        assert last["differing"] == []


# ------------------------------------------------------ F3, F4: accumulation in 16 bits

SHAPES = ((5, 7), (), (64,), (3, 65), (1,), (129,))
FORMATS = {
    "bf16 on the wire": Precision(),
    "fp32 on the wire": Precision(wire=torch.float32),
    "bf16 shards": Precision(gradients=torch.bfloat16),
    "fp32 on the wire, bf16 shards": Precision(
        wire=torch.float32, gradients=torch.bfloat16
    ),
}


def _accumulated(stage: int, precision: Precision, no_sync: bool) -> dict[str, Tensor]:
    """Three micro-batches a step, whose gradients are integers that bf16 adds up
    exactly."""
    torch.manual_seed(0)
    model = models.Weighted(SHAPES, torch.bfloat16)
    optimizer = sharded(
        model, stage, lr=1e-2, precision=precision, buckets=zerokern.Buckets(bytes=300)
    )
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            with optimizer.no_sync() if no_sync and micro < 2 else nullcontext():
                generator = torch.Generator().manual_seed(10 * step + micro)
                model(
                    [
                        torch.randint(-4, 5, s, generator=generator).float()
                        for s in SHAPES
                    ]
                ).backward()
        optimizer.step()
    return everything(model, optimizer)


@functools.cache
def _accumulated_by_torch() -> dict[str, Tensor]:
    """Return the masters: torch's AdamW in fp32 on the sums."""
    torch.manual_seed(0)
    model = models.Weighted(SHAPES, torch.bfloat16).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            generator = torch.Generator().manual_seed(10 * step + micro)
            model(
                [torch.randint(-4, 5, s, generator=generator).float() for s in SHAPES]
            ).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@case
def accumulated(stage: int) -> dict[Any, dict[str, Tensor]]:
    return {
        (f, n): _accumulated(stage, FORMATS[f], n)
        for f in FORMATS
        for n in (False, True)
    }


@at_worlds
@in_stages
@pytest.mark.parametrize("no_sync", (False, True), ids=["reduced each time", "no_sync"])
@pytest.mark.parametrize("name", FORMATS)
def test_accumulation_in_every_format_is_the_sum(
    name: str, no_sync: bool, stage: int, at: int
) -> None:
    """F3: neither the last micro-batch only, nor a buffer of another dtype."""
    expected = _accumulated_by_torch()
    for results in done(at)["accumulated", stage]:
        result = results[name, no_sync]
        assert apart({n: result[f"{n}/master"] for n in expected}, expected, 1e-6) == {}
        assert (
            differing(
                {n: result[n] for n in expected},
                {n: result[f"{n}/master"].bfloat16() for n in expected},
            )
            == []
        )


MICROS = 256
SMALL_BESIDE_LARGE = [(1, False), (2, False), (2, True), (3, False)]
"""Stage and no_sync: with it, all stages add up in the bucket as stage 1 always
does."""


def _small_beside_large(stage: int, no_sync: bool) -> Tensor:
    """Return the mean gradient over ranks and the sum over micro-batches, as the first
    moment has it."""
    model = models.Weighted([(70,)], torch.bfloat16)
    optimizer = sharded(
        model, stage, precision=Precision(wire=torch.float32), betas=(0.0, 0.0)
    )
    with optimizer.no_sync() if no_sync else nullcontext():
        for value in (1.0, *[1e-3] * MICROS):
            model([torch.full((70,), value)]).backward()
    optimizer.step()
    return state_of(model, optimizer)["terms.0.weight/exp_avg"]


@functools.cache
def small_beside_large(at: int) -> ranks.Cases:
    cases = {
        (s, n): functools.partial(_small_beside_large, s, n)
        for s, n in SMALL_BESIDE_LARGE
    }
    return ranks.run_cases(at, cases)


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@pytest.mark.parametrize(("stage", "no_sync"), SMALL_BESIDE_LARGE)
def test_small_gradients_of_many_micro_batches_are_not_lost(
    stage: int, no_sync: bool, at: int
) -> None:
    """F4: with fp32 on the wire, whether they add up in the bucket or in the shard."""
    small = float(torch.tensor(1e-3).bfloat16())  # what autograd hands over
    expected = torch.full((70,), 1.0 + MICROS * small)
    for result in small_beside_large(at)[stage, no_sync]:
        assert distance(result, expected) < 1e-6


# --------------------------------------------------------------- F10: reading gradients

Read = Callable[[Run], None]
READING: dict[str, Callable[[Run, Read], None]] = {}


def reading(function: Callable[[Run, Read], None]) -> Callable[[Run, Read], None]:
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
        run.backward(
            step,
            lambda r, step=step: run.loss(step, r, use="left" if r == 0 else "both"),
        )
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
        run.set_gradient(
            "head.bias",
            lambda r, step=step: torch.full((models.VOCABULARY,), step + r + 1.0),
        )
        read(run)
        run.step()


WATCHED = (
    *("embedding.weight", "blocks.0.up.weight", "blocks.1.norm.bias"),
    *("blocks.2.left.weight", "blocks.2.right.bias", "head.bias"),
)


def _read(name: str, stage: int | None, of: int) -> dict[str, Any]:
    run = Run(stage, of, buckets=zerokern.Buckets(bytes=6000))
    found: list[dict[str, Any]] = []
    shards: list[dict[str, Any]] = []

    def read(run: Run) -> None:
        params = {n: p for n, p in run.model.named_parameters() if n in WATCHED}
        if run.torch:
            found.append(
                {
                    n: None if p.grad is None else p.grad.clone()
                    for n, p in params.items()
                }
            )
            return
        found.append({n: run.optimizer.full_grad(p) for n, p in params.items()})
        shards.append({})
        names = [n for n, _ in run.model.named_parameters()]
        state = quiet_state_dict(run.optimizer)["state"]
        for n, param in params.items():
            part = run.optimizer.local_grad(param)
            shards[-1][n] = (
                state[names.index(n)].get("range", (0, param.numel())),
                None if part is None else part.clone(),
            )
        run.note_buffers()

    READING[name](run, read)
    return {
        "found": found,
        "shards": shards,
        "params": whole(run.model, run.optimizer),
        "buffers": run.buffers,
    }


@functools.cache
def _read_by_torch(name: str, of: int) -> dict[str, Any]:
    return _read(name, None, of)


@functools.cache
def read(at: int) -> ranks.Cases:
    return ranks.run_cases(
        at,
        {(n, s): functools.partial(_read, n, s, at) for n in READING for s in STAGES},
    )


@at_worlds
@in_stages
@pytest.mark.parametrize("name", READING)
def test_a_whole_gradient_is_torchs(name: str, stage: int, at: int) -> None:
    """F10: fp32, of the parameter's shape, averaged over ranks; None where no rank has
    one; training goes on alike."""
    expected = _read_by_torch(name, at)
    for result in read(at)[name, stage]:
        assert len(result["found"]) == len(expected["found"]) > 0
        for ours, theirs in zip(result["found"], expected["found"], strict=True):
            assert {n for n, g in ours.items() if g is None} == {
                n for n, g in theirs.items() if g is None
            }
            assert {g.dtype for g in ours.values() if g is not None} <= {torch.float32}
            assert (
                apart(
                    {n: g for n, g in ours.items() if g is not None},
                    {n: g for n, g in theirs.items() if g is not None},
                    1e-5,
                )
                == {}
            )
        assert apart(result["params"], expected["params"]) == {}
        assert not any(result["buffers"])


@at_worlds
@in_stages
@pytest.mark.parametrize("name", READING)
def test_the_parts_of_a_gradient_are_the_whole(name: str, stage: int, at: int) -> None:
    """F10: each rank has the elements that `range` says, and together they are all, to
    the bit."""
    results = read(at)[name, stage]
    for index, grads in enumerate(results[0]["found"]):
        for n, grad in grads.items():
            parts = [result["shards"][index][n] for result in results]
            if grad is None:
                assert {part for _, part in parts} == {None}
                continue
            held = [(start, part) for (start, end), part in parts if start < end]
            assert [part.shape == (end - start,) for (start, end), part in parts] == [
                True
            ] * at
            assert torch.equal(
                torch.cat([part for _, part in sorted(held, key=lambda h: h[0])]),
                grad.flatten(),
            )


def _odd_gradients(stage: int) -> list[bool]:
    """Parameters of other memory orders, of one element and of none, in 16 bits."""
    torch.manual_seed(0)
    values = [
        torch.randn(6, 7).T,
        torch.randn(3, 5, 7).permute(2, 0, 1),
        torch.randn(()),
        torch.zeros(0, 4),
    ]
    model = nn.Module()
    model.units = nn.ModuleList(
        [nn.ParameterList([nn.Parameter(v.bfloat16()) for v in values])]
    )
    optimizer = sharded(model, stage)
    set_integer_gradients(model, 0)
    ranges = [
        entry.get("range") for entry in quiet_state_dict(optimizer)["state"].values()
    ]
    found = []
    for index, (param, span) in enumerate(zip(model.parameters(), ranges, strict=True)):
        # The mean over the ranks.
        expected = integer_gradient(param.shape, 0, index, 0, 1)
        grad, part = optimizer.full_grad(param), optimizer.local_grad(param)
        in_memory = torch.empty_strided(param.shape, values[index].stride()).copy_(
            expected
        )
        start, end = span or (0, param.numel())
        flat = in_memory.as_strided((param.numel(),), (1,))[start:end]
        found.append(
            torch.equal(grad, expected)
            and grad.dtype == torch.float32
            and torch.equal(part.float(), flat)
        )
    return found


@at_worlds
@in_stages
def test_gradients_of_odd_parameters_can_be_read(stage: int, at: int) -> None:
    """F10, D19, D20, D23: the whole one has the parameter's indices, the part has the
    order of its memory."""
    assert ranks.run(at, _odd_gradients, stage) == [[True] * 4] * at


def test_the_gradient_of_a_stranger_is_refused() -> None:
    optimizer = zerokern.AdamW(models.toy().parameters())
    for method in (optimizer.full_grad, optimizer.local_grad):
        with pytest.raises(ValueError, match=r"\(3,\)"):
            method(nn.Parameter(torch.ones(3)))


# ----------------------------------------------------- F11: the number of micro-batches

ROWS = 8
SPLITS = {"8x1": 8, "4x2": 4, "1x8": 1}
SPLIT_CASES = [
    ("8x1", False),
    ("8x1", True),
    ("4x2", False),
    ("4x2", True),
    ("1x8", False),
]


def _split(stage: int | None, of: int, micros: int, no_sync: bool) -> dict[str, Tensor]:
    """Train on 8 rows per rank and step, cut into micro-batches."""
    run = short(stage, of)
    for step in range(2):
        run.optimizer.zero_grad()
        tokens, targets = models.batch(step, size=ROWS * of)
        for micro in range(micros):

            def loss(
                r: int,
                micro: int = micro,
                tokens: Tensor = tokens,
                targets: Tensor = targets,
            ) -> Tensor:
                x, y = (
                    models.share(models.share(t, r, of), micro, micros)
                    for t in (tokens, targets)
                )
                return models.loss_of(run.model, x, y) / micros

            with run.no_sync() if no_sync and micro < micros - 1 else nullcontext():
                run.backward(0, loss)
        run.step()
    return whole(run.model, run.optimizer)


@case
def splits(stage: int) -> dict[Any, dict[str, Tensor]]:
    return {key: _split(stage, world(), SPLITS[key[0]], key[1]) for key in SPLIT_CASES}


@functools.cache
def _on_whole_batches(of: int) -> dict[str, Tensor]:
    return _split(None, of, 1, False)


@at_worlds
@in_stages
@pytest.mark.parametrize(("name", "no_sync"), SPLIT_CASES)
def test_the_number_of_micro_batches_changes_nothing(
    name: str, no_sync: bool, stage: int, at: int
) -> None:
    """F11."""
    for results in done(at)["splits", stage]:
        assert apart(results[name, no_sync], _on_whole_batches(at)) == {}


# ------------------------------------------------------------------ F13: the first step


def _materialised(how: str, run: Run) -> None:
    """Do what checkpoint libraries do to have a state before the first step."""
    if how == "state_dict":
        run.optimizer.load_state_dict(copy.deepcopy(quiet_state_dict(run.optimizer)))
    elif how == "full_state_dict":
        run.optimizer.load_state_dict(run.optimizer.full_state_dict())
    elif how == "step without gradients":
        run.optimizer.step()
        run.optimizer.zero_grad()
    elif how == "torch's distributed checkpoint":
        run.optimizer.consolidate_state_dict(0)
        get_optimizer_state_dict(run.model, run.optimizer)


HOW = (
    "nothing",
    "state_dict",
    "full_state_dict",
    "step without gradients",
    "torch's distributed checkpoint",
)


def _first_steps(stage: int | None, of: int, how: str) -> dict[str, Tensor]:
    run = short(stage, of)
    if stage is not None:
        _materialised(how, run)
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    return everything(run.model, run.optimizer)


@case
def first_steps(stage: int) -> dict[str, dict[str, Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".*state_dict\(\) holds this rank's shards only"
        )
        return {how: _first_steps(stage, world(), how) for how in HOW}


@at_worlds
@in_stages
@pytest.mark.parametrize("how", HOW)
def test_a_state_that_was_asked_for_leaves_the_first_step_the_first(
    how: str, stage: int, at: int
) -> None:
    """F13: a counter that had moved would make it 1.34 times too small."""
    expected = _first_steps(None, at, "")
    for results in done(at)["first_steps", stage]:
        result = results[how]
        assert {float(v) for k, v in result.items() if k.endswith("/step")} == {2.0}
        assert apart({n: result[n] for n in expected}, expected, 1e-4) == {}
        assert differing(result, results["nothing"]) == []
