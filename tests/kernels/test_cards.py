"""What the kernels compile to, for GPUs that are not here: bytes, widths, spills,
contraction, index arithmetic.

The cards are made in a process of their own, since a kernel that was imported for the
interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from repository import ROOT

pytest.importorskip("triton")

from bench import cards_ir, cards_table, sass

NVIDIA = ("sm_80", "sm_90", "sm_100")
MOST_REGISTERS = 128
"""With 128 threads a program, this leaves four programs on a multiprocessor: enough
128-bit loads in flight."""

# A kernel of each kind, and each storage format at least once: the others compile in
# two minutes more.
FEW = (
    "update adam fp32, grad fp32",
    "update adam bf16 + fp32 master, grad bf16",
    "update adam bf16 + split32 master + bf16 moments, grad bf16, amsgrad",
    "update adam bf16 + split24 master + 8bit moments, grad bf16",
    "update lion bf16 + 8bit moments, grad bf16",
    "update sgd fp32 + no moments, grad fp32",
    "reduce bf16 -> fp32",
    "pack fp32 -> bf16, scaled",
    "cast bf16 -> fp32",
    "scalars adam",
)

Card = dict[str, Any]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the repository, without Triton's interpreter unless
    asked for."""
    inherited = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(
    scope="module",
    params=[
        (("sm_90", "gfx942"), f"^(?:{'|'.join(map(re.escape, FEW))})$"),
        pytest.param(
            (("sm_80", "sm_90", "sm_100", "gfx942"), ""),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "all"],
)
def cards(request: pytest.FixtureRequest) -> list[Card]:
    targets, pattern = request.param
    done = run(
        "-m",
        "bench.cards",
        "--json",
        f"--recipe={pattern}",
        *(f"--target={target}" for target in targets),
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def failing(cards: list[Card], condition: Any) -> list[Card]:
    return [card for card in cards if not condition(card)]


def per_element(cards: list[Card]) -> list[Card]:
    return [card for card in cards if card["read_bytes"] is not None]


def on_nvidia(cards: list[Card]) -> list[Card]:
    return [card for card in cards if card["target"] in NVIDIA]


def test_every_recipe_compiles_for_every_target(cards: list[Card]) -> None:
    targets: dict[str, set[str]] = {}
    for card in cards:
        targets.setdefault(card["recipe"], set()).add(card["target"])
    assert len(targets) == len(FEW) or len(targets) >= 35
    assert set(map(len, targets.values())) == {len({card["target"] for card in cards})}


def test_bytes_are_those_that_the_docstring_states(cards: list[Card]) -> None:
    assert not failing(
        per_element(cards),
        lambda card: card["read_bytes"] == card["stated_read_bytes"],
    )
    assert not failing(
        per_element(cards),
        lambda card: card["write_bytes"] == card["stated_write_bytes"],
    )
    names = {
        card["recipe"].split()[0] for card in cards if card not in per_element(cards)
    }
    assert names == {"scalars"}


def test_bytes_are_at_the_floor_of_the_recipe(cards: list[Card]) -> None:
    assert not failing(
        per_element(cards),
        lambda c: c["read_bytes"] + c["write_bytes"] == c["floor_bytes"],
    )


@pytest.mark.parametrize("direction", ["read", "write"])
def test_elements_move_in_wide_accesses(cards: list[Card], direction: str) -> None:
    # 128 bits, but 64 for 8-bit formats, of which a thread has 8 elements. The rest:
    # tables, scales, tails, partials.
    for card in on_nvidia(per_element(cards)):
        found = Counter(card["loads" if direction == "read" else "stores"])
        per_thread = card["tile"] / card["threads"]
        name = card["recipe"].split()[0]
        if name == "reduce" and direction == "read":
            # How often is a matter of the rank loop and its unrolling.
            assert set(found) == {"128"}, card
            continue
        wide = {"64": 0.0, "128": 0.0}
        for size, count in card[f"{direction}_streams"].items():
            if size != "0":
                width = min(128, 8 * int(size) * 8)
                wide[str(width)] += count * per_thread * int(size) * 8 / width
        assert found.pop("128", 0) == wide["128"], card
        narrow = found["64"] - wide["64"]
        assert narrow >= 0, card
        rest = {width: n for width, n in found.items() if width != "64" and n}
        if name == "update":
            assert rest.keys() <= ({"32", "8"} if direction == "read" else {"8"}), card
            assert direction == "read" or narrow == 0, card
        elif name == "reduce":
            assert not rest and narrow == 1, card  # the partial sum
        else:
            # The tail of at most 7 elements is one access; a pack also reads five words
            # of its table.
            assert sum(rest.values()) == 1 and narrow == (
                5 if (name, direction) == ("pack", "read") else 0
            ), card


def test_nothing_spills(cards: list[Card]) -> None:
    assert not failing(cards, lambda card: card["spill_bytes"] == 0)
    assert not failing(cards, lambda card: card["registers"] <= MOST_REGISTERS)


def test_nothing_is_contracted_flushed_or_approximated(cards: list[Card]) -> None:
    assert not failing(
        cards,
        lambda card: card["contractions"] == card["approximations"] == 0,
    )


def test_no_32_bit_product_reaches_an_address(cards: list[Card]) -> None:
    """It would overflow from 2^31 elements on: illegal accesses, or none at all."""
    assert not failing(cards, lambda card: card["address_products"] == [])


def test_no_count_is_specialised(cards: list[Card]) -> None:
    """A kernel that is specialised on the value of a count compiles again in the middle
    of a run."""
    assert not failing(cards, lambda card: card["specialised"] == [])


def test_issue_leaves_the_bandwidth_to_fp32_states(cards: list[Card]) -> None:
    assert not failing(
        on_nvidia(per_element(cards)),
        lambda card: 0 < card["issue_fraction"] <= 1,
    )
    large = [
        card
        for card in per_element(cards)
        if card["target"] in ("sm_80", "sm_90") and card["floor_bytes"] >= 20
    ]
    assert large
    assert not failing(large, lambda card: card["issue_fraction"] == 1)


def test_the_page_has_every_recipe(cards: list[Card]) -> None:
    page = (ROOT / "bench" / "cards.md").read_text()
    for target in {card["target"] for card in cards}:
        section = page.split(f"## {target}\n")[1].split("\n## ")[0]
        assert not failing(
            cards,
            lambda card, section=section: f"| {card['recipe']} |" in section,
        )


def test_tables_show_where_tritons_differ(cards: list[Card]) -> None:
    other = [card | {"triton": "0.0", "registers": 7} for card in cards]
    page = cards_table.page([cards, other], "no GPU")
    assert f"Triton {cards[0]['triton']} / Triton 0.0" in page
    assert f"| {cards[0]['registers']} / 7 |" in page and page.count("\n## ") == len(
        {card["target"] for card in cards}
    )


TTIR = """
tt.func public @kernel(%p: !tt.ptr<f32> loc("p"(#loc)), %n: i32 loc("n"(#loc))) {
  %hash = arith.muli %n, %n : i32 loc(#loc1)
  %wide = arith.extsi %n : i32 to i64
  %long = arith.muli %wide, %wide : i64
  %start = arith.addi %n, %n : i32
  %out:2 = scf.while (%x = %start, %y = %hash) : (i32, i32) -> (i32, i32) {
    %c = arith.cmpi slt, %hash, %n : i32
    scf.condition(%c) %x, %y : i32, i32
  } do {
  ^bb0(%x: i32, %y: i32):
    %step = arith.STEP %x, %n : i32
    scf.yield %step, %x : i32, i32
  }
  %q = tt.addptr %p, OFFSET : !tt.ptr<f32>, i32
  %v = tt.load %q : !tt.ptr<f32>
  tt.return
}
"""


def test_products_are_followed_to_addresses() -> None:
    def products(offset: str, step: str = "addi") -> set[str]:
        found = cards_ir.products_in_addresses(
            TTIR.replace("OFFSET", offset).replace("STEP", step)
        )
        return {text.split(" = ")[0] for text in found}

    assert products("%long") == products("%start") == products("%n") == set()
    assert products("%hash") == {"%hash"}
    # Places keep their values apart in a loop, but here the second is what the first
    # was a round before.
    assert products("%out#0") == set()
    assert products("%out#1") == {"%hash"}
    assert products("%out#0", "muli") == {"%step"}
    assert products("%out#1", "muli") == {"%hash", "%step"}


def test_instructions_of_troubled_paths_do_not_count() -> None:
    listing = """
        /*0000*/                   MUFU.RSQ R4, R3 ;
        /*0010*/              @!P1 BRA 0x50 ;
        /*0020*/                   MOV R54, 0x40 ;
        /*0030*/                   CALL.REL.NOINC 0xb0 ;
        /*0040*/                   BRA 0x60 ;
        /*0050*/                   FMUL R4, R4, R3 ;
        /*0060*/              @!P0 BRA 0x90 ;
        /*0070*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0080*/               @P0 BRA 0x70 ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   RET.REL.NODEC R54 0x0 ;
    """
    code = sass.parse(listing)
    assert len(code) == 12
    assert sass.instructions_run(code, 0) == 7  # MUFU BRA FMUL BRA LDG BRA STG
    assert sass.instructions_run(code, 3) == 5 + 3 * 2


def test_interpreted_kernels_are_refused_by_name() -> None:
    done = run("-m", "bench.cards", TRITON_INTERPRET="1")
    assert done.returncode == 1 and "TRITON_INTERPRET" in done.stderr


@pytest.mark.parametrize(
    ("setup", "arguments", "message"),
    [
        (
            "from triton.backends import backends; del backends['amd']",
            "--target=gfx942",
            "no back end for gfx942",
        ),
        (
            (
                "from pathlib import Path; from bench import sass; sass.TOOL ="
                " Path('gone')"
            ),
            "--target=sm_90",
            "without gone",
        ),
        ("", "--recipe=nonsense", "no recipe matches 'nonsense'"),
    ],
)
def test_what_is_missing_is_named(setup: str, arguments: str, message: str) -> None:
    done = run("-c", f"{setup}\nfrom bench import cards\ncards.main(['{arguments}'])")
    assert (
        done.returncode == 1
        and message in done.stderr
        and "Traceback" not in done.stderr
    )
