"""Forecasts as tables, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .advice import Advice
from .forecast import Forecast
from .quantities import gib
from .script import Outcome

ROLES = ("parameters", "gradients", "master", "moments", "tables")
AT_THE_PEAK = ("gathered units", "buckets", "activations")
COLOURS = (
    "#4477aa",
    "#66ccee",
    "#ccbb44",
    "#ee6677",
    "#bbbbbb",
    "#228833",
    "#ddaa33",
    "#aa3377",
)


def parts_of(forecast: Forecast) -> dict[str, int]:
    """Return the bytes at the peak by role."""
    parts = {role: getattr(forecast.memory, role) for role in ROLES}
    if forecast.peak is not None:
        parts["gathered units"] = forecast.peak.gathered
        parts["buckets"] = forecast.peak.buckets
        parts["activations"] = max(0, forecast.peak.bytes - sum(parts.values()))
    else:
        parts["others"] = forecast.others
    return parts


def table(forecasts: Sequence[Forecast], room: int, per: str) -> list[list[str]]:
    """Return what to print, a heading row first: everything per rank, but throughput.

    Args:
        forecasts: one row each.
        room: bytes that a rank may use.
        per: what throughput counts.
    """
    heading = [
        "",
        *ROLES,
        "padding in these",
        *AT_THE_PEAK,
        "peak",
        "fits",
        "sends",
        "to other nodes",
        "step",
        f"{per}/s",
        "MFU",
    ]
    rows = [heading]
    for forecast in forecasts:
        parts = parts_of(forecast)
        cells = [*(gib(parts[role]) for role in ROLES), gib(forecast.padding)]
        if forecast.peak is None:
            cells += [
                *["?"] * (len(AT_THE_PEAK) + 1),
                "perhaps" if forecast.needs <= room else "no",
            ]
            cells += [
                f"{sum(forecast.sent().values()) / 1e9:.3g} GB",
                "?",
                "?",
                "?",
                "?",
            ]
        else:
            timing = forecast.timing()
            cells += [gib(parts[part]) for part in AT_THE_PEAK] + [
                gib(forecast.peak.bytes)
            ]
            cells += ["yes" if forecast.needs <= room else "no"]
            cells += [
                f"{sum(forecast.sent().values()) / 1e9:.3g} GB",
                f"{timing.across / 1e9:.3g} GB",
            ]
            cells += [
                f"{timing.step:.3g} s",
                f"{forecast.throughput():,.0f}",
                f"{forecast.utilisation():.0%}",
            ]
        rows.append([forecast.strategy.title, *cells])
    return rows


def as_json(forecasts: Sequence[Forecast], advice: Advice, room: int) -> dict[str, Any]:
    """Return everything, for programs."""
    return {
        "strategies": [_one(forecast, room) for forecast in forecasts],
        "recommended": None if advice.strategy is None else advice.strategy.title,
        "reason": advice.reason,
    }


def _one(forecast: Forecast, room: int) -> dict[str, Any]:
    timing = forecast.timing() if forecast.peak is not None else None
    return {
        "strategy": forecast.strategy.title,
        "stage": forecast.strategy.stage,
        "recipe": forecast.strategy.recipe,
        "checkpointing": forecast.strategy.checkpointing,
        "world": forecast.setting.world,
        "params": forecast.params,
        "persistent_bytes": asdict(forecast.memory),
        "padding_bytes": forecast.padding,
        "other_bytes": forecast.others,
        "peak": None if forecast.peak is None else asdict(forecast.peak),
        "fits": forecast.needs <= room,
        "sent_bytes": forecast.sent(),
        "inside_bytes": timing and timing.inside,
        "across_bytes": timing and timing.across,
        "step_s": timing and timing.step,
        "compute_s": timing and timing.compute,
        "wire_s": timing and timing.wire,
        "exposed_s": timing and timing.exposed,
        "per_second": timing and forecast.throughput(),
        "utilisation": timing and forecast.utilisation(),
        "collectives": [call._asdict() for call in forecast.calls],
    }


def outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    """Return everything that a dry run found, for programs."""
    return {
        "rank": outcome.rank,
        "world": outcome.world,
        "steps": outcome.steps,
        "params": outcome.params,
        "persistent_bytes": [asdict(memory) for memory in outcome.memory],
        "live_bytes": outcome.live,
        "peak": asdict(outcome.peak),
        "collectives": [[call._asdict() for call in calls] for calls in outcome.calls],
        "timeline": outcome.timeline,
    }


def outcome_tables(outcome: Outcome) -> list[list[list[str]]]:
    """Return what to print of a dry run: collectives of the last step, and what held
    the bytes at the peak."""
    tables = []
    for calls, memory in zip(outcome.calls, outcome.memory, strict=True):
        last = [
            call
            for call in calls
            if call.step == outcome.steps - 1 and call.phase != "init"
        ]
        found: dict[tuple[str, str, str], list[int]] = {}
        for call in last:
            known = found.setdefault((call.phase, call.op, call.dtype), [0, 0])
            known[0] += 1
            known[1] += call.bytes
        tables.append(
            [
                ["collectives of the last step", "calls", "bytes sent"],
                *(
                    [" ".join(key), f"{number:,}", f"{sent:,}"]
                    for key, (number, sent) in found.items()
                ),
            ]
        )
        tables.append(
            [
                ["between steps", "bytes"],
                *([role, f"{value:,}"] for role, value in asdict(memory).items()),
                ["total", f"{memory.total:,}"],
            ]
        )
    peak = outcome.peak
    held = [[maker, f"{size:,}"] for maker, size in list(peak.holders.items())[:12]]
    tables.append(
        [
            ["at the peak", "bytes"],
            [f"reached in {peak.where}", f"{peak.bytes:,}"],
            *held,
        ]
    )
    return tables


def worlds(largest: int) -> list[int]:
    """Return the numbers of ranks that a picture shows."""
    counts = [2**k for k in range(largest.bit_length()) if 2**k < largest]
    return [*counts, largest]


def plot(
    forecasts: Sequence[Forecast],
    room: int,
    path: Path,
    per: str,
) -> None:
    """Draw throughput against ranks for each strategy, and the bytes at the peak.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib: pip install 'zerokern[plan]'"
        ) from None
    figure = Figure(figsize=(12, 5), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for colour, forecast in zip(COLOURS * len(forecasts), forecasts, strict=False):
        if forecast.peak is not None:
            counts = worlds(forecast.setting.world)
            style = (
                "--"
                if forecast.strategy.recipe != forecasts[0].strategy.recipe
                else "-"
            )
            speed.plot(
                counts,
                [forecast.throughput(w) for w in counts],
                style,
                color=colour,
                label=forecast.strategy.title,
            )
    speed.set(
        xscale="log",
        yscale="log",
        xlabel="GPUs",
        ylabel=f"{per} per second",
        title="Throughput",
    )
    speed.legend(fontsize="small")
    titles = [forecast.strategy.title for forecast in forecasts]
    below = [0.0] * len(forecasts)
    for colour, role in zip(COLOURS, [*ROLES, *AT_THE_PEAK], strict=True):
        heights = [parts_of(forecast).get(role, 0) / 2**30 for forecast in forecasts]
        memory.bar(titles, heights, bottom=below, label=role, color=colour)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    memory.axhline(
        room / 2**30, color="black", linestyle=":", label="a GPU, less the reserve"
    )
    memory.set(ylabel="GiB per rank", title="Bytes at the peak")
    memory.tick_params(axis="x", rotation=30)
    memory.legend(fontsize="small")
    figure.savefig(path, dpi=120)
