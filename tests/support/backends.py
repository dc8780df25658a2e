"""The three back ends side by side: each on its device, their results compared bit for
bit. Without a GPU, Triton's kernels run in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zerokern.kernels import launch, native

DEVICE = "cuda" if torch.cuda.is_available() and not launch.INTERPRETED else "cpu"


NEEDS_COMPILER = pytest.mark.skipif(not native.available(), reason="no C compiler")


BACKENDS = ("triton", pytest.param("native", marks=NEEDS_COMPILER))


ALL_BACKENDS = ("torch", *BACKENDS)
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor, a shard, a moment or a column map with a function applied to
    each tensor; the rest as it is."""
    if isinstance(value, Tensor):
        return function(value)
    if hasattr(value, "_fields"):
        return type(value)(*(mapped(part, function) for part in value))
    return value


def placed(value: Any, device: str = DEVICE) -> Any:
    """Return clones of all tensors on a device."""
    return mapped(value, lambda tensor: tensor.to(device, copy=True))


def device_of(backend: str) -> str:
    return DEVICE if backend == "triton" else "cpu"


def run_both(
    function: Callable[..., None],
    *args: Any,
    backend: str = "triton",
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Run a function on a back end and on plain torch, on clones; return the positional
    arguments of both."""
    sides = []
    for side in (backend, "torch"):
        device = device_of(side)
        arguments = [placed(value, device) for value in args]
        named = {name: placed(value, device) for name, value in options.items()}
        function(*arguments, **named, backend=side)
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
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.is_floating_point():
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(actual), nan)
        integer = INTEGER_OF_SIZE[actual.element_size()]
        actual, expected = (
            t.contiguous().view(integer).masked_fill(nan, 0) for t in (actual, expected)
        )
    assert torch.equal(actual, expected)
