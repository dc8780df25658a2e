"""However parameters are cut into shards and ordered in them, an update gives each
element the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backends import ALL_BACKENDS, NEEDS_COMPILER, assert_same_bits, device_of, placed
from kernel_shards import columns_of, mixed_shard, shard_of, update, window_of
from samples import seeded
from scalar_tables import ADAMW, VARIANTS, scalars_of

from zerokern.ops import BLOCK


def shards(lengths: Sequence[int], cuts: Sequence[int]) -> list[tuple[int, int, Any]]:
    """Return (first block, end block, column map) of the shards of parameters of these
    lengths, cut at these blocks."""
    places = [
        (column, index)
        for column, length in enumerate(lengths)
        for index in range(length)
    ]
    made = []
    for first, end in itertools.pairwise([0, *cuts, len(places)]):
        starts: dict[int, int] = {}
        for column, index in places[first:end]:
            starts.setdefault(column, index)
        column_of_block = [column for column, _ in places[first:end]]
        made.append((first, end, columns_of(column_of_block, starts, len(lengths))))
    return made


@pytest.mark.parametrize(
    ("weights", "moments"),
    [
        ("split32", "8bit"),
        ("split24", "bf16"),
        ("bf16", "8bit"),
        ("bf16", "fp32"),
        ("bf16+fp32", "8bit"),
    ],
)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_shard_in_pieces_is_the_shard(
    weights: str,
    moments: str,
    backend: str,
) -> None:
    """Several calls in one step, for world sizes of 1, 2, 4 and 8 and uneven shards.

    Formats that round at random must not depend on how parameters are cut, nor formats
    with blocks on what is beside them.
    """
    lengths = (5, 26, 1)
    chosen = VARIANTS["amsgrad"]
    blocks = sum(lengths)
    whole = mixed_shard(chosen, weights, moments, blocks * BLOCK)
    scalars = [scalars_of(chosen, len(lengths), step) for step in range(2)]
    grads = [seeded(blocks * BLOCK, step) for step in (8, 9)]
    start = placed(whole, "cpu")
    _, _, uncut = shards(lengths, [])[0]
    for options, grad in zip(scalars, grads, strict=True):
        update(whole, grad, uncut, "torch", **options)

    equal = [range(blocks // world, blocks, blocks // world) for world in (1, 2, 4, 8)]
    chosen_cuts = (equal[2], (4, 27)) if backend == "triton" else (*equal, (3, 4, 27))
    for cuts in chosen_cuts:
        for first, end, columns in shards(lengths, cuts):
            piece = placed(window_of(start, first, end), device_of(backend))
            for options, grad in zip(scalars, grads, strict=True):
                part = grad[first * BLOCK : end * BLOCK]
                update(piece, part, columns, backend, **options)
            assert_same_bits(piece, window_of(whole, first, end))


def test_another_order_of_parameters_gives_the_same_bits() -> None:
    """Replicas that bucket their parameters differently must not diverge."""
    scalars = scalars_of(ADAMW, 2)
    weights = seeded(8 * BLOCK)
    grad = seeded(8 * BLOCK, 1)
    one = shard_of(ADAMW, "bf16", "8bit", weights)
    update(
        one,
        grad,
        columns_of([0] * 3 + [1] * 5),
        **scalars,
    )

    swapped = torch.cat((torch.arange(3 * BLOCK, 8 * BLOCK), torch.arange(3 * BLOCK)))
    other = shard_of(ADAMW, "bf16", "8bit", weights[swapped])
    update(
        other,
        grad[swapped],
        columns_of([1] * 5 + [0] * 3),
        **scalars,
    )
    assert_same_bits(window_of(other, 5, 8), window_of(one, 0, 3))
    assert_same_bits(window_of(other, 0, 5), window_of(one, 3, 8))


@pytest.mark.parametrize("backend", [pytest.param("native", marks=NEEDS_COMPILER)])
def test_a_large_uneven_parameter_on_four_ranks(backend: str) -> None:
    """A parameter of 1601 x 1280 must not get another state format on 4 ranks, nor
    fail."""
    # Its slot is a whole number of blocks.
    blocks = -(-1601 * 1280 // BLOCK)
    start = shard_of(ADAMW, "split24", "8bit", seeded(blocks * BLOCK))
    grad = seeded(blocks * BLOCK, 1).bfloat16()
    scalars = scalars_of(ADAMW)
    whole = placed(start, "cpu")
    update(
        whole,
        grad,
        columns_of([0] * blocks),
        backend,
        **scalars,
    )

    quarters = [blocks // 4, blocks // 2, blocks // 4 * 3]
    for first, end, columns in shards([blocks], quarters):
        piece = window_of(start, first, end)
        part = grad[first * BLOCK : end * BLOCK]
        update(piece, part, columns, backend, **scalars)
        assert_same_bits(piece, window_of(whole, first, end))
