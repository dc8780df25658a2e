"""Parts of a model that are used by some ranks, in some steps, or several times."""

from __future__ import annotations

import torch
from oracle import Run
from registry import script

import zerokern


@script()
def unused_on_all_ranks_is_left_alone(run: Run) -> None:
    for step, use in enumerate(("both", "left", "right", "both")):
        run.optimizer.zero_grad()
        run.backward(step, use=use)
        run.step()


@script()
def unused_on_one_rank_counts_as_zeros(run: Run) -> None:
    """The last rank does not use the right branch."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, step=step: run.loss(
                step, rank, use="left" if rank == 0 else "both"
            ),
        )
        run.step()


@script()
def used_on_one_rank_only(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, step=step: run.loss(
                step, rank, use="both" if rank == run.ranks - 1 else "left"
            ),
        )
        run.step()


def _accumulate_where_one_rank_uses_nothing(run: Run, *, zero: bool) -> None:
    for step in range(3):
        if zero:
            run.optimizer.zero_grad()
        run.backward(
            10 * step,
            lambda rank, step=step: run.loss(
                10 * step, rank, use="none" if rank else "both"
            ),
        )
        run.backward(
            10 * step + 1,
            lambda rank, step=step: run.loss(
                10 * step + 1, rank, use="both" if rank else "none"
            ),
        )
        run.step()


@script(buckets=zerokern.Buckets(bytes=1))
def a_bucket_is_unused_on_one_rank_in_each_of_two_backwards(run: Run) -> None:
    """Such a rank has no p.grad that could tell whether the others'
    contributions are still wanted."""
    _accumulate_where_one_rank_uses_nothing(run, zero=True)


@script(buckets=zerokern.Buckets(bytes=1))
def a_bucket_is_unused_on_one_rank_and_never_zeroed(run: Run) -> None:
    _accumulate_where_one_rank_uses_nothing(run, zero=False)


@script()
def a_unit_is_skipped_and_the_order_changes(run: Run) -> None:
    """The order of the last iteration is a hint only."""
    for step, order in enumerate(((0, 1), (1,), (1, 0), (), (0, 1))):
        run.optimizer.zero_grad()
        run.backward(step, order=order)
        run.step()


@script()
def a_unit_is_used_twice(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, order=(0, 0, 1, 0))
        run.step()


@script()
def two_forwards_one_backward(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(
            step,
            lambda rank, step=step: (
                run.loss(2 * step, rank) + run.loss(2 * step + 1, rank)
            ),
        )
        run.step()


@script(groups=lambda model: [p for p in model.parameters() if p.requires_grad])
def a_frozen_parameter_stays(run: Run) -> None:
    run.model.blocks[0].up.weight.requires_grad_(False)
    before = run.model.blocks[0].up.bias.shape
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
    assert run.model.blocks[0].up.bias.shape == before


@script()
def blocks_called_directly(run: Run) -> None:
    """A part of the model, outside of the model's forward."""
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    x = torch.linspace(-1, 1, 17)
    run.backward(1, lambda rank: run.model.blocks[1]((rank + 1) * x).square().mean())
    run.step()
    run.optimizer.zero_grad()
    run.backward(2)
    run.step()
