"""Numbers with units, as people write them: 80GiB, 450GB/s, 400Gb/s, 7e9, 70B."""

from __future__ import annotations

import re

PREFIX = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
PREFIX |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_FORM = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kKMGTP]i?|)(.*?)\s*")


def size(text: str) -> int:
    """Return bytes: "80GiB", "80GB".

    Raises:
        ValueError: another unit, or none.
    """
    number, unit = _parse(text)
    if unit != "B":
        raise ValueError(
            f"{text!r} is not a size; write it with its unit, for example 80GiB or 80GB"
        )
    return round(number)


def bandwidth(text: str) -> float:
    """Return bytes per second: "450GB/s", or "400Gb/s", which are bits.

    Raises:
        ValueError: another unit, or none.
    """
    number, unit = _parse(text)
    if unit not in ("B/s", "b/s", "bit/s"):
        raise ValueError(
            f"{text!r} is not a bandwidth; write bytes as 450GB/s or bits as 400Gb/s,"
            " in one direction, per GPU"
        )
    return number if unit == "B/s" else number / 8


def rate(text: str) -> float:
    """Return operations per second: "989e12", "989TFLOP/s".

    Raises:
        ValueError: another unit.
    """
    number, unit = _parse(text)
    if unit.upper() not in ("", "FLOP/S", "FLOPS"):
        raise ValueError(f"{text!r} is not a compute rate; write 989e12 or 989TFLOP/s")
    return number


def count(text: str) -> int:
    """Return a number of things: "7e9", "7B", "512".

    Raises:
        ValueError: it is not a whole positive number.
    """
    number, unit = _parse(text.replace("B", "G"))
    if unit or number != round(number) or number < 1:
        raise ValueError(
            f"{text!r} is not a count; write a whole number such as 512, 7e9 or 7B"
        )
    return round(number)


def _parse(text: str) -> tuple[float, str]:
    match = _FORM.fullmatch(text)
    try:
        assert match is not None
        return float(match[1]) * PREFIX[match[2]], match[3]
    except (AssertionError, ValueError, KeyError):
        raise ValueError(
            f"{text!r} is not a number with a unit, such as 80GiB, 450GB/s or 400Gb/s"
        ) from None


def gib(bytes_: float) -> str:
    """Return bytes in GiB, or in MiB where that is too coarse."""
    return (
        f"{bytes_ / 2**30:,.2f} GiB"
        if bytes_ >= 2**30 / 10
        else f"{bytes_ / 2**20:,.2f} MiB"
    )
