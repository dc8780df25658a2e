"""`pytest bench/`: the fixture that times a case, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench import timing
from bench.cases import make
from bench.machine import describe
from bench.recipes import Unavailable, mebi

_rows: list[dict[str, Any]] = []
_absent: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of sizes."""
    parser.addoption(
        "--mi", help="only these sizes, in Mi elements: --mi 1 or --mi 1,16"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Drop the cases of other sizes."""
    chosen = config.getoption("--mi")
    if chosen is None:
        return
    sizes = set(mebi(chosen))
    other = [
        item
        for item in items
        if hasattr(item, "callspec") and item.callspec.params["numel"] not in sizes
    ]
    items[:] = [item for item in items if item not in other]
    config.hook.pytest_deselected(items=other)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A rank has one core in most of the world's CPU runs, and one thread is what can
    be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def score(benchmark: Any) -> Callable[[str, str, str, int], None]:
    """Return a function that times one case and leaves its row in `extra_info` and in
    the table."""

    def timed(op: str, recipe: str, provider: str, numel: int) -> None:
        try:
            case = make(op, recipe, provider, numel)
        except Unavailable as reason:
            if str(reason) not in _absent:
                _absent.append(str(reason))
            pytest.skip(str(reason))
        ceiling = timing.Ceiling(case.moved)
        benchmark.group = f"{op}, {recipe}, {numel >> 20} Mi"
        benchmark.pedantic(
            case.run, setup=ceiling, rounds=timing.ROUNDS, warmup_rounds=2
        )
        if benchmark.stats is not None:  # None under --benchmark-disable
            row = case.score(benchmark.stats.stats.median, ceiling.gb_per_s)
            benchmark.extra_info.update(row)
            _rows.append(row)

    return timed


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Say in `--benchmark-json` where the rows come from."""
    machine_info.update(describe())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table, and by name what could not run."""
    if not _rows:
        return
    ceiling = (
        "a copy with a cold L2"
        if timing.DEVICE == "cuda"
        else "an in-place multiply on one thread"
    )
    terminalreporter.section(
        f"bandwidth on {describe()['machine']}; ceiling: {ceiling}"
    )
    for text in (
        timing.HEADER,
        *map(timing.line, _rows),
        *(f"did not run: {reason}" for reason in _absent),
    ):
        terminalreporter.write_line(text)
