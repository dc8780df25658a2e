"""Numbers with units."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zerokern.plan import quantities


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (quantities.size, "80GiB", 80 * 2**30),
        (quantities.size, "80GB", 80 * 10**9),
        (quantities.size, "512 B", 512),
        (quantities.size, "1.5KiB", 1536),
        (quantities.bandwidth, "450GB/s", 450e9),
        (quantities.bandwidth, "400Gb/s", 50e9),
        (quantities.bandwidth, "200Mbit/s", 25e6),
        (quantities.rate, "989e12", 989e12),
        (quantities.rate, "989TFLOP/s", 989e12),
        (quantities.count, "7e9", 7 * 10**9),
        (quantities.count, "70B", 70 * 10**9),
        (quantities.count, "512", 512),
        (quantities.count, "125M", 125 * 10**6),
    ],
)
def test_are_read(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (quantities.size, "80", "with its unit"),
        (quantities.size, "80GiB/s", "is not a size"),
        (quantities.size, "GiB", "not a number"),
        (quantities.size, "80Gib", "is not a size"),
        (quantities.bandwidth, "400", "write bytes as 450GB/s or bits as 400Gb/s"),
        (quantities.bandwidth, "400 furlongs", "write bytes"),
        (quantities.rate, "3GB", "compute rate"),
        (quantities.count, "1.5", "whole number"),
        (quantities.count, "-3", "number"),
        (quantities.count, "0", "whole"),
        (quantities.count, "many", "number"),
    ],
)
def test_are_refused_by_name(
    parse: Callable[[str], float], text: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse(text)
    assert repr(text) in str(error.value)
