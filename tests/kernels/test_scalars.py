"""The table of scalars, the counters and the report: norm, clipping, bias corrections
and keys."""

from __future__ import annotations

import functools
import math
import operator
import sys
from typing import Any

import pytest
import torch
from backends import assert_same_bits, device_of, placed
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_tables import HYPER, run_scalars, scalar_inputs, words
from torch import Tensor

from zerokern import ops
from zerokern.kernels import codecs, scalars

BELOW_A_POWER = 1.0 - 2.0**-53
"""The mantissa of the last fp64 number below a power of two."""

SQUARE_SUMS = st.floats(min_value=0.0) | st.sampled_from(
    [0.0, 2.0**-298, 2.0**296, 1.0, math.inf, math.nan]
)
"""What ranks send: sums of squares in fp64, of fp32 numbers and beyond."""


def on_all_backends(inputs: dict[str, Any]) -> list[Tensor]:
    """Return table, keys, steps and report, of which every back end gave the same
    bits."""
    native, expected = run_scalars(inputs, "native")
    triton, _ = run_scalars(inputs, "triton")
    assert_same_bits(native, expected)
    assert_same_bits(triton, expected)
    return expected


def two_groups(rule: Any) -> dict[str, Any]:
    """Return the inputs of 70 parameters, three words of used bits, after few steps and
    after many.

    They lie in two groups, of which one maximizes with L2.
    """
    inputs = scalar_inputs(70, rule=rule)
    other = {
        **HYPER,
        "lr": 1.0,
        "beta1": 0.0,
        "beta2": 0.95,
        "sign": -1.0,
        "decoupled": 0.0,
        "nesterov": 1.0,
    }
    row = torch.tensor([list(other.values())], dtype=torch.float64)
    inputs["hyper"] = torch.cat((inputs["hyper"], row))
    inputs["group_of_column"] = torch.arange(70) % 2
    inputs["steps"] = torch.tensor([0, 1, 15, 16, 17, 2**24, 2**35] * 10)
    return inputs


@pytest.mark.parametrize(
    "norms",
    [[0.5], [0.0, 0.0], [3.0, 4.0, 1e20], [math.inf, 1.0], [1.0, math.nan], [1e11] * 4],
)
@pytest.mark.parametrize("limit", [math.inf, 1.0, 0.0])
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
@pytest.mark.parametrize("rule", ["adam", "lion", "sgd"])
def test_scalars_equal_their_twin(
    norms: list[float],
    limit: float,
    loss_scale: float,
    rule: Any,
) -> None:
    inputs = two_groups(rule)
    used = [column for column in range(70) if column % 3]
    inputs["gathered"] = words(norms, used, 70)
    # What one rank did not use, another may have.
    inputs["gathered"][0, 3] = 0
    inputs["limits"] = torch.tensor([limit, loss_scale], dtype=torch.float64)
    table, keys, steps, report = on_all_backends(inputs)

    finite = all(map(math.isfinite, norms))
    column = torch.arange(70)
    active = (column % 3 > 0) & ((column < 64) | (len(norms) > 1)) & finite
    # An fp32 counter would stop at 2^24.
    assert torch.equal(steps - inputs["steps"], active.long())
    assert torch.equal(table[-1] != 0, active)
    assert torch.equal(keys, codecs.mix64(inputs["seeds"] + steps * codecs.GOLDEN))
    # A norm that is not finite is reported as such, and the skipped step is counted.
    assert math.isfinite(report[0]) == finite
    assert report[2] == (not finite)


def check_norm(
    square_sums: list[float],
    limit: float = math.inf,
    loss_scale: float = 1.0,
    rule: Any = "adam",
    step: int = 0,
) -> None:
    """Form the scalars of two parameters, of which one was used, on every back end."""
    inputs = scalar_inputs(2, step, rule)
    inputs["gathered"] = words([0.0] * len(square_sums), [0], 2)
    bits = torch.tensor(square_sums, dtype=torch.float64).view(torch.int64)
    inputs["gathered"][:, 0] = bits
    inputs["limits"] = torch.tensor([limit, loss_scale], dtype=torch.float64)
    _, _, steps, report = on_all_backends(inputs)

    total = functools.reduce(operator.add, square_sums)
    finite = math.isfinite(total)
    norm = math.sqrt(total) / loss_scale
    ratio = limit / (norm + 1e-6)
    clip = 1.0 if ratio > 1.0 else ratio
    assert steps.tolist() == [step + finite, step]
    exact = torch.tensor([norm, clip, not finite], dtype=torch.float64)
    assert_same_bits(report, exact)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    square_sums=st.lists(SQUARE_SUMS, min_size=1, max_size=4),
    limit=st.sampled_from([math.inf, 1.0, 0.0]) | st.floats(1e-9, 1e9),
    loss_scale=st.sampled_from([1.0, 65536.0]) | st.floats(2.0**-24, 2.0**24),
    rule=st.sampled_from(["adam", "lion", "sgd"]),
    step=st.integers(0, 2**35),
)
def test_scalars_of_any_norm_equal_their_twin(
    square_sums: list[float],
    limit: float,
    loss_scale: float,
    rule: Any,
    step: int,
) -> None:
    """Zero, the least subnormal, huge, infinite or NaN: on every back end the report is
    what Python's own arithmetic gives."""
    check_norm(square_sums, limit, loss_scale, rule=rule, step=step)


@pytest.mark.parametrize(
    "square_sum",
    [4 * BELOW_A_POWER, 8.885100138466566e-308, sys.float_info.max],
    ids=["below a power of four", "tiny", "largest"],
)
def test_scalars_of_an_extreme_sum_equal_their_twin(square_sum: float) -> None:
    check_norm([square_sum])


def test_what_is_above_the_used_bits_is_not_looked_at() -> None:
    """The ranks tell each other something there."""
    inputs = two_groups("adam")
    expected = on_all_backends(inputs)
    marked = inputs["gathered"].clone()
    marked[:, 1:] |= 0x7EADBEEF << 32
    found = on_all_backends({**inputs, "gathered": marked})
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


def test_many_parameters_take_several_programs() -> None:
    triton, expected = run_scalars(scalar_inputs(2 * scalars.TILE + 3))
    assert_same_bits(triton, expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_counters_and_keys_go_on_past_what_fp32_counts(backend: str) -> None:
    """Counters are int64 and live where the table does; each step has keys of its
    own."""
    device = device_of(backend)
    inputs = scalar_inputs(3, step=2**24)
    there = {name: placed(value, device) for name, value in inputs.items()}
    seen: set[int] = set()
    for done in range(1, 4):
        ops.scalars_(**there, backend=backend)
        assert there["steps"].tolist() == [2**24 + done] * 3
        seen.update(there["keys"].tolist())
    assert len(seen) == 9

    # A key depends on seed and step, on nothing else: not on the other parameters, nor
    # on whether it was used before.
    alone = scalar_inputs(1, step=2**24 + 2)
    alone["seeds"] = inputs["seeds"][1:2]
    ops.scalars_(**alone, backend="torch")
    assert alone["keys"][0] == there["keys"][1].cpu()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_norm_is_that_of_all_ranks(backend: str) -> None:
    """Nobody clips by the norm of one's own shard."""
    inputs = scalar_inputs(2)
    inputs["gathered"] = words([3.0, 4.0, 0.0, 12.0], [0, 1], 2)
    inputs["limits"] = torch.tensor([1.0, 1.0], dtype=torch.float64)
    (table, _, _, report), _ = run_scalars(inputs, backend)
    assert report[0] == 13.0
    assert report[1].item() == pytest.approx(1 / 13, rel=1e-6)
    assert table[0].tolist() == [report[1].float().item()] * 2
