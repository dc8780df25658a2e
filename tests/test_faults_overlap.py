"""Overlap and the life of buffers: a slow, disorderly wire and poisoned memory change
no bit; what overlaps does so."""

from __future__ import annotations

import functools
import math
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import faults
import models
import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import STAGES, Run, apart, differing, distance, rank, sharded, whole, world
from test_gradients import SCRIPTS
from torch import Tensor, nn

import zerokern
from zerokern.groups import Group, Groups
from zerokern.transport import Pending, Transport

WORLDS = (2, 3)
TWO_PARAMETERS = zerokern.Buckets(bytes=2400)
"""A block's weight and its bias: there are more buckets than may travel at a time."""

at_worlds = pytest.mark.parametrize("at", WORLDS, ids="world{}".format)
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)

# ------------------------------------------------------------- any script on a bad wire


def twenty_norms(run: Run) -> None:
    """A3: the norm of every step is looked at."""
    for step in range(20):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.5)
        run.step()


def five_steps(run: Run) -> None:
    """A1."""
    for step in range(5):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


def accumulation_of_three(run: Run) -> None:
    """A2: buckets are used again at once, in every way to accumulate."""
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(3):
            with run.no_sync() if step == 1 and micro < 2 else nullcontext():
                run.backward(3 * step + micro)
        run.step()


def a_block_twice_in_a_row(run: Run) -> None:
    """A16: called again while it may be on its way back to shards."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 0, 1, 1, 1))
        run.step()


def evaluation_between_all(run: Run) -> None:
    """A14: a forward without gradients before, between and after everything else."""
    run.evaluate(50)
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        run.evaluate(51)
        run.step()
        run.evaluate(52)


def a_unit_is_gathered_in_vain(run: Run) -> None:
    """A16: the unit that is expected next does not come, and its gather is still under
    way."""
    for step, order in enumerate(((0, 1), (0,), (0, 1), (), (1, 0), (1,))):
        run.optimizer.zero_grad()
        run.backward(step, order=order)
        run.step()


OWN: dict[str, Callable[[Run], None]] = {
    function.__name__: function
    for function in (
        five_steps,
        twenty_norms,
        accumulation_of_three,
        a_block_twice_in_a_row,
        a_unit_is_gathered_in_vain,
        evaluation_between_all,
    )
}
CHOSEN = ["number_of_backwards_changes", "checkpoint_reentrant_used_twice"]
"""Scripts of test_gradients that the default run takes; the others are marked slow."""
LONGEST_MS = {"five_steps": 20.0}
"""How late a collective may be; 3 ms where the script does not say: later than most of
what is computed meanwhile."""
BYTES = dict.fromkeys(
    ("five_steps", "a_unit_is_gathered_in_vain"), TWO_PARAMETERS.bytes
)
"""Of a bucket; 5000 where the script does not say, which still makes more than may
travel at a time."""


def play(
    name: str,
    stage: int | None,
    at: int,
    *,
    seed: int | None = None,
    under_way: int = 2,
    as_on_a_gpu: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Any]:
    """Run one script, with a seed on a bad wire."""
    function, given = (OWN[name], {}) if name in OWN else SCRIPTS[name]
    buckets = zerokern.Buckets(bytes=BYTES.get(name, 5000), **options)
    bad = (
        nullcontext()
        if seed is None
        else faults.hostile(seed, LONGEST_MS.get(name, 3.0))
    )
    with bad as wire, faults.buckets_under_way(under_way):
        run = Run(
            stage,
            at,
            build=lambda: models.forked().to(dtype),
            **{"buckets": buckets, **given},
        )
        for bucket in run.optimizer.coordinator.gradients if as_on_a_gpu else []:
            bucket.packs_at_once = True
        function(run)
        return {**run.result(), "carried": wire.carried if wire else 0}


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one bucket under way": {"under_way": 1},
    "all buckets under way": {"under_way": 100},
    "packed at once": {"as_on_a_gpu": True},
    "bf16": {"dtype": torch.bfloat16},
    "update in backward": {"update_in_backward": True},
    "gather in forward": {"gather_in_forward": True},
    "both": {"update_in_backward": True, "gather_in_forward": True},
}


def _meaningful(name: str, stage: int, way: str) -> bool:
    if way == "as it is":
        return True
    if way == "gather in forward":
        return stage < 3 and name in ("evaluation_between_all", "accumulation_of_three")
    if way in ("update in backward", "both"):
        return (stage < 3 or way != "both") and name == "a_unit_is_gathered_in_vain"
    return stage > 1 and name == "accumulation_of_three"


IN_WORLD_3 = ("five_steps", "accumulation_of_three", "a_block_twice_in_a_row")
RUNS = {
    2: (
        [
            (name, stage, way)
            for name in OWN
            for stage in STAGES
            for way in WAYS
            if _meaningful(name, stage, way)
        ]
        + [(name, stage, "as it is") for name in CHOSEN for stage in STAGES]
    ),
    3: [
        (name, stage, "as it is")
        for name in OWN
        for stage in STAGES
        if name in IN_WORLD_3
    ],
}
"""By world."""
MORE_RUNS = {
    2: [
        (name, stage, "as it is")
        for name in SCRIPTS
        if name not in CHOSEN
        for stage in STAGES
    ],
    3: [
        *(run for run in RUNS[2] if run not in RUNS[3] and run[0] in OWN),
        *(
            (name, stage, "as it is")
            for name in SCRIPTS
            if name not in CHOSEN
            for stage in STAGES
        ),
    ],
}
of_runs = pytest.mark.parametrize(
    ("at", "name", "stage", "way"), [(at, *run) for at in RUNS for run in RUNS[at]]
)


def _good(name: str, stage: int, way: str) -> tuple[str, int, str, str]:
    """Return what a run on a bad wire is compared with. When things happen must not
    matter, so ways have one answer."""
    return name, stage, "bf16" if way == "bf16" else "as it is", "good"


def _cases(runs: list[tuple[str, int, str]], at: int) -> dict[Any, Callable[[], Any]]:
    cases: dict[Any, Callable[[], Any]] = {}
    for number, (name, stage, way) in enumerate(runs):
        cases[name, stage, way, "bad"] = functools.partial(
            play, name, stage, at, seed=number, **WAYS[way]
        )
        good = _good(name, stage, way)
        cases[good] = functools.partial(play, name, stage, at, **WAYS[good[2]])
    return cases


@functools.cache
def played(at: int) -> ranks.Cases:
    """The chosen runs, on a bad and on a good wire."""
    return ranks.run_cases(at, _cases(RUNS[at], at))


@functools.cache
def all_played(at: int) -> ranks.Cases:
    """All other scripts that there are."""
    return ranks.run_cases(at, _cases(MORE_RUNS[at], at))


@functools.cache
def reference(name: str, ranks_played: int) -> dict[str, Any]:
    """Return what torch's AdamW makes of a script."""
    return play(name, None, ranks_played)


def _assert_same(cases: ranks.Cases, name: str, stage: int, way: str) -> None:
    for ours, theirs in zip(
        cases[name, stage, way, "bad"], cases[_good(name, stage, way)], strict=True
    ):
        assert ours["carried"] > 0
        assert differing(ours["params"], theirs["params"]) == []
        assert differing(ours["state"], theirs["state"]) == []
        assert differing(ours["seen"], theirs["seen"]) == []
        assert not any(ours["buffers"])
        if way in ("as it is", "bf16"):
            assert [call[:7] for call in ours["log"]] == [
                call[:7] for call in theirs["log"]
            ]


@of_runs
def test_a_bad_wire_changes_no_bit(at: int, name: str, stage: int, way: str) -> None:
    """A1, A2, A12, A16: no buffer is read before its data are there, nor reused or
    given back under way."""
    _assert_same(played(at), name, stage, way)


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "name", "stage", "way"),
    [(at, *run) for at in MORE_RUNS for run in MORE_RUNS[at]],
)
def test_a_bad_wire_changes_no_bit_of_any_script(
    at: int, name: str, stage: int, way: str
) -> None:
    _assert_same(all_played(at), name, stage, way)


@pytest.mark.parametrize(
    ("at", "name", "stage", "way"),
    [
        (at, *run)
        for at in RUNS
        for run in RUNS[at]
        if run[0] in OWN and run[2] != "bf16"
    ],
)
def test_a_bad_wire_trains_like_torch(at: int, name: str, stage: int, way: str) -> None:
    """A14, A16: also the losses that an evaluation between two steps sees."""
    expected = reference(name, at)
    for result in played(at)[name, stage, way, "bad"]:
        assert apart(result["params"], expected["params"]) == {}
        assert apart(result["seen"], expected["seen"]) == {}


@in_stages
def test_every_norm_is_that_of_the_reference(stage: int) -> None:
    """A3: 20 norms, none of them NaN."""
    expected = reference("twenty_norms", 2)["seen"]
    for result in played(2)["twenty_norms", stage, "as it is", "bad"]:
        assert len(result["seen"]) == 20
        for step, norm in result["seen"].items():
            # Parameters move apart by the last bits of each step, and norms with them.
            assert distance(norm, expected[step]) <= (1e-6 if int(step) < 3 else 1e-5)


@of_runs
def test_ranks_issue_the_same_collectives_on_a_bad_wire(
    at: int, name: str, stage: int, way: str
) -> None:
    assert faults.same_on_all_ranks(
        [result["log"] for result in played(at)[name, stage, way, "bad"]]
    )


# -------------------------------------------------------------- the harness sees faults


def _reduce_before_the_wait() -> None:
    buffer, received = torch.ones(2 * world()), torch.empty(world() - 1, 2)
    with faults.lag(0):
        work = faults.send(buffer, received)
        early = received.clone()
        work.wait()
        assert early.isnan().all()
        assert (received == 1).all()


def _write_under_way(late: bool) -> None:
    buffer, received = torch.ones(2 * world()), torch.empty(world() - 1, 2)
    with faults.lag(0, 20.0, shortest_ms=10.0) as wire:
        work = faults.send(buffer, received)
        if late:
            wire.flights[0].thread.join()  # sent, but nobody has waited
        buffer.zero_()
        work.wait()


def _give_back_under_way() -> None:
    model = models.toy()
    optimizer = sharded(model, 2)
    scratch = optimizer.coordinator.transport
    with faults.lag(0):
        buffer = scratch.take(2 * world(), torch.float32)
        work = faults.send(buffer, torch.empty(world() - 1, 2))
        try:
            scratch.give(buffer)
        finally:
            work.wait()


def _never_wait() -> None:
    with faults.lag(0):
        faults.send(torch.ones(2 * world()), torch.empty(world() - 1, 2))


SEEN: dict[str, tuple[Callable[[], None], str | None]] = {
    "output read early": (_reduce_before_the_wait, None),
    "input written before it was sent": (
        functools.partial(_write_under_way, False),
        "written to under way",
    ),
    "input written after it was sent": (
        functools.partial(_write_under_way, True),
        "written to under way",
    ),
    "buffer given back": (
        _give_back_under_way,
        "given back while reduce_scatter of 'x' used it",
    ),
    "never waited for": (_never_wait, "never waited for"),
}


def _message(function: Callable[[], None]) -> str | None:
    try:
        function()
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("fault", SEEN)
def test_the_harness_sees_faults(fault: str) -> None:
    """A12: each wrong use of a buffer under way is an error on the bad wire."""
    expected = SEEN[fault][1]
    for message in small()["seen", fault]:
        assert (
            (message is None)
            if expected is None
            else (message is not None and expected in message)
        )


# ---------------------------------------------------------------------- handles (A8)


def _eight_at_a_time(rounds: int, lag_ms: float | None) -> int:
    """Return in how many rounds a gather was not complete when its own handle had been
    waited on."""
    transport = Transport(Groups.over(None), torch.device("cpu"))
    group = transport.groups.shards
    sizes = [3, 1, 1000, 64, 7, 20_000, 5, 300]
    wrong = 0
    with nullcontext() if lag_ms is None else faults.lag(1, lag_ms):
        for index in range(rounds):
            buffers = [torch.full((group.size * size,), math.nan) for size in sizes]
            works = []
            for number, buffer in enumerate(buffers):
                chunks = buffer.view(group.size, -1)
                own = chunks[group.rank]
                own.fill_(100 * index + 10 * number + group.rank)
                pairs = [(own, chunks[rank], rank) for rank in group.others]
                title = f"unit {number}"
                works.append(
                    transport.start(
                        "all_gather", title, "step", pairs, (buffer,), group
                    )
                )
            order = (
                list(range(8))
                if index % 3 == 0
                else [3, 1, 7, 0, 2, 6, 5, 4]
                if index % 3 == 1
                else [7]
            )
            for number in order:
                works[number].wait()
                expected = 100 * index + 10 * number + torch.arange(group.size).float()
                wrong += not torch.equal(
                    buffers[number], expected.repeat_interleave(sizes[number])
                )
            for number in set(range(8)) - set(order):
                works[number].wait()
    return wrong


def test_a_handle_waits_for_all_of_its_own_collective() -> None:
    """A8: gloo finishes messages out of order."""
    rounds = {"good": (200, None), "bad": (20, 3.0)}
    done = ranks.run_cases(
        3,
        {
            name: functools.partial(_eight_at_a_time, *given)
            for name, given in rounds.items()
        },
    )
    assert [done["good"], done["bad"]] == [[0, 0, 0], [0, 0, 0]]


# ---------------------------------------------------------------- bucket sizes (A7, J6)

SIZES = {"one parameter": 1, "1 KiB": 2**10, "64 KiB": 2**16, "whole model": 2**30}
SIZE_CASES = [
    *((1, size) for size in SIZES),
    (2, "one parameter"),
    (2, "1 KiB"),
    (3, "one parameter"),
]


def _of_size(stage: int, size: str) -> dict[str, Any]:
    build = functools.partial(models.gpt, width=24, layers=1, vocabulary=512)
    run = Run(stage, world(), build=build, buckets=zerokern.Buckets(bytes=SIZES[size]))
    norms = []
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        norms.append(run.optimizer.clip_grad_norm_(1e9).clone())
        run.step()
    return {
        **run.result(),
        "norms": torch.stack(norms),
        "buckets": len(run.optimizer.coordinator.gradients),
    }


@functools.cache
def of_sizes(at: int) -> ranks.Cases:
    """Train with buckets of every size."""
    return ranks.run_cases(
        at, {case: functools.partial(_of_size, *case) for case in SIZE_CASES}
    )


@pytest.mark.parametrize("at", (2, 3, 4), ids="world{}".format)
@pytest.mark.parametrize(("stage", "size"), SIZE_CASES)
def test_bucket_size_changes_no_bit(at: int, stage: int, size: str) -> None:
    """A7, J6: sums have one order, whatever lies where."""
    base = of_sizes(at)[1, "whole model"]
    for ours, theirs in zip(of_sizes(at)[stage, size], base, strict=True):
        assert differing(ours["params"], theirs["params"]) == []
        assert differing(ours["state"], theirs["state"]) == []
        assert distance(ours["norms"], theirs["norms"]) <= 1e-6


def test_bucket_sizes_differ() -> None:
    counts = [of_sizes(2)[1, size][0]["buckets"] for size in SIZES]
    assert counts == sorted(counts, reverse=True)
    assert (len(set(counts)), counts[-1]) == (4, 1)


# --------------------------------------------- who makes a gradient, and when (A4, A11)


class LateTwin(torch.autograd.Function):
    """x * scale, whose gradient is filled in by another thread, late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        for_x, for_scale = (
            torch.full_like(x, torch.nan),
            torch.full_like(scale, torch.nan),
        )

        def fill() -> None:
            with torch.no_grad():
                time.sleep(0.005)
                for_x.copy_(grad * scale)
                for_scale.copy_((grad * x).sum_to_size(scale.shape))

        producer = threading.Thread(target=fill)
        producer.start()
        producer.join()
        return for_x, for_scale


class Scaled(nn.Module):
    """Linear, times a scale."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.linear, self.scale, self.late = (
            nn.Linear(6, 6),
            nn.Parameter(torch.full((6,), 0.7)),
            late,
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return LateTwin.apply(y, self.scale) if self.late else y * self.scale


class Stack(nn.Module):
    """Units one after the other."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList(Scaled(late) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x


def _produced(stage: int, late: bool, thread: bool) -> dict[str, Tensor]:
    """Train; gradients come late from a thread, and backward itself runs in one that
    was just started."""
    with faults.hostile(stage, 5.0):
        torch.manual_seed(0)
        model = Stack(late)
        optimizer = sharded(model, stage, lr=1e-2, buckets=zerokern.Buckets(bytes=64))
        for step in range(3):
            optimizer.zero_grad()
            loss = (
                model(
                    torch.randn(
                        4, 6, generator=torch.Generator().manual_seed(7 * step + rank())
                    )
                )
                .square()
                .sum()
            )
            if thread:
                backward = threading.Thread(target=loss.backward)
                backward.start()
                backward.join()
            else:
                loss.backward()
            optimizer.step()
        return whole(model, optimizer)


PRODUCERS = {
    "plain": (False, False),
    "late": (True, False),
    "another thread": (False, True),
    "both": (True, True),
}


@in_stages
@pytest.mark.parametrize("producer", [name for name in PRODUCERS if name != "plain"])
def test_a_reduction_waits_for_who_makes_the_gradient(
    stage: int, producer: str
) -> None:
    """A4."""
    for ours, plain in zip(
        small()["produced", producer, stage],
        small()["produced", "plain", stage],
        strict=True,
    ):
        assert differing(ours, plain) == []


HOOKS = (
    "before the optimizer",
    "after the optimizer",
    "accumulated, before the optimizer",
)


def _sent(stage: int, when: str | None) -> list[tuple[Tensor, list[Tensor]]]:
    """Return what was sent of each bucket, and the chunks of it. The hook halves every
    gradient, by a late number."""

    def half() -> Tensor:
        time.sleep(0.001)
        return torch.tensor(0.5)

    def in_place(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(half())

    model = models.forked()
    if when == HOOKS[0]:
        _ = [p.register_hook(lambda grad: grad * half()) for p in model.parameters()]
    if when == HOOKS[2]:
        _ = [p.register_post_accumulate_grad_hook(in_place) for p in model.parameters()]
    optimizer = sharded(model, stage, buckets=TWO_PARAMETERS)
    if when == HOOKS[1]:
        _ = [p.register_hook(lambda grad: grad * half()) for p in model.parameters()]
    sent: list[Any] = []
    start = Transport.start

    def spy(
        transport: Transport,
        op: str,
        title: str,
        phase: str,
        pairs: Any,
        buffers: Sequence[Tensor],
        group: Group,
    ) -> Pending:
        if op == "reduce_scatter":
            sent.append((title, buffers[0].clone()))
        return start(transport, op, title, phase, pairs, buffers, group)

    with mock.patch.object(Transport, "start", spy):
        tokens, targets = (models.share(t, rank(), world()) for t in models.batch(0))
        models.loss_of(model, tokens, targets).backward()
        optimizer.step()
    return sent


@in_stages
@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_sent_has_passed_the_users_hooks(stage: int, hook: str) -> None:
    """A11."""
    for scaled, plain in zip(
        small()["sent", hook, stage], small()["sent", None, stage], strict=True
    ):
        assert [unit for unit, _ in scaled] == [unit for unit, _ in plain] != []
        for (_, ours), (_, theirs) in zip(scaled, plain, strict=True):
            assert theirs.any()
            assert torch.equal(ours, 0.5 * theirs)


# ----------------------------------------------------------- overlap is there (A6, A17)

BLOCKS = 4
BLOCK_BYTES = 4 * (2 * 17 * 33 + 33 + 17 + 34)
"""A bucket of this size ends in another block than the one before it."""


class Slept(models.Block):
    """A block that computes for a while, in forward and in backward."""

    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: time.sleep(self.seconds))
        return y


def _slow_model(seconds: float) -> nn.Module:
    torch.manual_seed(0)
    model = models.Toy(0)
    model.blocks.extend(Slept() for _ in range(BLOCKS))
    for block in model.blocks:
        block.seconds = seconds
    return model


def _events(stage: int, overlap: bool) -> dict[str, Any]:
    """Return what happened in the third iteration, in order."""
    with faults.hostile(stage, 5.0):
        model = models.toy(blocks=BLOCKS)
        optimizer = sharded(
            model, stage, buckets=zerokern.Buckets(bytes=BLOCK_BYTES, overlap=overlap)
        )
        blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
        for step in range(3):
            optimizer.zero_grad()
            optimizer.comm_log(clear=True)
            with faults.recorded(optimizer, blocks) as events:
                models.loss_of(model, *models.batch(step)).backward()
                optimizer.step()
        place = {
            id(p): i for i, block in enumerate(model.blocks) for p in block.parameters()
        }
        place |= {id(p): BLOCKS for p in model.head.parameters()} | {
            id(model.embedding.weight): -1
        }
        ends_in = {
            b.transfer.title: min(place[id(slot.param)] for slot in b.slots)
            for b in optimizer.coordinator.gradients
        }
        faults.assert_at_rest(optimizer)
        return {"events": events, "ends_in": ends_in, "log": optimizer.comm_log()}


def _timed(stage: int, seconds: float) -> tuple[float, float]:
    """Return how long an iteration takes, and the sum of what it computes and sends."""
    longest = 1000 * seconds
    model = _slow_model(seconds)
    optimizer = sharded(model, stage, buckets=zerokern.Buckets(bytes=BLOCK_BYTES))
    times = []
    with faults.lag(0, longest, shortest_ms=longest) as wire:
        for step in range(4):
            carried = wire.carried
            begun = time.perf_counter()
            optimizer.zero_grad()
            models.loss_of(model, *models.batch(step)).backward()
            optimizer.step()
            times.append(time.perf_counter() - begun)
        sends = wire.carried - carried
    return min(times[1:]), seconds * (2 * BLOCKS + sends)


@functools.cache
def happened(at: int) -> ranks.Cases:
    """Record every stage with and without overlap."""
    cases: dict[Any, Callable[[], Any]] = {
        (s, overlap): functools.partial(_events, s, overlap)
        for s in STAGES
        for overlap in (True, False)
    }
    if at == 2:
        cases |= {("timed", s): functools.partial(_timed, s, 0.03) for s in STAGES}
    return ranks.run_cases(at, cases)


def _order(result: dict[str, Any]) -> dict[str, list[int]]:
    """Return at which places each event happened."""
    places: dict[str, list[int]] = {}
    for place, event in enumerate(result["events"]):
        places.setdefault(event, []).append(place)
    return places


@at_worlds
@in_stages
def test_a_reduction_is_on_its_way_while_the_next_block_computes(
    at: int, stage: int
) -> None:
    """A17: issued before the next backward has run, and not waited for before that."""
    for result in happened(at)[stage, True]:
        order = _order(result)
        early = {
            bucket: block
            for bucket, block in result["ends_in"].items()
            if 1 <= block < BLOCKS
        }
        assert len(early) >= BLOCKS - 2
        for bucket, block in early.items():
            next_begins, next_ends = (
                order[f"{verb} backward blocks.{block - 1}"][0]
                for verb in ("begin", "end")
            )
            assert order[f"issue reduce_scatter of {bucket!r}"][0] < next_ends
            assert order[f"wait reduce_scatter of {bucket!r}"][0] > next_begins


@at_worlds
@in_stages
def test_without_overlap_reductions_come_after_backward(at: int, stage: int) -> None:
    """What the test above would see if nothing overlapped."""
    for result in happened(at)[stage, False]:
        order = _order(result)
        last = max(order[f"end backward blocks.{block}"][0] for block in range(BLOCKS))
        assert (
            min(
                places[0]
                for event, places in order.items()
                if event.startswith("issue reduce")
            )
            > last
        )


@at_worlds
def test_a_gather_is_on_its_way_while_the_unit_before_it_computes(at: int) -> None:
    """A17, in forward and in backward."""
    for result in happened(at)[3, True]:
        order = _order(result)
        for block in range(1, BLOCKS):
            issue, wait = (
                order[f"{verb} all_gather of 'blocks.{block}'"][0]
                for verb in ("issue", "wait")
            )
            assert issue < order[f"end forward blocks.{block - 1}"][0] < wait
            before = BLOCKS - 1 - block
            issue, wait = (
                order[f"{verb} all_gather of 'blocks.{before}'"][1]
                for verb in ("issue", "wait")
            )
            assert issue < order[f"end backward blocks.{before + 1}"][0]
            assert wait > order[f"begin backward blocks.{before + 1}"][0]
            assert len(order[f"issue all_gather of 'blocks.{block}'"]) == 2


@at_worlds
def test_without_overlap_a_unit_is_gathered_when_it_is_needed(at: int) -> None:
    for result in happened(at)[3, False]:
        order = _order(result)
        for block in range(1, BLOCKS):
            assert (
                order[f"issue all_gather of 'blocks.{block}'"][0]
                > order[f"end forward blocks.{block - 1}"][0]
            )


@at_worlds
@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
def test_a_bucket_is_updated_while_the_one_before_it_is_gathered(
    at: int, stage: int
) -> None:
    """A17: no gather of a step is waited for before the last update."""
    for result in happened(at)[stage, True]:
        order = _order(result)
        updates = sorted(
            places[0] for event, places in order.items() if event.startswith("update")
        )
        issues = sorted(
            places[0]
            for event, places in order.items()
            if event.startswith("issue all_gather of 'bucket")
        )
        waits = sorted(
            places[0]
            for event, places in order.items()
            if event.startswith("wait all_gather of 'bucket")
        )
        assert len(updates) == len(issues) == len(waits) > BLOCKS
        for update, issue, following in zip(updates, issues, updates[1:], strict=False):
            assert update < issue < following
        assert min(waits) > max(updates)


@pytest.mark.long  # a clock: the order of issue and completion is tested above
@in_stages
def test_an_iteration_takes_less_than_its_parts(stage: int) -> None:
    """A17: at most 0.7 of what computing and sending take one after the other."""
    for took, parts in happened(2)["timed", stage]:
        assert took <= 0.7 * parts


@at_worlds
@in_stages
def test_overlap_changes_no_volume(at: int, stage: int) -> None:
    """A6: the same collectives, if in another order."""
    for on, off in zip(
        happened(at)[stage, True], happened(at)[stage, False], strict=True
    ):
        assert Counter(call[:6] for call in on["log"]) == Counter(
            call[:6] for call in off["log"]
        )


# --------------------------------------------------------------- traps of back ends (J)

FORBIDDEN = [
    *(
        "all_reduce",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "_reduce_scatter_base",
        "all_gather",
    ),
    *(
        "all_gather_into_tensor",
        "_all_gather_base",
        "all_to_all_single",
        "all_to_all",
        "all_reduce_coalesced",
    ),
    *("all_gather_coalesced", "_coalescing_manager", "barrier"),
]


def _train(
    stage: int, *, buckets: zerokern.Buckets = TWO_PARAMETERS, **options: Any
) -> tuple[nn.Module, Any]:
    model = models.forked()
    optimizer = sharded(model, stage, buckets=buckets, lr=1e-2, **options)
    for step in range(3):
        optimizer.zero_grad()
        tokens, targets = (models.share(t, rank(), world()) for t in models.batch(step))
        models.loss_of(model, tokens, targets).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return model, optimizer


def _without_traps(stage: int) -> tuple[float, list[str]]:
    """Train with every trap armed; return the sum of ones over all ranks, and the
    warnings."""

    def trap(*_: Any, **__: Any) -> None:
        raise AssertionError("the back end's own reduction or coalescing was used")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with mock.patch.multiple(
            dist, **{name: trap for name in FORBIDDEN if hasattr(dist, name)}
        ):
            _, optimizer = _train(stage)
            optimizer.full_state_dict()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item(), [str(warning.message) for warning in seen]


@functools.cache
def small() -> ranks.Cases:
    """What two ranks do in a moment, on one group."""
    cases: dict[Any, Callable[[], Any]] = {
        ("seen", name): functools.partial(_message, f) for name, (f, _) in SEEN.items()
    }
    for stage in STAGES:
        cases |= {
            ("produced", n, stage): functools.partial(_produced, stage, *given)
            for n, given in PRODUCERS.items()
        }
        cases |= {
            ("sent", hook, stage): functools.partial(_sent, stage, hook)
            for hook in (None, *HOOKS)
        }
        cases["trapped", stage] = functools.partial(_without_traps, stage)
    return ranks.run_cases(2, cases)


@in_stages
def test_no_trap_of_gloo_is_stepped_into(stage: int) -> None:
    """J1, J2, J5: no coalescing, no reduction by the back end; the group works on
    afterwards."""
    assert [ones for ones, _ in small()["trapped", stage]] == [2.0] * 2


@in_stages
def test_nothing_is_deprecated(stage: int) -> None:
    """J7."""
    assert [seen for _, seen in small()["trapped", stage]] == [[]] * 2


def _alone(stage: int) -> dict[str, Any]:
    model, optimizer = _train(stage)
    peak = optimizer.coordinator.transport.peak_bytes
    return {
        "params": whole(model, optimizer),
        "log": optimizer.comm_log(),
        "peak": peak,
    }


@in_stages
@pytest.mark.parametrize("group", [False, True], ids=["no group", "group of one"])
def test_a_world_of_one_is_plain_adamw(stage: int, group: bool) -> None:
    """J8: nothing is sent, nor copied into buffers; the result is AdamW's."""
    result = ranks.run(1, _alone, stage)[0] if group else _alone(stage)
    model = models.forked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        models.loss_of(model, *models.batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert (result["log"], result["peak"]) == ((), 0)
    assert apart(result["params"], dict(model.named_parameters()), 1e-6) == {}
