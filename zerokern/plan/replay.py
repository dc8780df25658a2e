"""How long a trace takes on a machine: computing and sending run beside each other, and
waits join them."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine
from .rehearsal import Launch, Trace, Wait, Work


@dataclass(frozen=True)
class Timing:
    """Seconds of one step."""

    step: float
    compute: float
    wire: float
    """Transfers, end to end."""
    exposed: float
    """Of these, what the rank waited for with nothing to compute."""
    inside: float
    """Bytes that a rank sends inside of its node."""
    across: float
    """Bytes that it sends to other nodes."""


def replay(trace: Trace, machine: Machine, world: int) -> Timing:
    """Return the time of a trace.

    A rank computes in order; its collectives take the wire one after the other, beside
    the computation; a wait lasts until the collective is done. Hence the first gather
    and the last reduction are exposed, and what overlaps is what the coordinator has
    launched ahead. Where ranks share the cores of a CPU there is no beside within a
    node: copying is work, too.

    Gathers in forward are waited for in the step after. The same step is taken to have
    gone before this one, and collectives are paired from the end, since first steps may
    differ.

    Args:
        trace: of one rank, recorded in a world of any size.
        machine: the rates.
        world: ranks; collectives are taken to be over all of them.
    """
    started = {event.number for event in trace.events if isinstance(event, Launch)}
    carries = any(
        isinstance(event, Wait) and event.number not in started
        for event in trace.events
    )
    before = _Run(trace, machine, world) if carries else None
    return _Run(trace, machine, world, before).timing()


class _Run:
    """One pass through a trace. Seconds are counted from its begin."""

    def __init__(
        self, trace: Trace, machine: Machine, world: int, before: _Run | None = None
    ) -> None:
        self._machine = machine
        self._world = world
        ranks = min(world, machine.per_node)
        self._shares = machine.cores is not None and ranks >= machine.cores
        self._launched = 0
        self._now = self._wire_free = 0.0
        self._done: dict[int, float] = {}
        """When each collective is done, by number."""
        self._compute = self._wire = self._exposed = self._inside = self._across = 0.0
        if before is not None:
            self._wire_free = before._wire_free - before._now
            for number, at in before._done.items():
                self._done[number - before._launched] = at - before._now
        for event in trace.events:
            if isinstance(event, Work):
                self._work(machine.seconds(event, world))
            elif isinstance(event, Launch):
                self._launch(event)
            elif isinstance(event, Wait):
                self._wait(event)

    def _work(self, seconds: float) -> None:
        self._now += seconds
        self._compute += seconds

    def _launch(self, event: Launch) -> None:
        inside, across = self._machine.split(event, self._world)
        self._inside += inside
        self._across += across
        seconds = self._machine.transfer(event, self._world)
        if self._shares:
            copying, seconds = self._machine.copying(event, self._world)
            self._work(copying)
        self._wire += seconds
        self._wire_free = max(self._now, self._wire_free) + seconds
        self._done[event.number] = self._wire_free
        self._launched += 1

    def _wait(self, event: Wait) -> None:
        late = max(0.0, self._done.get(event.number, self._now) - self._now)
        self._exposed += late
        self._now += late

    def timing(self) -> Timing:
        """Return what was counted."""
        return Timing(
            self._now,
            self._compute,
            self._wire,
            self._exposed,
            self._inside,
            self._across,
        )
