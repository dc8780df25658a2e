"""What the kernel tests share: numbers, recipes, shards, and two back ends side by
side.

Row numbers in these tests are those of a survey of faults that users of other
optimizers reported; each comment says what the fault was. Without a GPU the kernels run
in Triton's interpreter; with one, on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from zerokern import ops
from zerokern.kernels import codecs, launch, native, storage
from zerokern.ops import BLOCK, ColumnMap, Moment, Rule, Shard

DEVICE = "cuda" if torch.cuda.is_available() and not launch.INTERPRETED else "cpu"
NEEDS_COMPILER = pytest.mark.skipif(not native.available(), reason="no C compiler")
BACKENDS = ("triton", pytest.param("native", marks=NEEDS_COMPILER))
ALL_BACKENDS = ("torch", *BACKENDS)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (64, 128, 4096 - 64, 4096, 4096 + 64, 3 * 4096 + 192)
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    1e-38,
    65504.0,
    65520.0,
    3.3895e38,
    3.4e38,
    -3.4e38,
    math.inf,
    -math.inf,
    math.nan,
)
HYPER = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "sign": 1.0,
    "decoupled": 1.0,
    "nesterov": 0.0,
}


class Variant(NamedTuple):
    """A rule and the hyper-parameters that make it take another path."""

    rule: Rule
    hyper: Mapping[str, float] = {}
    momentum: bool = True
    amsgrad: bool = False

    @property
    def l2(self) -> bool:
        return self.hyper.get("decoupled") == 0.0


VARIANTS = {
    "adamw": Variant("adam"),
    "adam": Variant("adam", {"decoupled": 0.0, "sign": -1.0}),
    "amsgrad": Variant("adam", amsgrad=True),
    "lion": Variant("lion", {"beta2": 0.99}),
    "momentum": Variant("sgd", {"beta2": 0.1, "decoupled": 0.0}),
    "nesterov": Variant("sgd", {"beta2": 0.0, "nesterov": 1.0}),
    "sgd": Variant("sgd", {"decoupled": 0.0}, momentum=False),
}
WEIGHTS = {
    "fp32": (torch.float32, None),
    "bf16+fp32": (torch.bfloat16, torch.float32),
    "fp16+fp32": (torch.float16, torch.float32),
    "split32": (torch.bfloat16, torch.int16),
    "split24": (torch.bfloat16, torch.int8),
    "bf16": (torch.bfloat16, None),
}
"""Formats of the weights: dtypes of param and master."""

MOMENTS = {name: form.dtype for name, form in ops.MOMENTS.items()}
FORMS = (codecs.E3M4, codecs.UE3M5, None)
"""8-bit formats of the three moments, in the order in which a shard has them."""


# ---------------------------------------------------------------- numbers


def seeded(numel: int, seed: int = 0, special: bool = False) -> Tensor:
    """Return normal fp32 numbers; with `special`, every seventh is a limit of some
    format."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if special:
        positions = torch.arange(seed % 7, numel, 7)
        values[positions] = torch.tensor(SPECIAL)[positions % len(SPECIAL)]
    return values


def mixed(numel: int, seed: int = 0) -> Tensor:
    """Return normal numbers in every other block, and limits of formats among those of
    the rest."""
    odd = (torch.arange(numel) // BLOCK) % 2 == 1
    return torch.where(odd, seeded(numel, seed, special=True), seeded(numel, seed))


def random_bits(numel: int, seed: int = 0, bits: int = 16) -> Tensor:
    """Return uniform int64 words from torch's generator, which the code under test does
    not use."""
    return torch.randint(
        0, 1 << bits, (numel,), generator=torch.Generator().manual_seed(seed)
    )


def ulp(value: Tensor) -> Tensor:
    """Return the distance of fp32 numbers at the magnitude of an fp64 value."""
    return torch.exp2(torch.floor(torch.log2(value.abs().clamp_min(2.0**-126))) - 23)


# --------------------------------------------------------------- back ends side by side


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor, a shard, a moment or a column map with a function applied to
    each tensor; the rest as it is."""
    if isinstance(value, Tensor):
        return function(value)
    return (
        type(value)(*(mapped(part, function) for part in value))
        if hasattr(value, "_fields")
        else value
    )


def placed(value: Any, device: str = DEVICE) -> Any:
    """Return clones of all tensors on a device."""
    return mapped(value, lambda tensor: tensor.to(device, copy=True))


def device_of(backend: str) -> str:
    return DEVICE if backend == "triton" else "cpu"


def run_both(
    function: Callable[..., None], *args: Any, backend: str = "triton", **options: Any
) -> tuple[list[Any], list[Any]]:
    """Run a function on a back end and on plain torch, on clones; return the positional
    arguments of both."""
    sides = []
    for side in (backend, "torch"):
        arguments = [placed(value, device_of(side)) for value in args]
        function(
            *arguments,
            **{k: placed(v, device_of(side)) for k, v in options.items()},
            backend=side,
        )
        sides.append([placed(value, "cpu") for value in arguments])
    return sides[0], sides[1]


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Bit equality of tensors, or of all tensors of two shards; all NaNs are one."""
    if expected is None or not isinstance(expected, Tensor):
        assert type(actual) is type(expected)
        for one, other in zip(actual or (), expected or (), strict=True):
            assert_same_bits(one, other)
        return
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.is_floating_point():
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[
            actual.element_size()
        ]
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(actual), nan)
        actual, expected = (
            t.contiguous().view(integer).masked_fill(nan, 0) for t in (actual, expected)
        )
    assert torch.equal(actual, expected)


# ---------------------------------------------------------------- columns and scalars


def columns_of(
    column_of_block: Sequence[int],
    first: Mapping[int, int] | None = None,
    num_columns: int = 0,
) -> ColumnMap:
    """Return the map of a shard.

    Args:
        column_of_block: each block's column.
        first: of a column, which block of its parameter the first one here is; 0 if not
            given.
        num_columns: columns in all, if some have no block here.
    """
    origin = [0] * max(num_columns, *(column + 1 for column in column_of_block))
    runs: list[tuple[int, int, int, int]] = []
    for block, column in enumerate(column_of_block):
        if runs and runs[-1][2] == column:
            runs[-1] = (runs[-1][0], block + 1, column, origin[column])
        else:
            origin[column] = (first or {}).get(column, 0) - block
            runs.append((block, block + 1, column, origin[column]))
    return ColumnMap(
        torch.tensor(column_of_block, dtype=torch.int32),
        torch.tensor(origin),
        tuple(runs),
    )


def words(norms: Sequence[float], used: Sequence[int], num_columns: int) -> Tensor:
    """Return `gathered` of ranks with these shard norms, each of which used these
    columns."""
    bits = torch.zeros(len(norms), 1 + -(-num_columns // 32), dtype=torch.int64)
    bits[:, 0] = (torch.tensor(norms, dtype=torch.float64) ** 2).view(torch.int64)
    for column in used:
        bits[:, 1 + column // 32] |= 1 << (column % 32)
    return bits


OUTPUTS = ("table", "keys", "steps", "report")


def scalar_inputs(
    num_columns: int, step: int = 0, rule: Rule = "adam", **hyper: float
) -> dict[str, Any]:
    return {
        "table": torch.zeros(len(ops.TABLE), num_columns),
        "keys": torch.zeros(num_columns, dtype=torch.int64),
        "steps": torch.full((num_columns,), step),
        "report": torch.zeros(3, dtype=torch.float64),
        "rule": rule,
        "hyper": torch.tensor([list({**HYPER, **hyper}.values())], dtype=torch.float64),
        "group_of_column": torch.zeros(num_columns, dtype=torch.int64),
        "seeds": codecs.mix64(torch.arange(num_columns) + 1),
        "gathered": words([1.0], range(num_columns), num_columns),
        "limits": torch.tensor([math.inf, 1.0], dtype=torch.float64),
    }


def scalars_of(
    variant: Variant,
    num_columns: int = 1,
    step: int = 0,
    inactive: Sequence[int] = (),
    **hyper: float,
) -> dict[str, Any]:
    """Return what `update_` takes beside shard, gradient and columns, after `step`
    steps, without clipping."""
    inputs = scalar_inputs(
        num_columns, step, variant.rule, **{**variant.hyper, **hyper}
    )
    inputs["gathered"] = words(
        [1.0],
        [column for column in range(num_columns) if column not in inactive],
        num_columns,
    )
    ops.scalars_(**inputs, backend="torch")
    return {
        "rule": variant.rule,
        "table": inputs["table"],
        "keys": inputs["keys"],
        "l2": variant.l2,
    }


def schedule(variant: Variant, steps: int, **hyper: float) -> Iterator[dict[str, Any]]:
    """Yield `scalars_of` one parameter for each of the first steps.

    Formed in one call, in which the steps are columns: a thousand calls would take
    longer than the updates.
    """
    inputs = _all_steps(variant.rule, steps, tuple({**variant.hyper, **hyper}.items()))
    for step in range(steps):
        table, keys = (
            inputs["table"][:, step : step + 1].contiguous(),
            inputs["keys"][step : step + 1],
        )
        yield {"rule": variant.rule, "table": table, "keys": keys, "l2": variant.l2}


@functools.lru_cache(maxsize=16)
def _all_steps(
    rule: Rule, steps: int, hyper: tuple[tuple[str, float], ...]
) -> dict[str, Any]:
    inputs = scalar_inputs(steps, 0, rule, **dict(hyper))
    inputs["steps"], inputs["seeds"] = (
        torch.arange(steps),
        inputs["seeds"][:1].repeat(steps),
    )
    ops.scalars_(**inputs, backend="torch")
    return inputs


# ---------------------------------------------------------------- shards


def shard_of(
    variant: Variant,
    weights: str,
    moments: str | Sequence[str],
    w: Tensor,
    *states: Tensor,
    backend: str = "torch",
) -> Shard:
    """Return a shard in some formats, each value rounded to nearest.

    Args:
        variant: which moments there are.
        weights: a key of WEIGHTS.
        moments: a key of MOMENTS, or one for each moment. 8 bits are none for
            amsgrad's: bf16 instead.
        w: fp32 weights.
        states: fp32 values of the moments; zeros where not given.
        backend: on whose device.
    """
    param, master = WEIGHTS[weights]
    shard = Shard(
        torch.empty_like(w, dtype=param),
        None if master is None else torch.empty_like(w, dtype=master),
        None,
    )
    shard.param.copy_(w)
    storage.store_master(shard, w)
    has = (variant.momentum, variant.rule == "adam", variant.amsgrad)
    chosen = [moments] * 3 if isinstance(moments, str) else moments
    made: list[Moment | None] = []
    for index, (wanted, name, form) in enumerate(zip(has, chosen, FORMS, strict=True)):
        dtype = torch.bfloat16 if form is None and name == "8bit" else MOMENTS[name]
        scale = (
            torch.full((w.numel() // BLOCK,), 127, dtype=torch.uint8)
            if dtype == torch.uint8
            else None
        )
        moment = Moment(torch.zeros_like(w, dtype=dtype), scale) if wanted else None
        storage.store_moment(
            moment,
            states[index] if index < len(states) else torch.zeros_like(w),
            None,
            form,
        )
        made.append(moment)
    placed_shard: Shard = placed(
        Shard(shard.param, shard.master, *made), device_of(backend)
    )
    return placed_shard


def mixed_shard(
    variant: Variant, weights: str, moments: str | Sequence[str], numel: int
) -> Shard:
    """Return a shard of ordinary numbers and limits of formats."""
    w, m, v, largest = (mixed(numel, seed) for seed in range(4))
    return shard_of(
        variant, weights, moments, w, m * 0.1, v.abs() * 0.01, largest.abs() * 0.01
    )


def weights_of(shard: Shard) -> Tensor:
    """Return the weights at full precision, fp32."""
    return storage.load_weights(placed(shard, "cpu")).clone()


def moments_of(shard: Shard) -> list[Tensor | None]:
    """Return the moments, fp32."""
    loaded = [
        storage.load_moment(m, form)
        for m, form in zip(placed(shard, "cpu").moments, FORMS, strict=True)
    ]
    return [None if moment is None else moment.clone() for moment in loaded]


def window_of(shard: Shard, first: int, end: int) -> Shard:
    """Return clones of some blocks of a shard."""
    window: Shard = placed(
        storage.part_of(shard, slice(first, end)), shard.param.device.type
    )
    return window
