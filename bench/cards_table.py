"""Cards -> Markdown. Nothing is compiled here, so cards of several Tritons can stand
side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Card = dict[str, Any]

HEAD = """\
# What the kernels compile to

Written by `python -m bench.cards --write`; do not edit. Triton compiles for any GPU on any machine: no number here was
measured on one. `tests/kernels/test_cards.py` holds the code to the bytes, the widths and the zeros.

- **bytes**: read + written per element, counted in the compiled code; in parentheses the recipe's floor, by hand.
- **spills, FMA**: bytes of registers spilled; multiply-adds fused in the path of the elements. Both must be 0.
- **shared**: bytes of shared memory of a program, most of them to change the layout of threads.
- **instructions**: issued per element of a tile, without the subroutines for subnormal operands of roots and quotients.
- **issue bound**: upper bound of the fraction of memory bandwidth that the issue of instructions alone leaves. Each
  counts as one, though roots, quotients and integers are slower; latency is not in it. So a kernel below 100 % cannot
  have the whole bandwidth, and one at 100 % may still miss it. Not given for AMD. The GPUs:
  {machines}.
- **loads, stores**: global accesses in the code, number x width in bits. Loops are unrolled, tails included.

Two values, a / b, are those of {versions}; one value means that they agree."""

COLUMNS: dict[str, Callable[[Card], str]] = {
    "bytes (floor)": lambda card: _bytes(card),
    "registers": lambda card: str(card["registers"]),
    "spills": lambda card: str(card["spill_bytes"]),
    "FMA": lambda card: str(card["contractions"]),
    "shared": lambda card: str(card["shared_bytes"]),
    "instructions": lambda card: (
        "" if card["instructions"] is None else f"{card['instructions']:.0f}"
    ),
    "issue bound": lambda card: (
        "" if card["issue_fraction"] is None else f"{card['issue_fraction']:.0%}"
    ),
    "loads": lambda card: _widths(card["loads"]),
    "stores": lambda card: _widths(card["stores"]),
}


def page(runs: Sequence[Sequence[Card]], machines: str) -> str:
    """Return the whole page, from the cards of one or more Tritons.

    Args:
        runs: the cards of each Triton.
        machines: the GPUs that stand for the targets, in words.
    """
    versions = " / ".join(f"Triton {run[0]['triton']}" for run in runs)
    return (
        HEAD.format(machines=machines, versions=versions) + "\n\n" + tables(runs) + "\n"
    )


def tables(runs: Sequence[Sequence[Card]]) -> str:
    """Return one table for each target, with a row for each recipe."""
    targets = list(dict.fromkeys(card["target"] for card in runs[0]))
    return "\n\n".join(
        f"## {target}\n\n{_table([_of(run, target) for run in runs])}"
        for target in targets
    )


def _of(run: Sequence[Card], target: str) -> dict[str, Card]:
    return {card["recipe"]: card for card in run if card["target"] == target}


def _table(runs: Sequence[dict[str, Card]]) -> str:
    # A column that is empty for a whole target says nothing.
    columns = {
        name: cell
        for name, cell in COLUMNS.items()
        if any(cell(card) for card in runs[0].values())
    }
    lines = [
        "| kernel | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for recipe in runs[0]:
        cells = (
            dict.fromkeys(cell(run[recipe]) for run in runs if recipe in run)
            for cell in columns.values()
        )
        lines.append(
            f"| {recipe} | " + " | ".join(" / ".join(values) for values in cells) + " |"
        )
    return "\n".join(lines)


def _bytes(card: Card) -> str:
    if card["read_bytes"] is None:
        return ""
    return (
        f"{card['read_bytes']:.5g} + {card['write_bytes']:.5g}"
        f" ({card['floor_bytes']:.5g})"
    )


def _widths(widths: dict[str, int]) -> str:
    return ", ".join(
        f"{n} x {bits}"
        for bits, n in sorted(widths.items(), key=lambda item: -int(item[0]))
    )
