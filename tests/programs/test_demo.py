"""The demo: a short job on two ranks writes a table whose numbers agree with theory,
and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchrun import TORCHRUN, run_python

from zerokern import Precision
from zerokern.examples import options, text, theory

TRAIN = ["-m", "zerokern.examples.train", "--device", "cpu"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a job of six steps printed, and the folder that it wrote."""
    out = tmp_path_factory.mktemp("demo")
    return run_python(*TRAIN, "--steps", "6", "--out", str(out)), out


def _results(job: tuple[str, Path]) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((job[1] / "results.json").read_text())
    return results


def test_job_runs_plain_and_every_stage(job: tuple[str, Path]) -> None:
    assert [run["name"] for run in _results(job)["runs"]] == [
        "plain AdamW",
        "ZeRO-1",
        "ZeRO-2",
        "ZeRO-3",
    ]


def test_loss_curves_coincide(job: tuple[str, Path]) -> None:
    assert "The 4 loss curves coincide" in job[0]
    plain, *sharded = _results(job)["runs"]
    assert plain["losses"][-1] < plain["losses"][0]
    for run in sharded:
        assert run["losses"] == pytest.approx(plain["losses"], abs=1e-4)
        assert run["validation_loss"] == pytest.approx(
            plain["validation_loss"], abs=1e-4
        )


def test_bytes_are_those_of_theory(job: tuple[str, Path]) -> None:
    for run in _results(job)["runs"]:
        for role, bytes_ in run["state_theory"].items():
            expected = pytest.approx(bytes_, rel=0.02)
            assert run["state"][role] == expected, (run["name"], role)
        assert run["sent"] == pytest.approx(run["sent_theory"], rel=0.01), run["name"]


def test_theory_of_a_recipe() -> None:
    recipe = Precision(master="split24", moments="8bit")
    held = theory.state_bytes(64, world=2, stage=2, itemsize=2, precision=recipe)
    assert held.parameters == 2 * 64
    assert held.master == 1 * 64 / 2
    assert held.moments == 2 * 65 / 2


def test_table_and_plot_are_written(job: tuple[str, Path]) -> None:
    printed, out = job
    assert (out / "table.md").read_text() in printed
    if "No plot" not in printed:
        assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_job_runs_under_torchrun_in_bf16(tmp_path: Path) -> None:
    arguments = ["--steps", "2", "--stages", "3", "--dtype", "bf16"]
    run_python(*TORCHRUN, *TRAIN, *arguments, "--out", str(tmp_path))
    last = json.loads((tmp_path / "results.json").read_text())["runs"][-1]
    planned = pytest.approx(last["state_theory"]["master"], rel=0.02)
    assert last["state"]["master"] == planned != 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--text", "nowhere.txt"], "cannot read the text nowhere.txt"),
        (["--text", "setup.py"], "give a longer one"),
        (["--world", "3"], "--batch 16 cannot be divided over 3 ranks"),
        (["--world", "32"], "--batch 16 cannot be divided over 32 ranks"),
        (["--steps", "0"], "must all be at least 1"),
    ],
)
def test_user_errors_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from zerokern.examples import train

    assert train.main(["--device", "cpu", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("zerokern: ") and said.count("\n") == 1
    assert sentence in said


def test_ranks_divide_the_global_batch() -> None:
    source = text.Text(bytes(range(256)) * 8, window=9)
    batch = source.batch(3, size=8, seed=1)
    assert batch.shape == (8, 9)
    assert batch.equal(source.batch(3, size=8, seed=1))
    assert not batch.equal(source.batch(4, size=8, seed=1))


def test_default_options_are_those_of_the_command_line() -> None:
    assert options.parse([]) == options.Options()


def test_theory_of_the_paper() -> None:
    # The paper's example: 7.5 B parameters, 64 ranks, fp16 with fp32 states; it counts
    # 16 bytes per parameter there. Here the fp32 sum of 16-bit gradients is counted
    # too.
    fp32 = Precision()
    whole = theory.state_bytes(
        7_500_000_000, world=64, stage=0, itemsize=4, precision=fp32
    ).total
    assert whole == 16 * 7.5e9
    stage1, stage2, stage3 = (
        theory.state_bytes(64, world=4, stage=s, itemsize=4, precision=fp32).total
        for s in (1, 2, 3)
    )
    assert stage1 == 64 * (8 + 8 / 4)
    assert stage2 == 64 * (4 + 12 / 4)
    assert stage3 == 64 * 16 / 4
    assert theory.sent_bytes(64, world=4, stage=3, itemsize=2) == 3 * 64 * 2 * 3 / 4
