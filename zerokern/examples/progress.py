"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

LINES_PER_RUN = 10


class Progress:
    """Silent: what every rank but the first shows. Also the interface of the two
    others."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def start(self, name: str, steps: int) -> None:
        """Begin to show the run `name`."""

    def advance(self, loss: float, tokens_per_second: float) -> None:
        """One step is done; `loss` in nats per byte."""


class Lines(Progress):
    """Ten lines for a run."""

    def start(self, name: str, steps: int) -> None:
        """Begin to show the run `name`."""
        self.name = name
        self.steps = steps
        self.done = 0

    def advance(self, loss: float, tokens_per_second: float) -> None:
        """Print a line for the first step, the last one, and every tenth of the run."""
        self.done += 1
        if (
            self.done in (1, self.steps)
            or self.done % max(1, self.steps // LINES_PER_RUN) == 0
        ):
            where = f"{self.name:<12} step {self.done:>5}/{self.steps}"
            print(
                f"{where}   loss {loss:6.4f}   {tokens_per_second:>9,.0f} tokens/s",
                flush=True,
            )


class Bar(Progress):
    """One bar for each run, drawn by rich."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        self.bars: Any = RichProgress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:6.4f}"),
            TextColumn("{task.fields[speed]:>7,.0f} tokens/s"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )

    def __enter__(self) -> Bar:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def start(self, name: str, steps: int) -> None:
        """Draw a bar for the run `name`."""
        self.task = self.bars.add_task(name, total=steps, loss=float("nan"), speed=0.0)

    def advance(self, loss: float, tokens_per_second: float) -> None:
        """Move the bar on by a step."""
        self.bars.update(self.task, advance=1, loss=loss, speed=tokens_per_second)


def progress_for(rank: int) -> Progress:
    """Return a bar on a terminal that has rich, lines elsewhere, and silence on every
    rank but 0."""
    if rank != 0:
        return Progress()
    try:
        return Bar() if sys.stdout.isatty() else Lines()
    except ImportError:
        return Lines()
