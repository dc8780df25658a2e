"""Rows of measurements -> Markdown. Nothing is measured here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .peers import BASELINE

Row = dict[str, Any]

BEGIN, END = "<!-- begin: python -m bench.compare --table -->", "<!-- end -->"
SAME = ("size", "dtype", "world", "machine", "torch", "zerokern", "date")
"""What the rows of one table have in common."""

HEADER = (
    "peer",
    "step ms (min)",
    "x ddp [low-high]",
    "CPU ms per rank (x ddp)",
    "fwd / bwd / opt ms",
    "state MB",
    "RSS growth MB",
    "sent MB",
    "sent / ideal",
    "last loss",
    "max loss difference",
    "update difference",
)


def read(path: Path) -> list[Row]:
    """Return the rows of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def render(rows: Iterable[Row]) -> str:
    """Return one table for each size, dtype, world and machine, in the order in which
    they were measured."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in SAME), []).append(row)
    return "\n\n".join(_table(key, group) for key, group in groups.items())


def _table(key: tuple[Any, ...], rows: Sequence[Row]) -> str:
    size, dtype, world, machine, torch, commit, date = key
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    rounds = 1 + max(row["round"] for row in rows)
    baseline = {
        row["round"]: row
        for row in rows
        if row["peer"] == BASELINE and "step_ms" in row
    }
    lines = [
        (
            f"**{size}, {dtype}, {world} ranks** ({machine}; torch {torch}; zerokern"
            f" {commit}; {date}; {rounds} rounds)"
        ),
        "",
        f"| {' | '.join(HEADER)} |",
        "|" + "---|" * len(HEADER),
    ]
    absent = []
    for peer in peers:
        measured = [row for row in rows if row["peer"] == peer and "step_ms" in row]
        if measured:
            lines.append(f"| {' | '.join(_cells(peer, measured, baseline))} |")
        for row in rows:
            if row["peer"] == peer and "step_ms" not in row:
                absent.append(f"- {peer}: {row.get('skipped') or row.get('error')}")
    if absent:
        lines += ["", "Did not run:", "", *dict.fromkeys(absent)]
    return "\n".join(lines)


def _cells(peer: str, rows: Sequence[Row], baseline: dict[int, Row]) -> list[str]:
    pairs = [(row, baseline[row["round"]]) for row in rows if row["round"] in baseline]
    step = [row["step_ms"] / base["step_ms"] for row, base in pairs]
    cpu = [row["cpu_ms"] / base["cpu_ms"] for row, base in pairs]
    differences = [
        max(abs(x - y) for x, y in zip(row["losses"], base["losses"], strict=True))
        for row, base in pairs
    ]
    distances = [row["distance"] for row in rows if "distance" in row]
    return [
        peer,
        (
            f"{_median(rows, 'step_ms'):.0f}"
            f" ({min(row['step_min_ms'] for row in rows):.0f})"
        ),
        (
            f"{statistics.median(step):.2f} [{min(step):.2f}-{max(step):.2f}]"
            if step
            else ""
        ),
        f"{_median(rows, 'cpu_ms'):.0f}"
        + (f" ({statistics.median(cpu):.2f})" if cpu else ""),
        " / ".join(
            f"{_median(rows, part + '_ms'):.0f}"
            for part in ("forward", "backward", "optimizer")
        ),
        f"{_median(rows, 'state_bytes') / 1e6:.1f}",
        f"{_median(rows, 'rss_bytes') / 1e6:.0f}",
        *_wire(rows),
        f"{rows[0]['losses'][-1]:.5f}",
        f"{max(differences):.1e}" if differences else "",
        f"{max(distances):.1e}" if distances else "",
    ]


def _wire(rows: Sequence[Row]) -> list[str]:
    """Return bytes sent and their ratio to the ideal; without a network of its own,
    those the system has logged."""
    ideal = rows[0]["ideal_bytes"]
    sent = [row["wire_bytes"] for row in rows if row["wire_bytes"] is not None]
    logged = rows[0]["logged_bytes"]
    if sent:
        ratio = f"{statistics.median(sent) / ideal:.3f}"
        return [
            f"{statistics.median(sent) / 1e6:.1f}",
            ratio + (f" (log: {logged / ideal:.4f})" if logged else ""),
        ]
    return (
        [f"{logged / 1e6:.1f} (log)", f"{logged / ideal:.4f}"] if logged else ["", ""]
    )


def _median(rows: Sequence[Row], field: str) -> float:
    return statistics.median(row[field] for row in rows)


def write_into(document: Path, text: str) -> None:
    """Replace what stands between the two markers of a document.

    Raises:
        ValueError: the document lacks a marker.
    """
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"{document} lacks the lines {BEGIN!r} and {END!r}; put them where the"
            " table shall be"
        )
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
