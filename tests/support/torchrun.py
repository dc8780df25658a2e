"""Programs of the repository, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys

from repository import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
"""Arguments of Python that come before a program's own, to run it on two ranks."""


def run_python(*arguments: str, **environment: str) -> str:
    """Run Python in the root of the repository; return what was printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
