"""The list of faults that users of other systems reported names tests that exist."""

from __future__ import annotations

import re

from repository import TESTS

LIST = TESTS / "reported_faults.md"


def names(pattern: str, text: str) -> list[str]:
    """Return the first group of every match."""
    return re.findall(pattern, text, re.MULTILINE)


def test_every_test_that_is_named_exists_once() -> None:
    modules = [path.read_text() for path in TESTS.rglob("test_*.py")]
    defined = names(r"^def (test_\w+)\(", "\n".join(modules))
    named = set(names(r"`(test_\w+)`", LIST.read_text()))
    assert len(named) > 100
    assert {name: defined.count(name) for name in named} == dict.fromkeys(named, 1)


def test_every_report_has_a_test() -> None:
    """A report is an item; the items below it are its tests."""
    covered, _, _ = LIST.read_text().partition("## What cannot occur")
    reports = re.split(r"^- ", covered, flags=re.MULTILINE)[1:]
    assert len(reports) > 80
    for report in reports:
        source, *tests = report.strip().splitlines()
        listed = [line for line in tests if re.fullmatch(r"  - `test_\w+`", line)]
        assert listed, source
