"""The time of a step: what a machine makes of the work and transfers of a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerokern import Buckets
from zerokern.plan.forecast import Setting, Strategy, forecast
from zerokern.plan.machine import Machine
from zerokern.plan.rehearsal import Launch, Trace, Wait, Work
from zerokern.plan.replay import Timing, replay
from zerokern.plan.workload import of_count

EVEN = Machine(
    compute=1.0,
    memory=1.0,
    per_operation=0.0,
    intra=1.0,
    inter=1.0,
    latency=0.0,
    per_node=4,
)


def launch(number: int, sent: int) -> Launch:
    return Launch(number, "reduce_scatter", 4, sent)


def test_a_transfer_runs_beside_what_is_computed_until_it_is_waited_for() -> None:
    trace = Trace(
        [launch(1, 5), Work("forward", flops=3), Wait(1), Work("forward", flops=2)]
    )
    timing = replay(trace, EVEN, 4)
    assert (timing.step, timing.compute, timing.wire, timing.exposed) == (7, 5, 5, 2)


def test_transfers_take_the_wire_one_after_the_other() -> None:
    trace = Trace(
        [launch(1, 5), launch(2, 5), Wait(1), Work("forward", flops=3), Wait(2)]
    )
    assert replay(trace, EVEN, 4).step == 10


def test_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    """Stage 3 with one unit ahead, whose gathers take less than its computation."""
    events: list[Any] = [launch(0, 2), Wait(0)]
    for unit in range(1, 5):
        events += [launch(unit, 2), Work("forward", flops=3), Wait(unit)]
    events += [Work("forward", flops=3), launch(9, 2), Wait(9)]
    timing = replay(Trace(events), EVEN, 4)
    assert timing.exposed == 2 + 2
    assert timing.step == 5 * 3 + 4


def test_a_step_waits_for_the_gathers_of_the_one_before() -> None:
    """Two units; gathers are launched at the end of a step and waited for in the next
    forward."""
    unit = Work("forward", flops=3)
    events = [Wait(1), unit, Wait(2), unit, launch(3, 2), launch(4, 7)]
    timing = replay(Trace(events), EVEN, 4)
    # The second gather takes until 2 + 7.
    assert timing.exposed == 2 + 4
    assert timing.step == 2 + 3 + 4 + 3


def test_a_rehearsal_of_gathers_in_forward_takes_them_into_account() -> None:
    workload = of_count(int(30e6), 4, batch=1, sequence=64, dtype=torch.float32)
    slow = Machine(intra=1e9, inter=1e9)

    def timing(*, late: bool) -> Timing:
        buckets = Buckets(bytes=2**20, gather_in_forward=late)
        setting = Setting(world=8, machine=slow, buckets=buckets)
        return forecast(workload, Strategy(stage=1), setting).timing()

    early, late = timing(late=False), timing(late=True)
    assert late.wire == pytest.approx(early.wire)
    assert early.wire * 0.9 < late.step < early.step


def test_bytes_between_nodes_depend_on_the_algorithm() -> None:
    native = Machine(per_node=4, native_gather=True)
    direct = Machine(per_node=4, native_gather=False)
    gather = Launch(1, "all_gather", 16, 1500)
    reduction = Launch(2, "reduce_scatter", 16, 1500)

    # 3 of 15 peers are on the node.
    assert native.split(reduction, 16) == (300, 1200)
    assert direct.split(gather, 16) == (300, 1200)
    # A ring crosses once for the four ranks of a node.
    assert native.split(gather, 16) == (1125, 375)
    # In a world of 4 it sends 3/4 of the buffer instead of 15/16.
    assert native.split(gather, 4) == (1200, 0)


def test_ranks_that_share_cores_slow_each_other_down() -> None:
    machine = Machine(
        compute=1.0,
        intra=1.0,
        inter=1.0,
        latency=0.0,
        per_operation=0.0,
        cores=2.0,
        per_node=64,
    )
    trace = Trace([launch(1, 6), Work("forward", flops=3), Wait(1)])
    assert replay(trace, machine, 2).step == pytest.approx(3 + 6 / 1.5, rel=1e-6)
    assert replay(trace, machine, 4).step == pytest.approx(2 * (3 + 6), rel=1e-6)
