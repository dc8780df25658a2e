"""How a kernel is launched: on the tensors' device, without contraction, and in the
interpreter if there is no GPU."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""TRITON_INTERPRET as it was at import, which is when `@triton.jit` looks at it: later
changes would have no effect."""

MOST_REGISTERS = 128
"""Per thread. Left alone, NVIDIA's assembler spills a few of them to the stack to fit
one more program."""

# Triton's interpreter keeps the program's index in a global, and gradients arrive on
# autograd's threads.
_INTERPRETER = threading.Lock()


def cdiv(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up: how many programs cover `numerator` elements."""
    return -(-numerator // denominator)


def aligned(tensor: torch.Tensor) -> bool:
    """Return whether the first element lies on 16 bytes, so that 128-bit accesses are
    legal."""
    return tensor.data_ptr() % 16 == 0


def compiler_options(nvidia: bool) -> dict[str, Any]:
    """Return the options that every kernel is compiled with.

    Contraction into FMA is off: it would give other bits than the specification in
    `reference.py`.

    Args:
        nvidia: the target is NVIDIA's; others know no limit of registers.
    """
    return {
        "enable_fp_fusion": False,
        **({"maxnreg": MOST_REGISTERS} if nvidia else {}),
    }


_OPTIONS = compiler_options(nvidia=torch.version.cuda is not None)


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, **options: Any
) -> None:
    """Launch a kernel over a one-dimensional grid on the current stream of a device. No
    host synchronisation.

    Args:
        kernel: a `@triton.jit` function.
        programs: size of the grid; nothing happens for 0.
        device: where the tensors are. Triton itself would launch on the current device,
            which may be another one.
        arguments: the kernel's runtime arguments in order.
        options: its constexprs, and compiler options such as `num_warps`.
    """
    if programs:
        with _interpreter() if INTERPRETED else _guard(device):
            kernel[(programs,)](*arguments, **_OPTIONS, **options)


def _guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return (
        torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    )


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Run alone, and let infinities and NaNs be as silent as they are on a GPU: NumPy
    warns about them."""
    with _INTERPRETER, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
