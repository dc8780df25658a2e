"""What a row must say about where and when it was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
    """Return machine, versions, commit and date."""
    row: dict[str, Any] = {
        "machine": name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "zerokern": commit(),
        "date": datetime.date.today().isoformat(),
    }
    if torch.cuda.is_available():
        row["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).split("\n")[0]
    return row


def name() -> str:
    """Return the GPU, or cores, CPU model and memory."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    fields = [
        line.split(":", 1)
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    ]
    model = next(
        (value.strip() for key, value in fields if key.strip() == "model name"),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores, {model}, {memory:.0f} GiB"


def commit() -> str:
    """Return the commit of the checkout, with a plus sign if the code differs from it;
    "unknown" outside of git."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output(
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "zerokern",
        "kernels",
    )
    return (head or "unknown") + ("+" if changed else "")


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
