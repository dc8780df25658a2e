"""Bad input, of optimizers and of kernels: the error says the value, the rule and the
remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repository import ROOT
from torch import nn

import zerokern
from zerokern import ops


def aliased() -> list[nn.Parameter]:
    """Return two parameters on one memory."""
    memory = torch.zeros(4)
    return [nn.Parameter(memory), nn.Parameter(memory)]


def not_a_leaf() -> list[torch.Tensor]:
    """Return a function of a parameter."""
    return [nn.Parameter(torch.ones(3)) * 2]


def twice() -> list[nn.Parameter]:
    """Return one parameter two times."""
    param = nn.Parameter(torch.ones(3))
    return [param, nn.Parameter(torch.ones(3)), param]


def group_twice() -> list[dict[str, Any]]:
    """Return one group two times."""
    group = {"params": [nn.Parameter(torch.ones(3))]}
    return [group, dict(group)]


def one() -> list[nn.Parameter]:
    """Return one good parameter."""
    return [nn.Parameter(torch.ones(3))]


def of(*tensors: torch.Tensor) -> list[nn.Parameter]:
    """Return parameters."""
    return [nn.Parameter(t) for t in tensors]


# --------------------------------------------------------------------------- optimizers

Make = Callable[[], Any]
REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "stage 0": (
        lambda: zerokern.AdamW(one(), stage=0),
        ValueError,
        r"stage=0.*1.*2.*3",
    ),
    "stage 4": (lambda: zerokern.AdamW(one(), stage=4), ValueError, r"stage=4"),
    "stage text": (lambda: zerokern.AdamW(one(), stage="2"), ValueError, r"stage='2'"),
    "stage None": (
        lambda: zerokern.AdamW(one(), stage=None),
        ValueError,
        r"stage=None",
    ),
    "stage 3 without model": (
        lambda: zerokern.AdamW(one(), stage=3),
        ValueError,
        r"pass model=model",
    ),
    "model that is none": (
        lambda: zerokern.AdamW(one(), stage=3, model="gpt"),
        TypeError,
        r"model=str.*Module",
    ),
    "empty list": (lambda: zerokern.AdamW([]), ValueError, r"empty.*model\.parameters"),
    "exhausted generator": (lambda: zerokern.AdamW(iter([])), ValueError, r"empty"),
    "all groups empty": (
        lambda: zerokern.AdamW([{"params": []}, {"params": []}]),
        ValueError,
        r"every parameter group is empty",
    ),
    "a tensor": (lambda: zerokern.AdamW(one()[0]), TypeError, r"single tensor.*list"),
    "numbers": (lambda: zerokern.AdamW([1, 2]), TypeError, r"int.*Parameter"),
    "several devices": (
        lambda: zerokern.AdamW([*one(), nn.Parameter(torch.empty(3, device="meta"))]),
        ValueError,
        r"several devices.*cpu.*meta.*one device",
    ),
    "parameter twice": (
        lambda: zerokern.AdamW(twice()),
        ValueError,
        r"parameter 0.*once",
    ),
    "group twice": (lambda: zerokern.AdamW(group_twice()), ValueError, r"once"),
    "aliased memory": (
        lambda: zerokern.AdamW(aliased()),
        ValueError,
        r"shares memory.*one Parameter",
    ),
    "not a leaf": (lambda: zerokern.AdamW(not_a_leaf()), ValueError, r"not a leaf"),
    "complex": (
        lambda: zerokern.AdamW(of(torch.zeros(3, dtype=torch.complex64))),
        TypeError,
        r"complex64.*float32",
    ),
    "float64": (
        lambda: zerokern.AdamW(of(torch.zeros(3, dtype=torch.float64))),
        TypeError,
        r"float64.*float32",
    ),
    "sparse parameter": (
        lambda: zerokern.AdamW([nn.Parameter(torch.eye(3).to_sparse())]),
        ValueError,
        r"sparse.*dense",
    ),
    "lr negative": (lambda: zerokern.AdamW(one(), lr=-1.0), ValueError, r"lr=-1\.0"),
    "lr NaN": (lambda: zerokern.AdamW(one(), lr=float("nan")), ValueError, r"lr=nan"),
    "lr of two numbers": (
        lambda: zerokern.AdamW(one(), lr=torch.ones(2)),
        ValueError,
        r"lr.*one number",
    ),
    "eps negative": (
        lambda: zerokern.AdamW(one(), eps=-1e-8),
        ValueError,
        r"eps=-1e-08",
    ),
    "weight decay negative": (
        lambda: zerokern.AdamW(one(), weight_decay=-0.1),
        ValueError,
        r"weight_decay=-0\.1",
    ),
    "beta 1": (
        lambda: zerokern.AdamW(one(), betas=(1.0, 0.9)),
        ValueError,
        r"betas\[0\]=1\.0",
    ),
    "beta negative": (
        lambda: zerokern.AdamW(one(), betas=(0.9, -0.1)),
        ValueError,
        r"betas\[1\]=-0\.1",
    ),
    "lr negative in a group": (
        lambda: zerokern.AdamW([{"params": one(), "lr": -2.0}]),
        ValueError,
        r"lr=-2\.0",
    ),
    "amsgrad in 8 bits": (
        lambda: zerokern.AdamW(
            one(), amsgrad=True, precision=zerokern.Precision(moments="8bit")
        ),
        ValueError,
        r"amsgrad=True.*8bit.*bf16",
    ),
    "amsgrad in one group": (
        lambda: zerokern.AdamW([{"params": one(), "amsgrad": True}, {"params": one()}]),
        ValueError,
        r"amsgrad differs.*\[True, False\]",
    ),
    "split master of fp16": (
        lambda: zerokern.AdamW(
            of(torch.zeros(3).half()), precision=zerokern.Precision(master="split32")
        ),
        ValueError,
        r"split32.*bfloat16.*\(3,\).*float16.*master='fp32'",
    ),
    "fp16 without a master": (
        lambda: zerokern.SGD(
            of(torch.zeros(3).half()), precision=zerokern.Precision(master="none")
        ),
        ValueError,
        r"'none'.*float16",
    ),
    "unknown master": (
        lambda: zerokern.Precision(master="split16"),
        ValueError,
        r"master='split16'.*'split32'",
    ),
    "unknown moments": (
        lambda: zerokern.Precision(moments="int8"),
        ValueError,
        r"moments='int8'.*'8bit'",
    ),
    "gradients of integers": (
        lambda: zerokern.Precision(gradients=torch.int8),
        ValueError,
        r"gradients=torch\.int8",
    ),
    "seed of no integer": (
        lambda: zerokern.Precision(seed=1.5),
        ValueError,
        r"seed=1\.5",
    ),
    "momentum negative": (
        lambda: zerokern.SGD(one(), momentum=-0.9),
        ValueError,
        r"momentum=-0\.9",
    ),
    "nesterov without momentum": (
        lambda: zerokern.SGD(one(), nesterov=True),
        ValueError,
        r"nesterov=True.*momentum",
    ),
    "nesterov with dampening": (
        lambda: zerokern.SGD(one(), momentum=0.9, dampening=0.1, nesterov=True),
        ValueError,
        r"dampening=0\.1",
    ),
    "beta of Lion": (
        lambda: zerokern.Lion(one(), betas=(0.9, 1.0)),
        ValueError,
        r"betas\[1\]=1\.0",
    ),
    "differentiable": (
        lambda: zerokern.AdamW(one(), differentiable=True),
        ValueError,
        r"differentiable=True",
    ),
    "max_grad_norm zero": (
        lambda: zerokern.AdamW(one(), max_grad_norm=0.0),
        ValueError,
        r"max_grad_norm=0\.0.*positive",
    ),
    "max_grad_norm NaN": (
        lambda: zerokern.AdamW(one(), max_grad_norm=float("nan")),
        ValueError,
        r"max_grad_norm=nan",
    ),
    "bucket of 0 bytes": (lambda: zerokern.Buckets(bytes=0), ValueError, r"bytes=0"),
    "wire of integers": (
        lambda: zerokern.Precision(wire=torch.int8),
        ValueError,
        r"wire=torch\.int8",
    ),
    "unknown option": (lambda: zerokern.AdamW(one(), bucket=3), TypeError, r"bucket"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name: str) -> None:
    """Value, rule, remedy."""
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=f"(?s){message}"):
        make()


# ------------------------------------------------------------------------------ kernels


SCRIPT = """
import torch
from zerokern import ops
out = torch.zeros(64)
try:
    ops.cast_(out, torch.ones(64), backend="triton")
except ValueError as error:
    assert not out.any()
    print(error)
"""


def test_triton_on_a_cpu_tensor_outside_the_interpreter() -> None:
    environment = {
        key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        check=True,
    )
    assert "backend 'triton'" in done.stdout
    assert "TRITON_INTERPRET=1" in done.stdout


def test_an_unknown_backend_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"ZEROKERN_BACKEND is 'cuda'.*auto"):
        ops.cast_(torch.zeros(64), torch.zeros(64))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ops.cast_(torch.zeros(64), torch.zeros(65)), ValueError),
        (
            lambda: ops.cast_(torch.zeros(64), torch.zeros(64, dtype=torch.int32)),
            TypeError,
        ),
        (lambda: ops.cast_(torch.zeros(128)[::2], torch.zeros(64)), ValueError),
        (lambda: ops.pack_([torch.zeros(3)], []), ValueError),
        (lambda: ops.pack_([torch.zeros(3)], [torch.zeros(4)]), ValueError),
        (
            lambda: ops.pack_([torch.zeros(3)], [torch.zeros(3, device="meta")]),
            ValueError,
        ),
        (
            lambda: ops.pack_([torch.zeros(3)], [torch.zeros(3, dtype=torch.int64)]),
            TypeError,
        ),
    ],
    ids=["sizes", "dtype", "strided", "lengths", "shapes", "devices", "integers"],
)
def test_ops_refuse_what_does_not_fit(call: Make, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"cast_|pack_"):
        call()
