"""The tables that papers print, from our formulas."""

from __future__ import annotations

import pytest

from zerokern.plan.published import (
    stage_3_over_data_parallel,
    zero_bytes,
    zero_plus_plus_volume,
)

WORLDS = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    7.5e9: (
        "120 120 120",
        "52.5 41.3 30",
        "35.6 21.6 7.5",
        "31.4 16.6 1.88",
        "30.4 15.4 0.47",
        "30.1 15.1 0.12",
    ),
    128e9: (
        "2048 2048 2048",
        "896 704 512",
        "608 368 128",
        "536 284 32",
        "518 263 8",
        "513 257 2",
    ),
    1e12: (
        *("16000 16000 16000", "7000 5500 4000", "4750 2875 1000"),
        *("4187 2218 250", "4046 2054 62.5", "4011 2013 15.6"),
    ),
}
"""Rajbhandari et al. 2020, table 1: GB per device under P_os, P_os+g and P_os+g+p, by
number of devices."""


@pytest.mark.parametrize("params", TABLE_1, ids="{:.3g}".format)
@pytest.mark.parametrize("world", WORLDS)
def test_the_memory_table_of_the_zero_paper(params: float, world: int) -> None:
    """To its printed digits, of which the last is rounded for 7.5 B and cut off for the
    others."""
    for stage, printed in zip(
        (1, 2, 3), TABLE_1[params][WORLDS.index(world)].split(), strict=True
    ):
        places = len(printed.partition(".")[2])
        unit = 10.0**-places
        ours = zero_bytes(params, world, stage) / 1e9
        assert abs(ours - float(printed)) <= unit / 2 * (1 + 1e-9) or int(
            ours / unit
        ) == round(float(printed) / unit)


def test_without_zero_a_parameter_takes_16_bytes() -> None:
    assert zero_bytes(1.0, 64, 0) == 16
    with pytest.raises(ValueError, match="stage=4: it must be 0, 1, 2 or 3"):
        zero_bytes(1.0, 64, 4)


def test_the_volume_table_of_zero_plus_plus() -> None:
    """Wang et al. 2023, table 1: cross-node elements per collective, in units of M."""
    plain = zero_plus_plus_volume()
    changed = zero_plus_plus_volume(
        quantized_weights=True, hierarchical=True, quantized_gradients=True
    )
    assert plain == (1, 1, 1) and plain.total == 3
    assert changed == (0.5, 0, 0.25) and changed.total == 0.75


def test_stage_3_over_data_parallel() -> None:
    assert stage_3_over_data_parallel() == 1.5
    assert stage_3_over_data_parallel(gradient_itemsize=4) == pytest.approx(4 / 3)
