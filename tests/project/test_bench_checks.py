"""The checks of `bench.gpu`, in Triton's interpreter: they pass here, and they fail
when something is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import checks, graphs, large, recipes, shards
from bench.recipes import RECIPES
from zerokern import ops
from zerokern.kernels import launch

INTERPRETED = pytest.mark.skipif(
    not launch.INTERPRETED, reason="Triton's interpreter is off"
)
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))


@INTERPRETED
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("update", marks=pytest.mark.long),
        "cast",
        "pack",
        "reduce",
        "scalars",
    ],
)
def test_checks_pass_in_the_interpreter(kind: str) -> None:
    found = [
        (name, check)
        for name, check in checks.checks(
            list(RECIPES.values()), (64, 4096 + 64) if kind == "reduce" else (576,)
        )
        if kind in name
    ]
    assert len(found) >= 3
    for name, check in found:
        assert checks.same(name, check, "cpu")


def test_every_storage_format_and_rule_is_checked() -> None:
    chosen = [*RECIPES.values(), *checks.MORE]
    assert {(r.param, r.master) for r in chosen} == {
        (torch.float32, None),
        (torch.bfloat16, "fp32"),
        (torch.float16, "fp32"),
        (torch.bfloat16, "split32"),
        (torch.bfloat16, "split24"),
        (torch.bfloat16, None),
    }
    for rule in ("adam", "lion", "sgd"):
        assert {r.moments for r in chosen if r.rule == rule} >= {"fp32", "8bit"}
    assert any(r.amsgrad for r in chosen) and any(r.nesterov for r in chosen)


def test_a_difference_of_one_bit_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    def check(device: str, backend: str) -> list[torch.Tensor]:
        return [torch.tensor([1.0, float("nan"), 1.0 + (backend == "triton") * 2**-23])]

    assert (
        not checks.same("a kernel", check, "cpu")
        and "DIFFERS" in capsys.readouterr().out
    )
    assert checks.same("a kernel", check, "cpu", "torch")


@INTERPRETED
@each_recipe
def test_replays_are_compared_with_eager_steps(recipe: recipes.Recipe) -> None:
    assert graphs.replay_is_eager(recipe, 64 * 33, "cpu", capture=lambda run: run)


def test_a_graph_that_freezes_its_numbers_is_caught() -> None:
    def frozen(run: Callable[[], None]) -> Callable[[], None]:
        step: shards.Step = run.__self__  # type: ignore[attr-defined]
        hyper, limits = step.hyper.clone(), step.limits.clone()

        def replay() -> None:
            step.hyper.copy_(hyper)
            step.limits.copy_(limits)
            run()

        return replay

    assert not graphs.replay_is_eager(
        RECIPES["fp32"], 2**12, "cpu", capture=frozen, backend="torch"
    )
    assert not graphs.replay_is_eager(
        RECIPES["fp32"], 2**12, "cpu", capture=lambda run: lambda: None, backend="torch"
    )


SMALL = {"numel": 2**12 + 128, "sentinels": (0, 2**12 - 1, 2**12, 2**12 + 127)}


@INTERPRETED
def test_the_check_of_large_shards_passes_on_a_small_one() -> None:
    assert large.faults("cpu", **SMALL) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing", "did not change"),
        ("half", "not written"),
        ("beyond", "behind"),
        ("norm", "sum of squares"),
    ],
)
def test_the_check_of_large_shards_sees_faults(
    fault: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_update, true_reduce = ops.update_, ops.reduce_

    def update_(shard: ops.Shard, grad: torch.Tensor, **options: Any) -> None:
        if fault == "nothing":
            return
        saved = shard.second.values[2**12 :].clone()  # type: ignore[union-attr]
        true_update(shard, grad, **options)
        if fault == "half":
            shard.second.values[2**12 :] = saved  # type: ignore[union-attr]
        if fault == "beyond":
            shard.param.as_strided((1,), (1,), shard.param.numel()).fill_(0)

    def reduce_(
        shard: torch.Tensor, own: torch.Tensor, *others: Any, **options: Any
    ) -> None:
        true_reduce(shard, own, *others, **options)
        if fault == "norm":
            others[1][-1] = 0.0

    monkeypatch.setattr(ops, "update_", update_)
    monkeypatch.setattr(ops, "reduce_", reduce_)
    found = large.faults("cpu", **SMALL, backend="torch")  # type: ignore[arg-type]
    assert any(said in text for text in found)


def test_a_capture_warms_up_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            order.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            order.append("replay")

    @contextlib.contextmanager
    def inside(what: Any) -> Any:
        order.append(f"into {type(what).__name__}")
        yield
        order.append("out")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", inside)
    graphs.cuda_graph(lambda: order.append("run"))()
    assert order == [
        "side waits for main",
        "into Stream",
        "run",
        "out",
        "main waits for side",
        "into Graph",
        "run",
        "out",
        "replay",
    ]
