"""What runs on several ranks, by name: registered once, run once on a group of ranks,
asked by many tests.

A script is a user's loop, which runs on torch's AdamW and on every stage and has to
agree. A case is what every rank does in a stage, and what a test makes of that is its
own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ranks
import torch
from oracle import STAGES, Run, apart

import zerokern

SMALL = zerokern.Buckets(bytes=6000)
"""Several buckets in a small model."""

AT_ONCE = 300
"""How many runs one group of ranks plays, which has to be done in `ranks.JOIN_S`."""

MANY = ("scripts.bounds", "scripts.regrouping", "scripts.resetting", "scripts.thawing")
"""Files with many variants of one thing, which on several ranks belong to the slow
tests."""

Loop = Callable[[Run], None]


@dataclass(frozen=True)
class Script:
    """A user's loop."""

    loop: Loop
    options: Mapping[str, Any]
    """Of `Run`."""
    stages: Sequence[int]
    """In which it can run."""
    exact: bool
    """Whether its weights have to be those of torch; 16-bit ones cannot."""


class Scripts:
    """All scripts, by name."""

    def __init__(self) -> None:
        self._scripts: dict[str, Script] = {}
        self._groups = functools.cache(self._play_group)
        self.expected = functools.cache(self._expected)

    def __iter__(self) -> Iterator[str]:
        return iter(self._scripts)

    def __getitem__(self, name: str) -> Script:
        return self._scripts[name]

    def add(
        self,
        name: str | None = None,
        *,
        stages: Sequence[int] = STAGES,
        exact: bool = True,
        **options: Any,
    ) -> Callable[[Loop], Loop]:
        """Register a loop, under its own name unless another is given."""

        def register(loop: Loop) -> Loop:
            title = name or loop.__name__
            assert title not in self._scripts, f"two scripts are called {title!r}"
            self._scripts[title] = Script(loop, options, stages, exact)
            return loop

        return register

    def of_common_model(self) -> list[str]:
        """Return the scripts that train `models.forked`, in any stage."""
        return [
            name
            for name, script in self._scripts.items()
            if "build" not in script.options and set(script.stages) == set(STAGES)
        ]

    def runs(self) -> list[tuple[str, int]]:
        """Return every script with every stage that it can run in."""
        return [(n, s) for n, script in self._scripts.items() for s in script.stages]

    def play(self, name: str, stage: int | None, at: int, **more: Any) -> Any:
        """Run one script; stage None is torch's AdamW, which plays `at` ranks."""
        script = self._scripts[name]
        torch.manual_seed(0)
        run = Run(stage, at, **{"buckets": SMALL, **script.options, **more})
        script.loop(run)
        return run.result()

    def _expected(self, name: str, at: int) -> Any:
        """Return what torch's AdamW on one process makes of a script."""
        return self.play(name, None, at)

    def is_one_of_many(self, name: str) -> bool:
        """Return whether a script is a variant in one of the files `MANY`."""
        loop = self._scripts[name].loop
        return getattr(loop, "func", loop).__module__ in MANY

    def played(self, name: str, stage: int, at: int) -> list[Any]:
        """Return what a script has returned on each rank in a stage. It is run with all
        others, or with all variants, if it is one."""
        return self._groups(at, self.is_one_of_many(name))[name, stage]

    def _play_group(self, at: int, of_many: bool) -> ranks.Cases:
        """Return scripts in all their stages, by (name, stage), on few groups."""
        done = ranks.Cases()
        runs = [run for run in self.runs() if self.is_one_of_many(run[0]) == of_many]
        for first in range(0, len(runs), AT_ONCE):
            some = runs[first : first + AT_ONCE]
            part = ranks.run_cases(
                at, {(n, s): functools.partial(self.play, n, s, at) for n, s in some}
            )
            done.values |= part.values
            done.errors |= part.errors
        return done


SCRIPTS = Scripts()
script = SCRIPTS.add


def assert_like_torch(result: Any, expected: Any) -> None:
    """Compare parameters, moments, step counters and whatever the script observed."""
    assert apart(result["params"], expected["params"]) == {}
    ours = {
        key: value
        for key, value in result["state"].items()
        if key in expected["state"] or value.any()
    }
    # Squares double a relative difference.
    assert apart(ours, expected["state"], limit=1e-4) == {}
    assert apart(result["seen"], expected["seen"]) == {}


class Cases:
    """Functions of a stage, by name. Call it to register one."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, int], Callable[[], Any]] = {}
        self.done = functools.cache(self._done)

    def __call__(
        self,
        function: Callable[[int], Any] | None = None,
        *,
        stages: Sequence[int] = STAGES,
    ) -> Callable[..., Any]:
        """Register what every rank does in a stage. A decorator, with or without
        stages."""

        def register(function: Callable[[int], Any]) -> Callable[[int], Any]:
            for stage in stages:
                key = function.__name__, stage
                assert key not in self._functions, f"two cases are called {key}"
                self._functions[key] = functools.partial(function, stage)
            return function

        return register if function is None else register(function)

    def _done(self, at: int) -> ranks.Cases:
        """Return all of them, by (name, stage), on one group of ranks."""
        return ranks.run_cases(at, self._functions)


@functools.cache
def cases_of(folder: str) -> Cases:
    """Return the cases of a folder of tests: its modules share them, so that they share
    the group of ranks that runs them."""
    return Cases()
