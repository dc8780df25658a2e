"""How long a trace takes on a machine: computing and sending run beside each other, and
waits join them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .machine import Machine
from .rehearsal import Launch, Trace, Wait, Work


@dataclass
class Timing:
    """Seconds of one step."""

    step: float = 0.0
    compute: float = 0.0
    wire: float = 0.0
    """Transfers, end to end."""
    exposed: float = 0.0
    """Of these, what the rank waited for with nothing to compute."""
    inside: float = 0.0
    """Bytes that a rank sends inside of its node."""
    across: float = 0.0
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
    before = _Clock()
    if carries:
        _run(trace, machine, world, before)
        before = _Clock(
            wire_free=before.wire_free - before.now,
            done={
                number - len(started): at - before.now
                for number, at in before.done.items()
            },
        )
    return _run(trace, machine, world, before)


@dataclass
class _Clock:
    """Seconds since a step began, or before it."""

    now: float = 0.0
    wire_free: float = 0.0
    done: dict[int, float] = field(default_factory=dict)
    """When each collective is done, by number."""


def _run(trace: Trace, machine: Machine, world: int, clock: _Clock) -> Timing:
    timing = Timing()
    shared = machine.cores is not None and min(world, machine.per_node) >= machine.cores
    for event in trace.events:
        if isinstance(event, Work):
            seconds = machine.seconds(event, world)
            clock.now += seconds
            timing.compute += seconds
        elif isinstance(event, Launch):
            inside, across = machine.split(event, world)
            timing.inside += inside
            timing.across += across
            seconds = machine.transfer(event, world)
            if shared:
                copying, seconds = machine.copying(event, world)
                clock.now += copying
                timing.compute += copying
            timing.wire += seconds
            clock.wire_free = max(clock.now, clock.wire_free) + seconds
            clock.done[event.number] = clock.wire_free
        elif isinstance(event, Wait):
            late = max(0.0, clock.done.get(event.number, clock.now) - clock.now)
            timing.exposed += late
            clock.now += late
    timing.step = clock.now
    return timing
