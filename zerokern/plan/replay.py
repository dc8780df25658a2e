"""How long a trace takes on a machine: computing and sending run beside each other, and waits join them."""

from __future__ import annotations

from dataclasses import dataclass

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

    A rank computes in order; its collectives take the wire one after the other, beside the computation; a wait lasts
    until the collective is done. Hence the first gather and the last reduction are exposed, and what overlaps is what
    the coordinator has launched ahead. Where ranks share the cores of a CPU there is no beside within a node:
    copying is work, too.

    Args:
        trace: of one rank, recorded in a world of any size.
        machine: the rates.
        world: ranks; collectives are taken to be over all of them.
    """
    timing = Timing()
    now, wire_free = 0.0, 0.0
    done: dict[int, float] = {}
    shared = machine.cores is not None and min(world, machine.per_node) >= machine.cores
    for event in trace.events:
        if isinstance(event, Work):
            seconds = machine.seconds(event, world)
            now += seconds
            timing.compute += seconds
        elif isinstance(event, Launch):
            inside, across = machine.split(event, world)
            timing.inside += inside
            timing.across += across
            seconds = machine.transfer(event, world)
            if shared:
                copying, seconds = machine.copying(event, world)
                now += copying
                timing.compute += copying
            timing.wire += seconds
            wire_free = max(now, wire_free) + seconds
            done[event.number] = wire_free
        elif isinstance(event, Wait):
            late = max(0.0, done.get(event.number, now) - now)
            timing.exposed += late
            now += late
    timing.step = now
    return timing
