"""What others offer for the work of an update, and zerokern itself: each a function
from a recipe to a call.

A provider that cannot run here is a reason, not a gap: building it raises
`Unavailable`, which says why. The others get one flat parameter, which is what suits
them best.
"""

from __future__ import annotations

import contextlib
import io
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .recipes import Recipe, Unavailable
from .shards import BETAS, DECAY, EPS, LR, random

Run = Callable[[], Any]
Work = Literal["update", "step"]

COMPILE_LIMIT = 180
"""Seconds that torchao's torch.compile may take on a CPU before its eager path is timed
instead."""

BUILD_LIMIT = 300
"""Seconds that DeepSpeed may take to compile its extension."""


class Provider(NamedTuple):
    """An optimizer that is not ours."""

    name: str
    recipes: tuple[str, ...]
    """Recipes whose work it does: states of these sizes, in whatever formats it has."""
    build: Callable[[Recipe, int, str], Run | tuple[Run, str]]
    """From recipe, elements and device to a call, perhaps with a note for the row."""
    work: Work = "update"
    bytes_per_element: float = 24.0
    """About what it keeps and its step needs beside that, to tell whether a size
    fits."""
    devices: tuple[str, ...] = ("cpu", "cuda")


def build(
    provider: Provider, recipe: Recipe, numel: int, device: str
) -> tuple[Run, str]:
    """Build a provider's call and run it once, so that whatever it compiles is
    compiled.

    Returns:
        The call, and a note on how it runs; mostly empty.

    Raises:
        Unavailable: it cannot run here; the message has its name and the reason.
    """
    try:
        with _quiet():
            built = provider.build(recipe, numel, device)
            run, note = built if isinstance(built, tuple) else (built, "")
            run()
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # whatever a foreign package may raise
        lines = str(reason).strip().splitlines()
        raise Unavailable(
            f"{provider.name}: {type(reason).__name__}: {lines[0] if lines else ''}"
        ) from None
    return run, note


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let foreign packages warn and print unseen while they are imported and
    compiled."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after some seconds. Does nothing outside of the
    main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "SIGALRM"
    ):
        yield
        return

    def expire(*_: Any) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _parameter(
    numel: int, device: str, param: torch.dtype, grad: torch.dtype
) -> nn.Parameter:
    parameter = nn.Parameter(random(device, numel, param, 2e-2))
    parameter.grad = random(device, numel, grad, 1e-3, seed=4)
    return parameter


# ---------------------------------------------------------------------- torch


def _torch_adamw(recipe: Recipe, numel: int, device: str, kind: str = "fused") -> Run:
    parameter = _parameter(numel, device, torch.float32, torch.float32)
    return torch.optim.AdamW([parameter], LR, BETAS, EPS, DECAY, **{kind: True}).step


def _torch_sgd(recipe: Recipe, numel: int, device: str) -> Run:
    parameter = _parameter(numel, device, torch.float32, torch.float32)
    return torch.optim.SGD(
        [parameter], LR, momentum=BETAS[0], weight_decay=DECAY, fused=True
    ).step


def _torch_casts(recipe: Recipe, numel: int, device: str, kind: str = "fused") -> Run:
    """bf16 gradient to fp32, update of the fp32 master, copy to the bf16 parameter."""
    master = _parameter(numel, device, torch.float32, torch.float32)
    param, grad = (
        master.detach().to(recipe.param),
        random(device, numel, recipe.grad, 1e-3, seed=4),
    )
    optimizer = torch.optim.AdamW([master], LR, BETAS, EPS, DECAY, **{kind: True})

    def run() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        param.copy_(master.detach())

    return run


def _torch_clipped(recipe: Recipe, numel: int, device: str) -> Run:
    """Clip, update, and for 16 bits the cast that the next forward pass needs:
    automatic mixed precision."""
    parameter = _parameter(numel, device, torch.float32, torch.float32)
    optimizer = torch.optim.AdamW([parameter], LR, BETAS, EPS, DECAY, fused=True)
    low: Tensor | None = (
        None if recipe.param == torch.float32 else parameter.detach().to(recipe.param)
    )

    def run() -> None:
        nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        if low is not None:
            low.copy_(parameter.detach())

    return run


# ---------------------------------------------------------------------- packages


def _flashoptim(recipe: Recipe, numel: int, device: str) -> Run:
    from flashoptim import FlashAdamW  # type: ignore[import-not-found]

    bits = {"split32": 32, "split24": 24, None: None}[recipe.master]
    parameter = _parameter(numel, device, torch.bfloat16, torch.bfloat16)
    return FlashAdamW([parameter], LR, BETAS, EPS, DECAY, master_weight_bits=bits).step


def _torchao(
    recipe: Recipe, numel: int, device: str, stochastic: bool
) -> tuple[Run, str]:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    def fresh() -> Any:
        parameter = _parameter(numel, device, torch.bfloat16, torch.bfloat16)
        return AdamW8bit(
            [parameter], LR, BETAS, EPS, DECAY, bf16_stochastic_round=stochastic
        )

    optimizer = fresh()
    try:
        with time_limit(COMPILE_LIMIT):
            optimizer.step()
    except (
        Exception
    ) as reason:  # inductor wraps what stops it, a missing compiler or the alarm
        note = (
            f"eager: torch.compile gave up ({type(reason).__name__}; limit"
            f" {COMPILE_LIMIT} s)"
        )
        eager = fresh()

        def run() -> None:
            with torch.compiler.set_stance("force_eager"):
                eager.step()

        return run, note
    return optimizer.step, "torch.compile"


def _bitsandbytes(recipe: Recipe, numel: int, device: str) -> Run:
    import bitsandbytes  # type: ignore[import-not-found]

    parameter = _parameter(numel, device, torch.bfloat16, torch.bfloat16)
    return bitsandbytes.optim.AdamW8bit([parameter], LR, BETAS, EPS, DECAY).step


def _deepspeed(recipe: Recipe, numel: int, device: str) -> Run:
    with time_limit(BUILD_LIMIT):
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # type: ignore[import-not-found]

        parameter = _parameter(numel, device, torch.float32, torch.float32)
        chosen = FusedAdam if device == "cuda" else DeepSpeedCPUAdam
        options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
        return chosen([parameter], **options).step


EIGHT_BIT = ("bf16+8bit",)
PROVIDERS: tuple[Provider, ...] = (
    Provider("torch fused AdamW", ("fp32",), _torch_adamw, bytes_per_element=16),
    Provider("torch fused SGD", ("sgd fp32",), _torch_sgd, bytes_per_element=12),
    Provider(
        "torch fused AdamW, casts", ("master32",), _torch_casts, bytes_per_element=20
    ),
    Provider(
        "torch clip, fused AdamW",
        ("fp32",),
        _torch_clipped,
        "step",
        bytes_per_element=20,
    ),
    Provider(
        "torch clip, fused AdamW, cast",
        ("master32",),
        _torch_clipped,
        "step",
        bytes_per_element=22,
    ),
    Provider(
        "FlashOptim FlashAdamW",
        ("split32+8bit", "split24+8bit", "bf16+8bit"),
        _flashoptim,
        bytes_per_element=10,
    ),
    Provider("torchao AdamW8bit", EIGHT_BIT, partial(_torchao, stochastic=False)),
    Provider(
        "torchao AdamW8bit, stochastic", EIGHT_BIT, partial(_torchao, stochastic=True)
    ),
    Provider("bitsandbytes AdamW8bit", EIGHT_BIT, _bitsandbytes, bytes_per_element=8),
    Provider(
        "DeepSpeed FusedAdam",
        ("fp32",),
        _deepspeed,
        bytes_per_element=16,
        devices=("cuda",),
    ),
    Provider(
        "DeepSpeed CPUAdam",
        ("fp32",),
        _deepspeed,
        bytes_per_element=16,
        devices=("cpu",),
    ),
)
FOREACH = (
    Provider("torch foreach AdamW", ("fp32",), partial(_torch_adamw, kind="foreach")),
    Provider(
        "torch foreach AdamW, casts",
        ("master32",),
        partial(_torch_casts, kind="foreach"),
    ),
)
"""Only for `pytest bench/`."""


def for_recipe(recipe: Recipe, device: str) -> list[Provider]:
    """Return the providers that do the work of a recipe on a kind of device."""
    return [p for p in PROVIDERS if recipe.name in p.recipes and device in p.devices]
