"""A slow, disorderly wire and poisoned memory change no bit of any script: no buffer is
read before its data are there, nor reused or given back while they travel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import ranks
import torch
from at_rest import same_on_all_ranks
from marks import in_stages
from oracle import STAGES, Run, apart, differing, distance
from scripts import SCRIPTS
from wire import TWO_PARAMETERS, buckets_under_way, hostile

import zerokern

# ------------------------------------------------------------------------------ scripts


def twenty_norms(run: Run) -> None:
    """The norm of every step is looked at."""
    for step in range(20):
        run.optimizer.zero_grad()
        run.backward(step)
        run.clip(0.5)
        run.step()


def five_steps(run: Run) -> None:
    for step in range(5):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()


def accumulation_of_three(run: Run) -> None:
    """Buckets are used again at once, in every way to accumulate."""
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(3):
            with run.no_sync() if step == 1 and micro < 2 else nullcontext():
                run.backward(3 * step + micro)
        run.step()


def a_block_twice_in_a_row(run: Run) -> None:
    """Called again while it may be on its way back to shards."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 0, 1, 1, 1))
        run.step()


def evaluation_between_all(run: Run) -> None:
    """A forward without gradients before, between and after everything else."""
    run.evaluate(50)
    for step in range(2):
        run.optimizer.zero_grad()
        run.backward(step)
        run.evaluate(51)
        run.step()
        run.evaluate(52)


def a_unit_is_gathered_in_vain(run: Run) -> None:
    """The unit that is expected next does not come, and its gather is still under
    way."""
    orders = [0, 1], [0], [0, 1], [], [1, 0], [1]
    for step, order in enumerate(orders):
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
pytestmark = pytest.mark.slow

CHOSEN = ["number_of_backwards_changes", "checkpoint_reentrant_used_twice"]
"""Of all users' loops, those that the default run takes; the others take long."""
LONGEST_MS = {"five_steps": 20.0}
"""How late a collective may be; 3 ms where the script does not say: later than most of
what is computed meanwhile."""
BYTES = dict.fromkeys(
    ("five_steps", "a_unit_is_gathered_in_vain"), TWO_PARAMETERS.bytes
)
"""Of a bucket; 5000 where the script does not say, which still makes more than may
travel at a time."""


def play_on_wire(
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
    function, given = OWN.get(name), {}
    if function is None:
        function, given = SCRIPTS[name].loop, SCRIPTS[name].options
    buckets = zerokern.Buckets(bytes=BYTES.get(name, 5000), **options)
    late = LONGEST_MS.get(name, 3.0)
    bad = nullcontext() if seed is None else hostile(seed, late)
    with bad as wire, buckets_under_way(under_way):
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
    """Return whether a way changes anything of a script in a stage."""
    if way == "as it is":
        return True
    if way == "gather in forward":
        return stage < 3 and name in ("evaluation_between_all", "accumulation_of_three")
    if way in ("update in backward", "both"):
        return (stage < 3 or way != "both") and name == "a_unit_is_gathered_in_vain"
    return stage > 1 and name == "accumulation_of_three"


RunKey = tuple[str, int, str]
"""Script, stage and way."""


def _as_it_is(names: Iterable[str]) -> list[RunKey]:
    return [(name, stage, "as it is") for name in names for stage in STAGES]


OWN_RUNS = [
    (name, stage, way)
    for name in OWN
    for stage in STAGES
    for way in WAYS
    if _meaningful(name, stage, way)
]
IN_WORLD_3 = ("five_steps", "accumulation_of_three", "a_block_twice_in_a_row")
RUNS = {2: [*OWN_RUNS, *_as_it_is(CHOSEN)], 3: _as_it_is(IN_WORLD_3)}
"""By world."""
OTHERS = [name for name in SCRIPTS.of_common_model() if name not in CHOSEN]
MORE_RUNS = {
    2: _as_it_is(OTHERS),
    3: [*(run for run in OWN_RUNS if run not in RUNS[3]), *_as_it_is(OTHERS)],
}


def _parametrize(runs: Iterable[tuple[int, str, int, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("at", "name", "stage", "way"), list(runs))


of_runs = _parametrize((at, *run) for at in RUNS for run in RUNS[at])


def _good(name: str, stage: int, way: str) -> tuple[str, int, str, str]:
    """Return what a run on a bad wire is compared with. When things happen must not
    matter, so ways have one answer."""
    return name, stage, "bf16" if way == "bf16" else "as it is", "good"


def _cases(runs: list[RunKey], at: int) -> dict[Any, Callable[[], Any]]:
    """Return each run on a bad wire, and what it is compared with."""
    cases: dict[Any, Callable[[], Any]] = {}
    for number, (name, stage, way) in enumerate(runs):
        cases[name, stage, way, "bad"] = functools.partial(
            play_on_wire, name, stage, at, seed=number, **WAYS[way]
        )
        good = _good(name, stage, way)
        cases[good] = functools.partial(play_on_wire, name, stage, at, **WAYS[good[2]])
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
    return play_on_wire(name, None, ranks_played)


def _assert_same(cases: ranks.Cases, name: str, stage: int, way: str) -> None:
    bad = cases[name, stage, way, "bad"]
    good = cases[_good(name, stage, way)]
    for ours, theirs in zip(bad, good, strict=True):
        assert ours["carried"] > 0
        assert differing(ours["params"], theirs["params"]) == []
        assert differing(ours["state"], theirs["state"]) == []
        assert differing(ours["seen"], theirs["seen"]) == []
        assert not any(ours["buffers"])
        if way in ("as it is", "bf16"):
            calls = [call[:7] for call in ours["log"]]
            assert calls == [call[:7] for call in theirs["log"]]


@of_runs
def test_a_bad_wire_changes_no_bit(at: int, name: str, stage: int, way: str) -> None:
    _assert_same(played(at), name, stage, way)


@pytest.mark.long
@_parametrize((at, *run) for at in MORE_RUNS for run in MORE_RUNS[at])
def test_a_bad_wire_changes_no_bit_of_any_script(
    at: int, name: str, stage: int, way: str
) -> None:
    _assert_same(all_played(at), name, stage, way)


@_parametrize(
    (at, name, stage, way)
    for at in RUNS
    for name, stage, way in RUNS[at]
    if name in OWN and way != "bf16"
)
def test_a_bad_wire_trains_like_torch(at: int, name: str, stage: int, way: str) -> None:
    """Also the losses that an evaluation between two steps sees."""
    expected = reference(name, at)
    for result in played(at)[name, stage, way, "bad"]:
        assert apart(result["params"], expected["params"]) == {}
        assert apart(result["seen"], expected["seen"]) == {}


@in_stages
def test_every_norm_is_that_of_the_reference(stage: int) -> None:
    """20 norms, none of them NaN."""
    expected = reference("twenty_norms", 2)["seen"]
    for result in played(2)["twenty_norms", stage, "as it is", "bad"]:
        assert len(result["seen"]) == 20
        for step, norm in result["seen"].items():
            # Parameters move apart by the last bits of each step, and norms with them.
            limit = 1e-6 if int(step) < 3 else 1e-5
            assert distance(norm, expected[step]) <= limit


@of_runs
def test_ranks_issue_the_same_collectives_on_a_bad_wire(
    at: int, name: str, stage: int, way: str
) -> None:
    results = played(at)[name, stage, way, "bad"]
    assert same_on_all_ranks([result["log"] for result in results])
