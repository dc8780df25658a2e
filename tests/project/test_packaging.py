"""A wheel built here, installed elsewhere, trains; and nothing of it lies outside
zerokern/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

SOURCE_SUFFIXES = {".py", ".c"}

TRAIN = """
import pathlib, torch, zerokern, zerokern.kernels.reference
assert "site" in pathlib.Path(zerokern.__file__).parts, zerokern.__file__
torch.manual_seed(0)
model = torch.nn.Linear(7, 3)
optimizer = zerokern.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(20):
    loss = (model(torch.ones(2, 7)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
"""


def _python(*arguments: str, cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, so that nothing is left behind in this one."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in ("zerokern", "kernels"):
        shutil.copytree(
            ROOT / name,
            copy / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    _python(
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(copy),
        cwd=folder,
    )
    return next(folder.glob("zerokern-*.whl"))


def test_wheel_holds_zerokern_alone(wheel: Path) -> None:
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert {name.parts[0].split("-")[0] for name in names} == {"zerokern"}
    assert Path("zerokern/py.typed") in names
    held = {str(name) for name in names if name.suffix in SOURCE_SUFFIXES}
    package = [
        p
        for p in (ROOT / "zerokern").rglob("*")
        if "kernels" not in p.relative_to(ROOT).parts
    ]
    expected = {
        str(p.relative_to(ROOT)) for p in package if p.suffix in SOURCE_SUFFIXES
    }
    expected |= {
        f"zerokern/kernels/{p.name}"
        for p in (ROOT / "kernels").iterdir()
        if p.suffix in SOURCE_SUFFIXES
    }
    assert held == expected


def test_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    _python(
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
        cwd=tmp_path,
    )
    assert not (site / "kernels").exists()
    # An editable install would put its own finder first; -P keeps the working directory
    # out on Python 3.11 and later.
    _python("-c", TRAIN, cwd=tmp_path, PYTHONPATH=str(site), PYTHONSAFEPATH="1")
