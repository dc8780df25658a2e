"""Ranks that run their units in different orders, more than once or not at all."""

from __future__ import annotations

import functools
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import ranks
from oracle import Run, apart, whole
from pairs import NEVER_TOOK_PART, run_in_pairs
from registry import SMALL
from torch import Tensor

SEEDS = range(10)
ONCE_EACH = [(0, 1), (1, 0)]
ANY = [*ONCE_EACH, (), (0,), (1,), (0, 0, 1), (1, 1, 1)]

Trained = dict[str, Tensor] | str
"""The parameters after all steps, or the error."""


def orders(seed: int) -> list[list[tuple[int, ...]]]:
    """Return random orders of blocks, by step and rank; every other seed has all blocks
    once, so ranks may agree."""
    generator = random.Random(seed)
    choices = ONCE_EACH if seed % 2 else ANY
    first = [(0, 1), (0, 1)]
    later = [[generator.choice(choices) for _ in range(2)] for _ in range(2)]
    return [first, *later]


def train(seed: int, stage: int | None, group: Any = None) -> Trained:
    """Train through blocks in random orders; stage None is torch's AdamW."""
    options = {} if stage is None else {"process_group": group}
    with warnings.catch_warnings():
        # That there are none beside an error is a test of its own, in test_hangs.
        warnings.simplefilter("ignore")
        run = Run(stage, 2, buckets=SMALL, eps=1e-4, **options)
        try:
            for step, of_rank in enumerate(orders(seed)):

                def loss(rank: int, step: int = step, order: Any = of_rank) -> Tensor:
                    return run.loss(step, rank, order=order[rank])

                run.optimizer.zero_grad()
                run.backward(step, loss)
                run.step()
            return whole(run.model, run.optimizer)
        except RuntimeError as error:
            return str(error)


@functools.cache
def trained() -> ranks.Cases:
    """Train in the stages where ranks may differ."""
    cases = {
        (seed, stage): functools.partial(train, seed, stage)
        for seed in SEEDS
        for stage in (1, 2)
    }
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_may_run_blocks_in_any_order(stage: int, seed: int) -> None:
    """Also none of them, or one three times; the result is that of the mean over the
    ranks."""
    expected = train(seed, None)
    for result in trained()[seed, stage]:
        assert isinstance(result, dict), result
        assert apart(result, expected) == {}


@pytest.mark.long
def test_ranks_that_differ_in_stage_3_get_the_right_result_or_an_error() -> None:
    """A wrong result is not among the outcomes, whatever they differ in."""
    done = run_in_pairs(SEEDS, lambda seed, _, group: train(seed, 3, group))
    outcomes = Counter[str]()
    for seed, results in done.items():
        for result in results:
            outcomes[type(result).__name__] += 1
            if isinstance(result, str):
                assert NEVER_TOOK_PART.match(result), result
            else:
                assert apart(result, train(seed, None)) == {}
    assert len(outcomes) == 2  # the test saw both
