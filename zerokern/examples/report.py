"""The results of a job, as a table, a plot and a file: each measured number beside the
one that theory gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .theory import StateBytes

MIB = 2**20
ROLES = ("parameters", "gradients", "master", "moments", "total")
ROLE_COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#ee6677")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, as rank 0 saw it."""

    name: str
    losses: list[float]
    """Training loss of the global batch at every step, in nats per byte."""
    validation_loss: float
    """After the last step, in nats per byte."""
    step_ms: float
    """Median over the steps."""
    tokens_per_second: float
    """Over all ranks, at the median step."""
    state: StateBytes
    """Held by this rank."""
    state_theory: StateBytes
    sent: float
    """Bytes that this rank sent in a step."""
    sent_theory: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The runs of a job, the plain one first, and what is needed to repeat it."""

    setting: dict[str, str | int | float]
    runs: Sequence[Run]

    def largest_difference(self) -> float:
        """Return the largest distance of any run's training loss from the first run's
        at the same step, in nats."""
        first, *others = self.runs
        return max(
            (
                abs(a - b)
                for run in others
                for a, b in zip(first.losses, run.losses, strict=True)
            ),
            default=0.0,
        )

    def rows(self) -> list[list[str]]:
        """Return the closing table, a heading row first. Sizes in MiB, "measured
        (theory)"."""

        def row(heading: str, *cells: str) -> list[str]:
            return [heading, *cells]

        runs = self.runs
        table = [
            row("", *(run.name for run in runs)),
            row(
                "validation loss, nats/byte",
                *(f"{run.validation_loss:.4f}" for run in runs),
            ),
            row("step, median ms", *(f"{run.step_ms:.1f}" for run in runs)),
            row("tokens/s", *(f"{run.tokens_per_second:,.0f}" for run in runs)),
        ]
        for role in ROLES:
            cells = (
                _beside(getattr(run.state, role), getattr(run.state_theory, role))
                for run in runs
            )
            table.append(row(f"{role}, MiB/rank", *cells))
        table.append(
            row(
                "sent, MiB/rank and step",
                *(_beside(run.sent, run.sent_theory) for run in runs),
            )
        )
        return table

    def markdown(self) -> str:
        """Return the table as aligned Markdown."""
        rows = self.rows()
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            [
                row[0].ljust(first),
                *(
                    cell.rjust(width)
                    for cell, width in zip(row[1:], others, strict=True)
                ),
            ]
            for row in rows
        ]
        lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def write(self, folder: Path) -> list[Path]:
        """Write results.json, table.md and, where matplotlib is installed, plot.png;
        return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        results = folder / "results.json"
        table = folder / "table.md"
        plot = folder / "plot.png"
        content = {"largest_loss_difference": self.largest_difference(), **asdict(self)}
        results.write_text(json.dumps(content, indent=1) + "\n")
        table.write_text(self.markdown())
        written = [results, table]
        try:
            self._plot(plot)
            written.append(plot)
        except ImportError:
            print(
                "No plot: matplotlib is not installed (pip install 'zerokern[demo]')."
            )
        return written

    def _plot(self, path: Path) -> None:
        """Draw the loss curves beside the bytes of model state."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.2), layout="constrained")
        losses, memory = figure.subplots(1, 2)
        for index, run in enumerate(self.runs):
            # Coinciding curves would hide each other: the first is wide and pale, the
            # others dashed on top of it.
            style = (
                {"linewidth": 5, "alpha": 0.3}
                if index == 0
                else {"linewidth": 1.4, "dashes": (4, 2 + 2 * index)}
            )
            losses.plot(
                range(1, len(run.losses) + 1), run.losses, label=run.name, **style
            )
        losses.set(xlabel="step", ylabel="training loss, nats per byte", title="Loss")
        losses.legend(frameon=False)
        names = [run.name for run in self.runs]
        below = [0.0] * len(names)
        for role, colour in zip(ROLES[:-1], ROLE_COLOURS, strict=True):
            heights = [getattr(run.state, role) / MIB for run in self.runs]
            if not any(heights):
                continue
            memory.bar(
                names, heights, bottom=below, color=colour, width=0.6, label=role
            )
            below = [low + height for low, height in zip(below, heights, strict=True)]
        theory = [run.state_theory.total / MIB for run in self.runs]
        left, right = (
            [index + side for index in range(len(names))] for side in (-0.34, 0.34)
        )
        memory.hlines(theory, left, right, color="black", label="theory")
        memory.set(
            ylabel="MiB per rank", title="Model state", ylim=(0, 1.35 * max(below))
        )
        memory.legend(frameon=False, ncols=3, loc="upper center")
        for axes in (losses, memory):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)


def _beside(measured: float, theory: float) -> str:
    return f"{measured / MIB:.2f} ({theory / MIB:.2f})" if measured or theory else "-"
