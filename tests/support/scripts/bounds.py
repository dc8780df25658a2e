"""Bounds on gradients, as torch's functions keep them: several for one step, by other
norms, of every element, before further backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from oracle import Run
from registry import script

DULL = {"eps": 1e-2}
"""An eps beside which the size of a gradient matters to Adam, as it does after
clipping."""
INF = float("inf")


def _begin(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward(step)


# ---------------------------------------------------------------------- several bounds


def _each(run: Run, bounds: Sequence[float]) -> None:
    """Clip to one after the other; each returns what the one before has left."""
    for step in range(3):
        _begin(run, step)
        for bound in bounds:
            run.clip(bound)
        run.step()


SEVERAL = {
    "a bound, then the norm for a log": (0.1, INF),
    "the norm for a log, then a bound": (INF, 0.1),
    "a smaller bound, then a larger one": (0.1, 0.5),
    "a larger bound, then a smaller one": (0.5, 0.1),
    "the same bound twice": (0.1, 0.1),
    "smaller and smaller bounds": (0.5, 0.2, 0.1, 0.05),
    "bounds that hold already": (1e3, 1e4, 1e2),
    "a bound of nothing, then another": (0.0, 0.1),
}
for _name, _bounds in SEVERAL.items():
    script(_name, **DULL)(functools.partial(_each, bounds=_bounds))


@script(max_grad_norm=0.1, **DULL)
def an_option_tighter_than_the_call(run: Run) -> None:
    _each(run, (0.3,))


@script(max_grad_norm=0.3, **DULL)
def an_option_looser_than_the_call(run: Run) -> None:
    _each(run, (0.1,))


@script(max_grad_norm=0.2, **DULL)
def an_option_beside_calls_in_every_micro_batch(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(3):
            run.backward(10 * step + micro)
            run.clip(0.15)
        run.step()


# ------------------------------------------------------------- before another backward


@script(**DULL)
def a_bound_in_every_micro_batch(run: Run) -> None:
    """Of the sum so far. The micro-batches weigh more and more."""
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(3):
            index = 10 * step + micro
            run.backward(index, lambda r, i=index, m=micro: 5.0**m * run.loss(i, r))
            run.clip(0.1)
        run.step()


@script(**DULL)
def a_bound_before_the_last_backward(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip(0.1)
        run.backward(step + 10)
        run.note_norm()
        run.step()


@script(**DULL)
def a_bound_before_a_backward_without_sync(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip(0.1)
        with run.no_sync():
            run.backward(step + 10)
        run.step()


@script(**DULL)
def a_bound_on_what_was_not_synchronized_yet(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        with run.no_sync():
            run.backward(step)
        run.clip(0.1)
        run.backward(step + 10)
        run.clip(0.2)
        run.step()


@script(**DULL)
def a_bound_before_a_backward_of_other_parts(run: Run) -> None:
    """The right branch is not in what was clipped."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, use="left")
        run.clip(0.1)
        run.backward(step + 10, use="right", order=(1,))
        run.clip(INF)
        run.step()


@script(**DULL)
def a_bound_where_gradients_are_never_zeroed(run: Run) -> None:
    """What was clipped for one step is there, clipped, in the next one."""
    for step in range(4):
        run.backward(step)
        run.clip(0.1)
        run.step()


@script(**DULL)
def a_bound_before_two_steps_of_one_gradient(run: Run) -> None:
    for step in range(2):
        _begin(run, step)
        run.clip(0.1)
        run.step()
        run.step()


@script(**DULL)
def a_bound_after_which_gradients_are_zeroed_in_place(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.clip(0.1)
        run.step()
        run.optimizer.zero_grad(set_to_none=False)


@script(**DULL)
def a_bound_before_one_gradient_is_set_by_hand(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip(0.1)
        shape = run.model.head.bias.shape
        run.set_gradient("head.bias", lambda rank, s=shape: torch.full(s, 0.1 * rank))
        run.step()


# ------------------------------------------------------------------------- other norms


def _by(run: Run, norms: Sequence[tuple[float, float]]) -> None:
    """Clip to bounds, each of the norm of an order."""
    for step in range(3):
        _begin(run, step)
        for bound, order in norms:
            run.clip(bound, order)
        run.step()


ORDERS = {
    "the largest element": ((0.01, INF),),
    "the sum of all elements": ((1.0, 1.0),),
    "the norm of order 3": ((0.05, 3.0),),
    "the norm of order one half": ((100.0, 0.5),),
    "the norm, then the largest element": ((0.1, 2.0), (1e-3, INF)),
    "the largest element, then the norm": ((1e-2, INF), (0.05, 2.0), (INF, 1.0)),
    "a norm of another order for a log": ((0.1, 2.0), (INF, 3.0), (INF, 2.0)),
}
for _name, _norms in ORDERS.items():
    script(f"bounded by {_name}", **DULL)(functools.partial(_by, norms=_norms))


@script(**DULL)
def a_norm_of_another_order_before_another_backward(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip(0.01, INF)
        run.backward(step + 10, use="left")
        run.clip(0.02, INF)
        run.step()


@script(max_grad_norm=0.05, **DULL)
def norms_are_noted_between_everything(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        for micro in range(2):
            run.backward(10 * step + micro)
            run.note_norm()
            run.note_norm(INF)
        run.clip(0.1)
        run.note_norm()
        run.note_norm(1)
        run.step()


# ----------------------------------------------------------------------- every element


@script(**DULL)
def every_element_bounded(run: Run) -> None:
    for step, limit in enumerate((1e-2, 1e3, 1e-3)):
        _begin(run, step)
        run.clip_value(limit)
        run.note_norm(INF)
        run.step()


@script(**DULL)
def every_element_bounded_then_the_norm(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip_value(5e-3)
        run.clip(0.05)
        run.step()


@script(**DULL)
def the_norm_bounded_then_every_element(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip(0.3)
        run.clip_value(5e-3)
        run.note_norm()
        run.step()


@script(max_grad_norm=0.04, **DULL)
def every_element_bounded_beside_an_option(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip_value(5e-3)
        run.step()


@script(**DULL)
def every_element_bounded_before_another_backward(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip_value(5e-3)
        run.backward(step + 10)
        run.clip(INF)
        run.step()


@script(**DULL)
def every_element_bounded_in_every_micro_batch(run: Run) -> None:
    """Some of them without synchronization."""
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(10 * step)
        run.clip_value(5e-3)
        with run.no_sync():
            run.backward(10 * step + 1, use="right")
        run.clip_value(5e-3)
        run.backward(10 * step + 2)
        run.clip_value(8e-3)
        run.step()


@script(**DULL)
def every_element_bounded_and_never_zeroed(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.clip_value(5e-3)
        run.step()


# ------------------------------------------------------------------ in an unusual place


@script(**DULL)
def a_bound_in_a_closure(run: Run) -> None:
    """Which is where the step is told what it is to be."""

    def closure(step: int) -> Callable[[], torch.Tensor]:
        def evaluate() -> torch.Tensor:
            _begin(run, step)
            run.clip(0.2)
            run.clip(0.1)
            return torch.zeros(())

        return evaluate

    for step in range(3):
        run.optimizer.step(closure(step))
    run.rest()


@script(**DULL)
def a_bound_before_evaluation(run: Run) -> None:
    for step in range(3):
        _begin(run, step)
        run.clip(0.1)
        run.evaluate(step)
        run.clip(0.2)
        run.step()
