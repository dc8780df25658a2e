"""What the kernels compile to, for GPUs that are not here: bytes, widths, spills, contraction, index arithmetic.

The cards are made in a process of their own, since a kernel that was imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

NVIDIA = ("sm_80", "sm_90", "sm_100")
MOST_REGISTERS = 128
"""With 128 threads a program, this leaves four programs on a multiprocessor: enough 128-bit loads in flight."""

Card = dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[("sm_80", "sm_90"), pytest.param(("sm_100", "gfx942"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def cards(request: pytest.FixtureRequest) -> list[Card]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.cards", "--json", *(f"--target={target}" for target in request.param)]
    folder = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def failing(cards: list[Card], condition: Any) -> list[Card]:
    return [card for card in cards if not condition(card)]


def per_element(cards: list[Card]) -> list[Card]:
    return [card for card in cards if card["read_bytes"] is not None]


def on_nvidia(cards: list[Card]) -> list[Card]:
    return [card for card in cards if card["target"] in NVIDIA]


def test_every_recipe_compiles_for_every_target(cards: list[Card]) -> None:
    recipes = {card["recipe"] for card in cards}
    assert len(recipes) >= 15 and len(cards) == len(recipes) * 2


def test_bytes_are_those_that_the_docstring_states(cards: list[Card]) -> None:
    assert not failing(per_element(cards), lambda card: card["read_bytes"] == card["stated_read_bytes"])
    assert not failing(per_element(cards), lambda card: card["write_bytes"] == card["stated_write_bytes"])
    assert {card["recipe"] for card in cards} - {card["recipe"] for card in per_element(cards)} == {"scalars"}


@pytest.mark.parametrize(
    ("recipe", "read", "written"),
    [
        ("adamw fp32, grad fp32", 16, 12),
        ("adamw bf16 + fp32 master, grad bf16", 14, 14),
        ("adamw bf16 + fp32 master, grad fp32", 16, 14),
        ("pack bf16 -> bf16", 2, 2),
        ("pack bf16 -> fp32", 2, 4),
    ],
)
def test_bytes_are_at_the_floor_of_the_recipe(cards: list[Card], recipe: str, read: int, written: int) -> None:
    # The byte floors of recipes H, A and A', and of packing.
    chosen = [card for card in cards if card["recipe"] == recipe]
    assert chosen and not failing(chosen, lambda card: (card["read_bytes"], card["write_bytes"]) == (read, written))


@pytest.mark.parametrize(("direction", "counted"), [("loads", "read_bytes"), ("stores", "write_bytes")])
def test_elements_move_in_128_bit_accesses(cards: list[Card], direction: str, counted: str) -> None:
    for card in on_nvidia(per_element(cards)):
        wide = card[direction].get("128", 0) * 16 * card["threads"] / card["tile"]
        if card["recipe"].startswith("reduce") and direction == "loads":
            assert set(card["loads"]) == {"128"}, card  # how often is a matter of the rank loop and its unrolling
        else:
            assert wide == card[counted], card


def test_narrow_accesses_are_only_tables_tails_and_partials(cards: list[Card]) -> None:
    tables = {"adamw": ({"32"}, set()), "reduce": (set(), {"64"})}
    for card in on_nvidia(per_element(cards)):
        narrow_loads, narrow_stores = ({w: n for w, n in card[d].items() if w != "128"} for d in ("loads", "stores"))
        name = card["recipe"].split()[0]
        if name in tables:
            assert (set(narrow_loads), set(narrow_stores)) == tables[name], card
        else:
            # The tail of at most 7 elements is one load and one store; a pack also reads five words of its table.
            table = narrow_loads.pop("64", 0)
            assert table == (5 if name == "pack" else 0), card
            assert (sum(narrow_loads.values()), sum(narrow_stores.values())) == (1, 1), card


def test_nothing_spills(cards: list[Card]) -> None:
    assert not failing(cards, lambda card: card["spill_bytes"] == 0)
    assert not failing(cards, lambda card: card["registers"] <= MOST_REGISTERS)


def test_nothing_is_contracted_flushed_or_approximated(cards: list[Card]) -> None:
    assert not failing(on_nvidia(cards), lambda card: card["contractions"] == card["approximations"] == 0)


def test_no_32_bit_product_can_reach_an_address(cards: list[Card]) -> None:
    # Rows 1 to 6: illegal accesses and silent no-ops from 2^31 elements on.
    assert not failing(cards, lambda card: card["i32_products"] == 0)


def test_no_count_is_specialised(cards: list[Card]) -> None:
    # Rows 45 and 46: a kernel that is specialised on the value of a count compiles again in the middle of a run.
    assert not failing(cards, lambda card: card["specialised"] == [])


def test_interpreted_kernels_are_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.cards"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "TRITON_INTERPRET" in done.stderr
