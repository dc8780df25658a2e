"""Odd graphs, ranks that part ways, exceptions: the right result or an error that says
what is wrong, never a hang."""

from __future__ import annotations

import functools
import os
import random
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import faults
import models
import oracle
import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    REDUCED_SUMS,
    STAGES,
    Run,
    apart,
    differing,
    distance,
    rank,
    sharded,
    whole,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerokern

SMALL = zerokern.Buckets(bytes=6000)
WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.long)]
Script = Callable[[Run], None]
SCRIPTS: dict[str, tuple[Script, dict[str, Any]]] = {}

at_worlds = pytest.mark.parametrize("at", WORLDS, ids="world{}".format)
at_several = pytest.mark.parametrize("at", WORLDS[1:], ids="world{}".format)
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


def script(**options: Any) -> Callable[[Script], Script]:
    """Register a script; options go to `Run`."""

    def register(function: Script) -> Script:
        SCRIPTS[function.__name__] = function, options
        return function

    return register


def _rest(run: Run) -> None:
    """Note that nothing is left, now."""
    run.note_buffers()
    if not run.torch:
        faults.assert_at_rest(run.optimizer)


# -------------------------------------------------------- outputs that nobody uses (B8)


class Pair(nn.Module):
    """A unit with two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dropped = nn.Linear(17, 17), nn.Linear(17, 17)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.used(x)), self.dropped(x)


class Paired(nn.Module):
    """Embedding, block, a pair whose second output leaves the model, head; a unit whose
    output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList([models.Block(), Pair(), models.Block()])
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: Tensor, both: bool = False) -> Any:
        x, beside = self.blocks[1](self.blocks[0](self.embedding(tokens)))
        self.blocks[2](x)
        return (self.head(x), beside) if both else self.head(x)


def paired() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Paired()


@script(build=paired, weight_decay=0.3)
def an_output_never_enters_the_loss(run: Run) -> None:
    """B8: six iterations; parameters behind it have no gradient and do not even
    decay."""
    for step in range(6):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        dropped = [
            *run.model.blocks[1].dropped.parameters(),
            *run.model.blocks[2].parameters(),
        ]
        if run.torch or run.ranks == 1:
            assert [p.grad for p in dropped] == [None] * len(dropped)
    _rest(run)


@script(build=paired, weight_decay=0.3)
def an_output_of_the_model_never_enters_the_loss(run: Run) -> None:
    """B8: it is alive while backward runs, and in the last two iterations it is
    used."""

    def loss(of_rank: int, step: int) -> Tensor:
        tokens, targets = (
            models.share(t, of_rank, run.ranks) for t in models.batch(step)
        )
        logits, beside = run.model(tokens, both=True)
        value = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return value + beside.square().mean() if step >= 4 else value

    for step in range(6):
        run.optimizer.zero_grad()
        run.backward(step, functools.partial(loss, step=step))
        run.step()
    _rest(run)


# -------------------------------------------------------------- used several times (B1)


@script(build=lambda: models.forked().bfloat16())
def a_unit_is_used_twice_in_bf16(run: Run) -> None:
    """B1: both uses count, whatever the precision; compared by moments, which are sums
    of gradients."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 1, 0, 1, 1))
        run.step()


# ------------------------------------------------ checkpoints (B13, B15, B20, B24, B25)


class Parent(nn.Module):
    """Parameters of its own, of the root unit, around inner units."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((17,), 0.9))
        self.blocks = nn.ModuleList(models.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.gain * block(x)
        return x


class Nested(nn.Module):
    """A checkpoint around a parent of units."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding, self.parent = nn.Embedding(models.VOCABULARY, 17), Parent()
        self.head, self.reentrant = nn.Linear(17, models.VOCABULARY), reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(
            checkpoint(
                self.parent, self.embedding(tokens), use_reentrant=self.reentrant
            )
        )


def nested(reentrant: bool) -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Nested(reentrant)


class Inside(models.Block):
    """A unit that checkpoints its own inside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(checkpoint(self._body, x, use_reentrant=self.reentrant))

    def _body(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class InsideOut(nn.Module):
    """Units with a checkpoint inside, or outside, or both."""

    def __init__(self, reentrant: bool, outside: bool, inside: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList(
            Inside() if inside else models.Block() for _ in range(3)
        )
        for block in self.blocks:
            block.reentrant = reentrant
        self.head, self.reentrant, self.outside = (
            nn.Linear(17, models.VOCABULARY),
            reentrant,
            outside,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.reentrant)
                if self.outside
                else block(x)
            )
        return self.head(x)


def inside_out(reentrant: bool, outside: bool, inside: bool) -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return InsideOut(reentrant, outside, inside)


def _plain(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        _rest(run)


def _squared(run: Run) -> None:
    def loss(of_rank: int, step: int) -> Tensor:
        tokens = models.share(models.batch(step)[0], of_rank, run.ranks)
        return (run.model(tokens) * run.model(tokens)).mean()

    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, functools.partial(loss, step=step))
        run.step()
        _rest(run)


KINDS = {"reentrant": True, "not reentrant": False}
for kind, is_reentrant in KINDS.items():
    SCRIPTS[f"nested, {kind}"] = (
        _plain,
        {"build": functools.partial(nested, is_reentrant)},
    )
    # B13.
    SCRIPTS[f"nested and squared, {kind}"] = (
        _squared,
        {"build": functools.partial(nested, is_reentrant)},
    )
    for place, flags in {
        "outside": (True, False),
        "inside": (False, True),
        "both": (True, True),
    }.items():
        SCRIPTS[f"checkpoint {place}, {kind}"] = (
            _plain,
            {"build": functools.partial(inside_out, is_reentrant, *flags)},
        )


def _with_frozen(run: Run, reentrant: bool) -> None:
    run.model.checkpoint = reentrant
    frozen = [
        run.model.blocks[0].up.weight,
        run.model.blocks[0].up.bias,
        *run.model.blocks[1].parameters(),
    ]
    assert not any(p.requires_grad for p in frozen)
    _plain(run)


def _frozen_in_blocks() -> nn.Module:
    model = models.forked()
    model.blocks[0].up.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@script(build=_frozen_in_blocks, groups=_trainable)
def frozen_linear_in_a_checkpoint(run: Run) -> None:
    """B15: recomputed tensors have the shapes that were saved; one block is frozen
    wholly."""
    _with_frozen(run, reentrant=False)


@script(build=_frozen_in_blocks, groups=_trainable)
def frozen_linear_in_a_reentrant_checkpoint(run: Run) -> None:
    _with_frozen(run, reentrant=True)


def _two_losses(run: Run, together: bool) -> None:
    """B20: each loss goes through a reentrant checkpoint of the same block."""
    run.model.checkpoint = True
    for step in range(3):
        run.optimizer.zero_grad()
        for of_rank in run.each():
            losses = [
                run.loss(10 * step + i, of_rank, order=(0,))
                / (run.ranks if run.torch else 1)
                for i in range(2)
            ]
            if together:
                sum(losses).backward()  # type: ignore[union-attr]
            else:
                losses[1].backward()
                losses[0].backward()
        run.step()
        _rest(run)


@script()
def reentrant_checkpoint_in_two_losses(run: Run) -> None:
    _two_losses(run, together=True)


@script()
def reentrant_checkpoint_in_two_losses_one_after_the_other(run: Run) -> None:
    _two_losses(run, together=False)


# --------------------------------------------------- phases and routing (B17, B18, B22)


@script()
def phases_with_different_parts(run: Run) -> None:
    """B17: train, evaluate and train again, each through other units; nothing is left
    after any phase."""
    for step, (trained, evaluated) in enumerate(
        [((0,), (1,)), ((1, 0), ()), ((), (0, 1)), ((1,), (1, 0))]
    ):
        run.optimizer.zero_grad()
        run.backward(step, order=trained)
        run.step()
        _rest(run)
        with torch.no_grad():
            tokens, targets = models.batch(100 + step)
            logits = run.model(
                tokens, order=evaluated, use="left" if step % 2 else "right"
            )
            run.seen.append(
                nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            )
        _rest(run)


@script()
def evaluation_with_gradients_on(run: Run) -> None:
    """B17: a forward whose graph is dropped; the step after it is like any other."""
    for step in range(4):
        run.optimizer.zero_grad()
        tokens, targets = models.batch(100 + step)
        logits = run.model(tokens, order=(step % 2,))
        run.seen.append(
            nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten()
            ).detach()
        )
        del logits
        run.backward(step)
        run.step()
        _rest(run)


@script()
def routing_alternates(run: Run) -> None:
    """B18: two experts whose order changes with every step, and which are sometimes
    left out."""
    for step in range(8):
        run.optimizer.zero_grad()
        run.backward(step, order=[(0, 1), (1, 0), (0,), (1,)][step % 4])
        run.step()
        _rest(run)


# A large eps keeps Adam from magnifying the last bits of gradients that are nearly
# zero.
@script(eps=1e-4)
def a_block_is_called_a_different_number_of_times(run: Run) -> None:
    """B3 in stages 1 and 2; in stage 3 ranks must run the same units, and do here."""
    order_of = [
        (0, 1) if r == 0 and run.stage != 3 else (0, 1, 1, 1) for r in range(run.ranks)
    ]
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, lambda r, step=step: run.loss(step, r, order=order_of[r]))
        run.step()


# ----------------------------------------------------- a part that some ranks skip (B4)


class Multimodal(nn.Module):
    """A tower that runs only where there are images."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.tower = nn.ModuleList([models.Block(), models.Block()])
        self.blocks = nn.ModuleList([models.Block(), models.Block()])
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: Tensor, images: bool = True) -> Tensor:
        x = self.embedding(tokens)
        for block in self.tower if images else ():
            x = x + block(torch.ones_like(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def multimodal() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Multimodal()


@script(build=multimodal)
def a_tower_is_skipped_on_some_ranks(run: Run) -> None:
    """B4 in stages 1 and 2: zeros from whoever skips it; every rank skips it in one
    step."""
    apart_ways = run.stage != 3
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda r, step=step: run.loss(
                step, r, images=step != 2 and (r != 1 or not apart_ways)
            ),
        )
        run.step()


# --------------------------------------------------------- methods beside forward (B11)


class Encoder(models.Block):
    """A block with another way in."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) @ self.down.weight.T


class Encoding(nn.Module):
    """Uses its first unit by `encode`, its second one by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.blocks = nn.ModuleList([Encoder(), models.Block()])
        self.head = nn.Linear(17, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0].encode(self.embedding(tokens))))


def encoding() -> nn.Module:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Encoding()


@script(build=encoding, eps=1e-4)
def a_method_beside_forward(run: Run) -> None:
    """B11: after it was registered."""
    if not run.torch:
        run.optimizer.register_forward_method(run.model.blocks[0], "encode")
    _plain(run)


# ---------------------------------------------------------------------- all scripts


def play(name: str, stage: int | None, at: int) -> dict[str, Any]:
    """Run one script."""
    function, options = SCRIPTS[name]
    run = Run(stage, at, buckets=SMALL, **options)
    function(run)
    return run.result()


@functools.cache
def reference(name: str, at: int) -> dict[str, Any]:
    """Return what torch's AdamW on one process makes of a script."""
    return play(name, None, at)


# Stage 3 forbids what these scripts are about; the tests of ranks that part ways have
# it.
ALIKE_IN_STAGE_3 = (
    "a_block_is_called_a_different_number_of_times",
    "a_tower_is_skipped_on_some_ranks",
)
RUNS = [
    (name, stage)
    for name in SCRIPTS
    for stage in STAGES
    if not (stage == 3 and name in ALIKE_IN_STAGE_3)
]
of_runs = pytest.mark.parametrize(("name", "stage"), RUNS)


@functools.cache
def played(at: int) -> ranks.Cases:
    """All scripts in all stages, on one group of ranks."""
    return ranks.run_cases(
        at, {(n, s): functools.partial(play, n, s, at) for n, s in RUNS}
    )


@at_worlds
@of_runs
def test_trains_like_torch(at: int, name: str, stage: int) -> None:
    """Parameters, moments and whatever the script observed, on every rank."""
    expected = reference(name, at)
    for result in played(at)[name, stage]:
        if name.endswith("bf16"):
            continue
        assert apart(result["params"], expected["params"]) == {}
        ours = {
            key: value
            for key, value in result["state"].items()
            if key in expected["state"] or value.any()
        }
        assert apart(ours, expected["state"], limit=1e-4) == {}
        assert apart(result["seen"], expected["seen"]) == {}
        assert not any(result["buffers"])


@at_worlds
@of_runs
def test_ranks_issue_the_same_collectives(at: int, name: str, stage: int) -> None:
    assert faults.same_on_all_ranks(
        [result["log"] for result in played(at)[name, stage]]
    )


@at_worlds
@in_stages
def test_both_uses_count_in_bf16(at: int, stage: int) -> None:
    """B1: one missing use would change a first moment by a third; bf16 gradients change
    it by a few per cent."""
    name = "a_unit_is_used_twice_in_bf16"
    run = Run(None, at, build=models.forked)
    SCRIPTS[name][0](run)
    expected = run.result()["state"]
    for result in played(at)[name, stage]:
        for key in (
            f"blocks.{i}.{layer}.weight/exp_avg"
            for i in (0, 1)
            for layer in ("up", "down", "norm")
        ):
            difference = (result["state"][key] - expected[key]).norm() / expected[
                key
            ].norm()
            assert difference < 0.06, key


@at_several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["nested", "checkpoint outside", "checkpoint inside", "checkpoint both"]
)
def test_recomputation_gathers_nothing_again(at: int, name: str, kind: str) -> None:
    """B25: each unit once for its forward and once for its backward, also inside of a
    checkpointed parent."""
    for result in played(at)[f"{name}, {kind}", 3]:
        gathers = Counter(
            c.unit
            for c in result["log"]
            if c.op == "all_gather" and c.step == 2 and c.phase != "step"
        )
        assert len(gathers) >= 3
        assert set(gathers.values()) == {2}


@at_several
def test_a_wrong_guess_costs_gathers_only(at: int) -> None:
    """B18: a unit that was gathered ahead in vain costs one gather, in each
    direction."""
    for result in played(at)["routing_alternates", 3]:
        for step in range(2, 8):
            gathers = Counter(
                c.unit for c in result["log"] if c.op == "all_gather" and c.step == step
            )
            assert gathers["root"] == gathers["blocks.2"] == 2
            assert all(count <= 4 for count in gathers.values())


# ------------------------------------------------------------ the smallest script (B19)


def _smallest(stage: int) -> tuple[dict[str, Tensor], float]:
    group = faults.short_group(5.0)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    begun = time.perf_counter()
    optimizer = sharded(model, stage, lr=1e-2, process_group=group)
    for step in range(2):
        model(torch.full((4, 3), 1.0 + rank() + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    took = time.perf_counter() - begun
    return whole(model, optimizer), took


def test_the_smallest_script_does_not_hang() -> None:
    """B19: one Linear, two ranks, well within the time limit of its group."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for of_rank in range(2):
            (
                model(torch.full((4, 3), 1.0 + of_rank + step)).square().mean() / 2
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    cases = ranks.run_cases(
        2, {stage: functools.partial(_smallest, stage) for stage in STAGES}
    )
    for stage in STAGES:
        for params, took in cases[stage]:
            assert took < 5
            assert apart(params, dict(model.named_parameters()), 1e-6) == {}


# ----------------------------------------- ranks that part ways (B3, B4, B11, B21, B22)

TIMEOUT_S = 2.0
PAIRS = 5
"""Pairs of ranks that part at the same time, each in a group of its own, since all they
do is wait."""
NAMED = re.compile(
    r"(all_gather|reduce_scatter) of .+ did not complete: another rank never took part"
    r" in it"
)
Parting = Callable[[Run, int], None]
PARTINGS: dict[str, tuple[Parting, Sequence[int], dict[str, Any]]] = {}
"""By name: what the ranks do, in which stages it is an error, and options for `Run`."""


def parting(*stages: int, **options: Any) -> Callable[[Parting], Parting]:
    """Register a way to part."""

    def register(function: Parting) -> Parting:
        PARTINGS[function.__name__] = function, stages, options
        return function

    return register


def _iteration(run: Run, step: int, **forward: Any) -> None:
    run.optimizer.zero_grad()
    run.backward(step, **forward)
    run.step()


@parting(3)
def a_block_is_called_more_often(run: Run, place: int) -> None:
    """B3: once on one rank, three times on the other."""
    _iteration(run, 0, order=(0, 1) if place == 0 else (0, 1, 1, 1))
    _iteration(run, 1)


@parting(3)
def a_block_is_called_more_often_later(run: Run, place: int) -> None:
    """B3, when units are gathered ahead."""
    _iteration(run, 0)
    _iteration(run, 1, order=(0, 1) if place == 0 else (0, 1, 1, 1))
    _iteration(run, 2)


@parting(3, build=multimodal)
def a_tower_is_skipped(run: Run, place: int) -> None:
    """B4."""
    _iteration(run, 0, images=place != 1)
    _iteration(run, 1)


@parting(3, build=multimodal)
def a_tower_is_skipped_later(run: Run, place: int) -> None:
    """B4, when units are gathered ahead."""
    _iteration(run, 0)
    _iteration(run, 1, images=place != 1)
    _iteration(run, 2)


@parting(1, 2, 3)
def a_rank_has_one_batch_fewer(run: Run, place: int) -> None:
    """B21: and goes on to save."""
    for step in range(3 - place):
        _iteration(run, step)
    run.optimizer.full_state_dict()


@parting(1, 2, 3)
def a_rank_has_one_micro_batch_more(run: Run, place: int) -> None:
    """B21, within a step."""
    _iteration(run, 0)
    run.optimizer.zero_grad()
    for micro in range(1 + place):
        run.backward(micro)
    run.step()
    run.optimizer.full_state_dict()


@parting(3)
def a_rank_evaluates_longer(run: Run, place: int) -> None:
    """B22: three batches and four, then training goes on."""
    _iteration(run, 0)
    for step in range(4 - place):
        run.evaluate(step)
    _iteration(run, 1)
    _iteration(run, 2)


@parting(1, 2, 3)
def a_rank_leaves_out_a_step(run: Run, place: int) -> None:
    _iteration(run, 0)
    run.optimizer.zero_grad()
    run.backward(1)
    if place == 0:
        run.step()
    run.optimizer.full_state_dict()


def _raising(where: str) -> Parting:
    def function(run: Run, place: int) -> None:
        _iteration(run, 0)
        run.optimizer.zero_grad()
        if place == 1:
            faults.PLACES[where](run, 1)
        else:
            _iteration(run, 1)
            run.optimizer.full_state_dict()

    return function


RAISING = [
    "forward_inside_a_unit",
    "module_hook_in_backward",
    "last_gradient_of_backward",
]
for where in RAISING:
    PARTINGS[where] = _raising(where), STAGES, {}
PARTED = [
    (name, stage) for name, (_, stages, _) in PARTINGS.items() for stage in stages
]


class Outcome(NamedTuple):
    """How parting ended on one rank."""

    error: str
    seconds: float
    warnings: list[str]


def _outcome(run: Run, parting: Parting, place: int) -> Outcome:
    begun, error = time.perf_counter(), "no error"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            parting(run, place)
        except (RuntimeError, faults.Boom) as raised:
            error = str(raised) or type(raised).__name__
    return Outcome(
        error, time.perf_counter() - begun, [str(warning.message) for warning in seen]
    )


def _part(chosen: Sequence[tuple[str, int]]) -> Outcome | None:
    """Let pairs part, each in a way of its own."""
    pair, place = divmod(dist.get_rank(), 2)
    groups = [
        faults.short_group(TIMEOUT_S, [2 * i, 2 * i + 1]) for i in range(len(chosen))
    ]
    if pair >= len(chosen):
        return None
    name, stage = chosen[pair]
    parting, _, options = PARTINGS[name]
    with mock.patch.object(oracle, "rank", lambda: place):
        return _outcome(
            Run(stage, 2, buckets=SMALL, process_group=groups[pair], **options),
            parting,
            place,
        )


@functools.cache
def parted() -> dict[tuple[str, int], list[Outcome]]:
    """Let ranks part in every way."""
    batches = [PARTED[i : i + PAIRS] for i in range(0, len(PARTED), PAIRS)]
    done = ranks.run_cases(
        2 * PAIRS,
        {i: functools.partial(_part, batch) for i, batch in enumerate(batches)},
    )
    return {
        chosen: done[i][2 * pair : 2 * pair + 2]
        for i, batch in enumerate(batches)
        for pair, chosen in enumerate(batch)
    }


@pytest.mark.parametrize(
    ("name", "stage"), [case for case in PARTED if case[0] not in RAISING]
)
def test_ranks_that_part_are_told_of_which_collective(name: str, stage: int) -> None:
    """B3, B4, B21, B22: all ranks, and soon. What a rank abandons may cost it one more
    timeout per exchange."""
    for outcome in parted()[name, stage]:
        assert NAMED.match(outcome.error), outcome.error
        assert outcome.seconds < 4 * TIMEOUT_S + 2


@in_stages
@pytest.mark.parametrize("place", RAISING)
def test_an_exception_on_one_rank_is_not_hidden(stage: int, place: str) -> None:
    """B29: its own rank gets it as it is, also when what was under way cannot end; the
    others get a named error."""
    alone, raising = parted()[place, stage]
    assert NAMED.match(alone.error), alone.error
    assert raising.error == "Boom"
    assert max(alone.seconds, raising.seconds) < 4 * TIMEOUT_S + 2


@pytest.mark.parametrize(("name", "stage"), PARTED)
def test_ranks_that_part_are_told_once(name: str, stage: int) -> None:
    """No warning about the same or another error beside the one that was raised."""
    assert [outcome.warnings for outcome in parted()[name, stage]] == [[], []]


@pytest.mark.parametrize("name", ["a_tower_is_skipped", "a_tower_is_skipped_later"])
def test_the_unit_that_was_skipped_is_named(name: str) -> None:
    """B4."""
    assert "all_gather of 'tower." in parted()[name, 3][0].error


# ------------------------------------------------------------ any orders (B3, B17, B18)

SEEDS = range(10)


def _orders(seed: int) -> list[list[tuple[int, ...]]]:
    """Return random orders of blocks, by step and rank; every other seed has all blocks
    once, so ranks may agree."""
    generator = random.Random(seed)
    choices = (
        [(0, 1), (1, 0)]
        if seed % 2
        else [(0, 1), (1, 0), (), (0,), (1,), (0, 0, 1), (1, 1, 1)]
    )
    return [
        [(0, 1), (0, 1)],
        *([generator.choice(choices) for _ in range(2)] for _ in range(2)),
    ]


def _differently(
    seed: int, stage: int | None, group: Any, place: int = 0
) -> dict[str, Tensor] | str:
    """Return the parameters after all steps, or the error."""
    with mock.patch.object(oracle, "rank", lambda: place), warnings.catch_warnings():
        # Test_ranks_that_part_are_told_once looks at them.
        warnings.simplefilter("ignore")
        options = {} if stage is None else {"process_group": group}
        run = Run(stage, 2, buckets=SMALL, eps=1e-4, **options)
        try:
            for step, orders in enumerate(_orders(seed)):
                run.optimizer.zero_grad()
                run.backward(
                    step, lambda r, s=step, o=orders: run.loss(s, r, order=o[r])
                )
                run.step()
            return whole(run.model, run.optimizer)
        except RuntimeError as error:
            return str(error)


def _differently_in_pairs(first: int) -> dict[str, Tensor] | str:
    pair, place = divmod(dist.get_rank(), 2)
    groups = [faults.short_group(TIMEOUT_S, [2 * i, 2 * i + 1]) for i in range(PAIRS)]
    return _differently(first + pair, 3, groups[pair], place)


def _differently_here(seed: int, stage: int) -> dict[str, Tensor] | str:
    return _differently(seed, stage, None, rank())


@functools.cache
def in_any_order() -> ranks.Cases:
    """Train through blocks in random orders, in the stages where ranks may differ."""
    cases = {
        (d, s): functools.partial(_differently_here, d, s)
        for d in SEEDS
        for s in (1, 2)
    }
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_may_run_blocks_in_any_order(stage: int, seed: int) -> None:
    """B3: also none of them, or one three times; the result is that of the mean over
    the ranks."""
    expected = _differently(seed, None, None)
    for result in in_any_order()[seed, stage]:
        assert isinstance(result, dict), result
        assert apart(result, expected) == {}


@pytest.mark.long
def test_ranks_that_differ_in_stage_3_get_the_right_result_or_an_error() -> None:
    """B3: a wrong result is not among the outcomes, whatever they differ in."""
    firsts = range(0, len(SEEDS), PAIRS)
    done = ranks.run_cases(
        2 * PAIRS,
        {first: functools.partial(_differently_in_pairs, first) for first in firsts},
    )
    outcomes = Counter[str]()
    for first in firsts:
        for of_rank, result in enumerate(done[first]):
            outcomes[type(result).__name__] += 1
            if isinstance(result, str):
                assert NAMED.match(result), result
            else:
                assert (
                    apart(result, _differently(first + of_rank // 2, None, None)) == {}
                )
    assert len(outcomes) == 2  # the test saw both


# ------------------------------------------------------- a call that no hook sees (B11)


def _unregistered(stage: int) -> str:
    model = encoding()
    optimizer = sharded(model, stage, process_group=faults.short_group(TIMEOUT_S))
    try:
        model(models.batch(0)[0])
    except RuntimeError as error:
        return str(error)
    optimizer.step()
    return "no error"


def test_a_method_that_was_not_registered_is_named() -> None:
    """B11: the error says which function read what, and the remedy; it is an error in
    the first place."""
    cases = ranks.run_cases(
        2, {stage: functools.partial(_unregistered, stage) for stage in STAGES}
    )
    assert [cases[1], cases[2]] == [["no error"] * 2] * 2
    for message in cases[3]:
        assert "'blocks.0'" in message
        assert "linear" in message
        assert "register_forward_method" in message


# --------------------------------------------------------------------- exceptions (B29)


def _failing(
    place: str | None,
    stage: int | None,
    at: int,
    seed: int,
    buckets: zerokern.Buckets = SMALL,
) -> dict[str, Any]:
    """One step, an iteration that fails, two steps, without any call to repair."""
    with faults.hostile(seed, 3.0):
        run = Run(stage, at, buckets=buckets)
        _iteration(run, 0)
        found: dict[str, Any] = {}
        if place is not None:
            run.optimizer.zero_grad()
            before = None if run.torch else run.optimizer.memory()
            try:
                faults.PLACES[place](run, 1)
            except faults.Boom:
                found["boom"] = True
                if before is not None:
                    found["left"] = run.optimizer.memory().buffers - before.buffers
            run.optimizer.zero_grad()
            if before is not None:
                found["grown"] = run.optimizer.memory().total - before.total
        _iteration(run, 2)
        _rest(run)
        steps = 0 if run.torch else len(run.optimizer.comm_log())
        _iteration(run, 3)
        _rest(run)
        if not run.torch:
            found["last step"] = [call[:7] for call in run.optimizer.comm_log()[steps:]]
        return {**run.result(), **found}


FAILING_WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.long)]
at_failing_worlds = pytest.mark.parametrize("at", FAILING_WORLDS, ids="world{}".format)
of_places = pytest.mark.parametrize("place", faults.PLACES)


@functools.cache
def failed(at: int) -> ranks.Cases:
    """Raise at every place in every stage; and at none."""
    places = [None, *faults.PLACES]
    cases = {
        (p, s): functools.partial(_failing, p, s, at, i)
        for i, p in enumerate(places)
        for s in STAGES
    }
    return ranks.run_cases(at, cases)


@functools.cache
def failed_reference(place: str | None, at: int) -> dict[str, Any]:
    """Return what torch makes of it."""
    return _failing(place, None, at, 0)


@at_failing_worlds
@in_stages
@of_places
def test_training_goes_on_after_an_exception(at: int, stage: int, place: str) -> None:
    """B29: the user's own exception comes out, and the next steps are what torch makes
    of them."""
    expected = failed_reference(place, at)
    for result in failed(at)[place, stage]:
        assert result["boom"] and expected["boom"]
        assert apart(result["params"], expected["params"], REDUCED_SUMS) == {}
        assert apart(result["seen"], expected["seen"]) == {}


@at_failing_worlds
@in_stages
@of_places
def test_an_exception_leaves_no_memory_behind(at: int, stage: int, place: str) -> None:
    """B29, LIVE: at once, before anything else is called; and gradients are gone after
    zero_grad."""
    assert [
        (result["left"], result["grown"]) for result in failed(at)[place, stage]
    ] == [(0, 0)] * at


@at_failing_worlds
@in_stages
@of_places
def test_a_step_after_an_exception_is_like_any_other(
    at: int, stage: int, place: str
) -> None:
    """B29: the same collectives in the same order, so overlap is not lost either.

    Stage 1 counts how many backwards a step has; a failed iteration that had one more
    changes the phase of the next.
    """
    for result, undisturbed in zip(
        failed(at)[place, stage], failed(at)[None, stage], strict=True
    ):
        ours, theirs = (
            [call[: 6 if stage == 1 else 7] for call in r["last step"]]
            for r in (result, undisturbed)
        )
        assert ours == theirs


OTHER_WAYS = {
    "gather in forward": zerokern.Buckets(bytes=6000, gather_in_forward=True),
    "update in backward": zerokern.Buckets(bytes=6000, update_in_backward=True),
    "no overlap": zerokern.Buckets(bytes=6000, overlap=False),
}
BEFORE_BACKWARD = [
    place for place in faults.PLACES if "forward" in place and "backward" not in place
]
OTHERWISE = [
    (way, stage, place)
    for way in OTHER_WAYS
    for stage in STAGES
    for place in faults.PLACES
    if (way != "gather in forward" or stage < 3)
    # Two backwards outside of no_sync before a step are refused, see below.
    and (way != "update in backward" or place != "backward_after_another")
]


@functools.cache
def failed_otherwise() -> ranks.Cases:
    """Raise at every place, in every stage and way."""
    return ranks.run_cases(
        2,
        {
            (w, s, p): functools.partial(_failing, p, s, 2, i, OTHER_WAYS[w])
            for i, (w, s, p) in enumerate(OTHERWISE)
        },
    )


@pytest.mark.long
@pytest.mark.parametrize(("way", "stage", "place"), OTHERWISE)
def test_training_goes_on_after_an_exception_in_any_way(
    way: str, stage: int, place: str
) -> None:
    """B29. What was updated in backward before the exception stays so, as it would in
    torch."""
    first, second = failed_otherwise()[way, stage, place]
    assert differing(first["params"], second["params"]) == []
    for result in (first, second):
        assert result["boom"]
        assert (result["left"], result["grown"]) == (0, 0)
        assert all(value.isfinite().all() for value in result["params"].values())
        if way != "update in backward" or place in BEFORE_BACKWARD:
            assert apart(result["params"], failed_reference(place, 2)["params"]) == {}


@in_stages
def test_a_gradient_after_its_update_is_refused(stage: int) -> None:
    run = Run(stage, 1, buckets=OTHER_WAYS["update in backward"])
    _iteration(run, 0)
    run.optimizer.zero_grad()
    run.backward(1)
    with pytest.raises(RuntimeError, match=r"arrived after its update.*no_sync"):
        run.backward(2)


# --------------------------------------------- another order of sets on each rank (B27)

HASHED = """
import conftest, sys
import test_faults_graphs
test_faults_graphs.hashed_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


def hashed_rank(of_rank: int, at: int, folder: str) -> None:
    """Train 20 steps in every stage, with buckets of unequal size, and save what came
    of it."""
    store = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=of_rank, world_size=at)
    results = {}
    for stage in STAGES:
        run = Run(stage, at, buckets=zerokern.Buckets(bytes=3000))
        for step in range(20):
            use = ("both", "left", "right")[step % 3]
            run.optimizer.zero_grad()
            run.backward(step, use=use)
            run.step()
        results[stage] = run.result() | {"hash": hash("a")}
    torch.save(results, Path(folder) / f"{of_rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Any]]]:
    """Two new interpreters, each with a hash seed of its own."""
    folder, tests = tmp_path_factory.mktemp("hashed"), Path(__file__).parent
    path = os.pathsep.join([str(tests), str(tests.parent)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", HASHED, str(r), "2", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": str(1 + r), "PYTHONPATH": path},
        )
        for r in range(2)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(2)]


@in_stages
def test_the_order_of_sets_does_not_matter(
    hashed: list[dict[int, dict[str, Any]]], stage: int
) -> None:
    """B27."""
    results = [of_rank[stage] for of_rank in hashed]
    assert results[0]["hash"] != results[1]["hash"]
    assert faults.same_on_all_ranks([result["log"] for result in results])
    assert (
        len(
            {call.elements for call in results[0]["log"] if call.op == "reduce_scatter"}
        )
        > 1
    )
    assert differing(results[0]["params"], results[1]["params"]) == []
    run = Run(None, 2)
    for step in range(20):
        run.optimizer.zero_grad()
        run.backward(step, use=("both", "left", "right")[step % 3])
        run.step()
    expected = run.result()["params"]
    assert (
        max(
            distance(results[0]["params"][name], value)
            for name, value in expected.items()
        )
        < 5 * REDUCED_SUMS
    )
