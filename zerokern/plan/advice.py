"""Which strategy to recommend: the least sharding that fits, and what to do where none
does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .forecast import Forecast, Strategy
from .quantities import gib

EXPOSED = 0.1
"""A wire that keeps a rank waiting for more of a step than this is worth a word."""
WORTH = 0.98
"""A step that is shorter than this part of another is worth a word."""


@dataclass(frozen=True)
class Advice:
    """A recommendation and its reason."""

    strategy: Strategy | None
    reason: str


def advise(
    forecasts: Sequence[Forecast],
    gpu_memory: int,
    reserve: int,
    late: Callable[[Strategy], Forecast] | None = None,
) -> Advice:
    """Recommend one of the strategies, or say what is too large.

    Args:
        forecasts: of the strategies that were tried, the plainer before the leaner:
            without checkpointing and with it, then by recipe, then by stage.
        gpu_memory: bytes of a GPU.
        reserve: of these, what the driver, the allocator and NCCL keep.
        late: forecasts a strategy with `Buckets(gather_in_forward=True)`, to see
            whether that hides what is exposed.
    """
    room = gpu_memory - reserve
    chosen = next((f for f in forecasts if f.needs <= room), None)
    if chosen is None:
        return Advice(None, _too_large(forecasts, room))
    reasons = [f"needs {gib(chosen.needs)} of {gib(room)}"]
    lower = [
        f
        for f in forecasts
        if f.strategy.stage < chosen.strategy.stage and _alike(f, chosen)
    ]
    if lower:
        reasons.append(
            f"stage {lower[-1].strategy.stage} would need {gib(lower[-1].needs)}"
        )
    plain = [
        f
        for f in forecasts
        if f.strategy.stage == chosen.strategy.stage
        and f.strategy.recipe == chosen.strategy.recipe
    ]
    if chosen.strategy.checkpointing and plain[0] is not chosen:
        saved = plain[0].needs - chosen.needs
        extra = chosen.trace.flops() / plain[0].trace.flops() - 1
        reasons.append(
            f"checkpointing saves {gib(saved)} of activations for {extra:.0%} more"
            " compute"
        )
    elif chosen.strategy.recipe != forecasts[0].strategy.recipe:
        reasons.append(f"with {forecasts[0].strategy.recipe} state nothing fits")
    return Advice(
        chosen.strategy, "; ".join([*reasons, *_about_the_wire(chosen, room, late)])
    )


def _alike(a: Forecast, b: Forecast) -> bool:
    return (
        a.strategy.recipe == b.strategy.recipe
        and a.strategy.checkpointing == b.strategy.checkpointing
    )


def _about_the_wire(
    chosen: Forecast, room: int, late: Callable[[Strategy], Forecast] | None
) -> list[str]:
    timing = chosen.timing()
    machine = chosen.setting.machine
    if chosen.peak is None or timing.exposed < EXPOSED * timing.step:
        return []
    found = [
        f"the wire keeps ranks waiting for {timing.exposed / timing.step:.0%} of a step"
    ]
    if (
        late is not None
        and chosen.strategy.stage < 3
        and (other := late(chosen.strategy)).needs <= room
    ):
        step = other.timing().step
        if step < WORTH * timing.step:
            found.append(
                "Buckets(gather_in_forward=True) shortens a step from"
                f" {timing.step:.3g} s to {step:.3g} s"
            )
    if chosen.strategy.stage == 3 and chosen.setting.world > machine.per_node:
        found.append(
            f"{gib(timing.across)} a step go between nodes: shards within a node"
            " (hybrid sharding, ZeRO++'s hpZ) would leave only gradients to them, and"
            " zerokern does not have them yet; larger micro-batches or more of them"
            " help, too"
        )
    else:
        found.append("larger micro-batches, or more of them under no_sync(), hide it")
    return found


def _too_large(forecasts: Sequence[Forecast], room: int) -> str:
    least = min(forecasts, key=lambda f: f.needs)
    said = (
        f"nothing fits: {least.strategy.title} needs the least, {gib(least.needs)} of"
        f" {gib(room)}"
    )
    if least.largest_unit > room / 2:
        return (
            f"{said}; its largest unit alone takes {gib(least.largest_unit)} with its"
            " gradients: split it within a node by tensor parallelism, or cut the"
            " model into smaller units with Buckets(units=...)"
        )
    if least.peak is not None and least.memory.total < room / 2:
        return (
            f"{said}; {gib(least.needs - least.memory.total)} are activations and"
            " buffers: take a smaller micro-batch"
        )
    return f"{said}; the state alone is {gib(least.memory.total)}: take more GPUs"
