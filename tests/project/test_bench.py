"""The benchmarks up to the launch: cases, rows, percentages and exit codes, with a fake
timer. Nothing is measured."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

from bench import gpu, kernels_cpu, providers, shards, timing
from bench.recipes import RECIPES, Unavailable
from zerokern.kernels import launch


class FakeClock(timing.Clock):
    """A CPU whose every moment is a millisecond after the last."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.ticks = itertools.count()

    def now(self) -> float:
        return next(self.ticks) / 1e3


def run_module(
    module: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# Timing and rows.


def test_percentages_and_percentiles() -> None:
    case = timing.Case("update", "fp32", "p", 10**6, 28.0, lambda: None)
    row = case.score(1e-3, 56.0)
    assert (row["median_ms"], row["gb_per_s"], row["fraction"]) == (
        1.0,
        pytest.approx(28.0),
        pytest.approx(0.5),
    )
    assert timing.line(row).endswith("| 50 |  |") and timing.line(
        {**row, "host_us": 7.4}
    ).endswith("| 50 | 7 |")
    assert timing.spread([5e-3, 1e-3, 2e-3, 4e-3, 3e-3, 6e-3]) == {
        "p20_ms": 2.0,
        "p80_ms": 5.0,
    }


def test_a_measurement_alternates_with_its_ceiling() -> None:
    calls = []
    case = timing.Case("update", "fp32", "p", 2**10, 32.0, lambda: calls.append("run"))
    row = timing.measure(case, FakeClock(), rounds=4)
    assert len(calls) == timing.WARMUP + 4 and row["rounds"] == 4
    assert [row[field] for field in ("median_ms", "p20_ms", "p80_ms")] == pytest.approx(
        [1.0] * 3
    )
    # Case and ceiling took a millisecond each, and a multiply moves twice the bytes.
    assert row["fraction"] == pytest.approx(0.5) and row[
        "ceiling_gb_per_s"
    ] == pytest.approx(2**16 * 1e-6)
    assert row["host_us"] is None


def test_the_queue_is_kept_full_for_longer_than_the_host_needs() -> None:
    clock = FakeClock()  # a flush lasts a millisecond
    assert clock.flushes(None) == clock.flushes(1e-6) == 1
    assert clock.flushes(4e-3) == 8
    assert clock.flushes(100.0) == timing.MOST_FLUSHES


class FakeEvent:
    """A CUDA event whose time is the number of events recorded before it."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.recorded += 1
        self.at = FakeEvent.recorded

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later.waited
        return float(later.at - self.at)


def test_events_are_read_once_the_later_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    first, _, third = timing.Instant(), timing.Instant(), timing.Instant()
    assert third - first == 2e-3


def test_a_gpu_is_idle_whenever_the_host_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    seconds = timing.Clock("cuda").host_seconds(lambda: order.append("run"))
    assert order == ["wait", "run"] * timing.HOST_ROUNDS + ["wait"]
    assert seconds is not None and 0 < seconds < 0.1


def test_a_gpus_ceiling_is_a_copy() -> None:
    clock = FakeClock()
    clock.copies = True
    ceiling = timing.Ceiling(1024.0, clock)
    ceiling.source.fill_(5.0)
    ceiling()
    assert ceiling.source.nbytes + ceiling.destination.nbytes == 1024
    assert torch.equal(
        ceiling.source, ceiling.destination
    ) and ceiling.gb_per_s == pytest.approx(1024e-6)


# The command for GPUs.


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Return the rows of every recipe at two tiny sizes, and the file they are in."""
    out = tmp_path_factory.mktemp("results") / "folder" / "fake.jsonl"
    found = gpu.time_all(
        out,
        [*list(RECIPES.values())[:3], RECIPES["bf16+8bit"]],
        [64, 2**12],
        rounds=2,
        clock=FakeClock(),
        capture=lambda run: run,
        backend="torch",
    )
    return found, out


@pytest.fixture(scope="module", autouse=True)
def no_packages() -> Any:
    """Keep foreign packages out, where there are any: they compile for minutes."""
    patch = pytest.MonkeyPatch()
    for name in ("torchao.optim", "bitsandbytes", "deepspeed.ops.adam", "flashoptim"):
        patch.setitem(sys.modules, name, None)
    yield
    patch.undo()


def test_rows_are_written_as_json_lines(
    rows: tuple[list[dict[str, Any]], Path],
) -> None:
    found, out = rows
    assert [json.loads(text) for text in out.read_text().splitlines()] == found
    for row in found:
        assert {
            "device",
            "driver",
            "torch",
            "triton",
            "cuda",
            "recipe",
            "numel",
            "provider",
            "bytes_per_element",
            "median_ms",
            "p20_ms",
            "p80_ms",
            "gb_per_s",
            "fraction",
            "host_us",
            "date",
        } <= set(row)
        # A millisecond each for the provider and for a multiply that moves twice the
        # bytes, up to a multiple of 4.
        assert row["fraction"] == pytest.approx(0.5, rel=0.02)


def test_every_recipe_has_all_of_our_providers_and_those_of_torch(
    rows: tuple[list[dict[str, Any]], Path],
) -> None:
    found, _ = rows
    ours = {
        ("update", "zerokern kernel"),
        ("update", "zerokern"),
        ("update", "zerokern graph"),
        ("step", "zerokern"),
    }
    for name, numel in itertools.product(
        ("fp32", "master32", "split32", "bf16+8bit"), (64, 2**12)
    ):
        there = {
            (row["op"], row["provider"])
            for row in found
            if (row["recipe"], row["numel"]) == (name, numel)
        }
        assert ours <= there
    others = {
        (row["op"], row["recipe"], row["provider"], row["bytes_per_element"])
        for row in found
    }
    assert ("update", "fp32", "torch fused AdamW", 28) in others
    assert ("step", "fp32", "torch clip, fused AdamW", 32) in others
    assert ("step", "master32", "torch clip, fused AdamW, cast", 32) in others
    assert ("update", "master32", "torch fused AdamW, casts", 30) in others


def test_what_does_not_run_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    arguments = ([RECIPES["bf16+8bit"]], [64])
    options: dict[str, Any] = {
        "rounds": 1,
        "clock": FakeClock(),
        "capture": lambda run: run,
        "backend": "torch",
    }
    gpu.time_all(tmp_path / "a.jsonl", *arguments, **options)
    text = capsys.readouterr().out
    for name in (
        "FlashOptim FlashAdamW",
        "torchao AdamW8bit",
        "bitsandbytes AdamW8bit",
    ):
        assert f"did not run: {name}: ModuleNotFoundError" in text
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 1000.0)
    assert gpu.time_all(tmp_path / "b.jsonl", *arguments, **options) == []
    assert (
        "did not run: zerokern, bf16+8bit, 6.10352e-05 Mi: needs"
        in capsys.readouterr().out
    )


def test_memory_that_runs_out_is_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(shards.Step, "of", full)
    found = gpu.time_all(
        tmp_path / "a.jsonl", [RECIPES["fp32"]], [64], rounds=1, clock=FakeClock()
    )
    assert {row["provider"] for row in found} == {
        "torch fused AdamW",
        "torch clip, fused AdamW",
    }
    assert (
        "did not run: zerokern, fp32, 6.10352e-05 Mi: CUDA out of memory.\n"
        in capsys.readouterr().out
    )


def test_foreign_failures_become_reasons() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no nvcc\nsecond line")

    with pytest.raises(Unavailable, match=r"^x: RuntimeError: no nvcc$"):
        providers.build(
            providers.Provider("x", ("fp32",), broken), RECIPES["fp32"], 64, "cpu"
        )


def test_a_time_limit_stops_its_body() -> None:
    with (
        pytest.raises(TimeoutError, match="not ready after 1 s"),
        providers.time_limit(1),
    ):
        while True:
            pass


def test_the_gpu_command_needs_a_gpu() -> None:
    done = run_module("bench.gpu", "--quick", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no CUDA device" in done.stderr


def test_names_of_result_files() -> None:
    assert gpu.slug("NVIDIA H200 (141 GB)") == "nvidia-h200-141-gb"


def test_a_kernel_that_differs_is_named_and_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "verify", lambda chosen: ["update fp32 64"])
    monkeypatch.setattr(
        sys, "argv", ["bench.gpu", "--out", str(tmp_path / "none.jsonl")]
    )
    assert gpu.main() == 1 and not (tmp_path / "none.jsonl").exists()
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert gpu.main() == 2


# The command for CPUs.


def test_cpu_rows_ratios_and_goals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [RECIPES["fp32"], RECIPES["master32"], RECIPES["bf16+8bit"]]
    rows = kernels_cpu.run_size(2**12, chosen, 3, FakeClock(), "torch")
    by_name = {(row["op"], row["recipe"], row["provider"]): row for row in rows}
    ours = by_name["update", "fp32", kernels_cpu.OURS]
    assert ours["ns_per_element"] == pytest.approx(1e6 / 2**12) and ours[
        "fraction"
    ] == pytest.approx(28 / 8)
    assert by_name["ratio", "fp32", "torch fused AdamW"]["speedup"] == pytest.approx(
        1.0
    )
    assert by_name["goal", "fp32", "torch fused AdamW"]["met"]
    assert not by_name["goal", "master32", kernels_cpu.CASTS]["met"]
    assert ("goal", "bf16+8bit", "torchao AdamW8bit") not in by_name
    text = capsys.readouterr().out
    assert (
        "goal MISSED master32" in text
        and "did not run: DeepSpeed CPUAdam: ModuleNotFoundError" in text
    )
    monkeypatch.setattr(kernels_cpu, "available", lambda: 1000.0)
    assert kernels_cpu.run_size(2**12, chosen, 3, FakeClock(), "torch") == []


def test_a_goal_is_set_against_the_fastest() -> None:
    names = ("torchao AdamW8bit", "bitsandbytes AdamW8bit")
    seconds = {
        ("bf16+8bit", name): [time]
        for name, time in zip((kernels_cpu.OURS, *names), (1.0, 30.0, 9.0), strict=True)
    }
    (goal,) = (row for row in kernels_cpu.compare(64, seconds) if row["op"] == "goal")
    assert (goal["provider"], goal["speedup"], goal["met"]) == (names[1], 9.0, True)


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    runs = {(name, "p"): lambda name=name: order.append(name) for name in "abc"}
    kernels_cpu.interleave(runs, 3, FakeClock())
    assert "".join(order) == "abcbcacab"


def test_the_cpu_command_writes_a_file(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run_module(
        "bench.kernels_cpu",
        "--sizes",
        "0.01",
        "--rounds",
        "1",
        "--recipes",
        "fp32",
        "--out",
        str(out),
    )
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in out.read_text().splitlines()]
    assert {"machine", "threads", "torch", "date"} <= set(found[0])
    assert ("update", "fp32", kernels_cpu.OURS) in {
        (row["op"], row["recipe"], row["provider"]) for row in found
    }
