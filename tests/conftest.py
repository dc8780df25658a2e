"""What must come before anything imports zerokern: Triton's interpreter where there is
no GPU, one thread per rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "support"))

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, max_examples=60
)
hypothesis.settings.load_profile("same")
