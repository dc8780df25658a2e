"""Packing of tensors into buckets, and casts, against their twins in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from backends import DEVICE, assert_same_bits, run_both
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import FLOATS, seeded
from torch import Tensor

from zerokern import ops
from zerokern.kernels import pack
from zerokern.ops import BLOCK


def slots(
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    device: str,
    strides: Sequence[Any] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Return a bucket full of 7s and a view for each source, at multiples of 64
    elements."""
    starts = [0]
    for source in sources:
        starts.append(starts[-1] + -(-source.numel() // BLOCK) * BLOCK)
    bucket = torch.full(
        (starts[-1],),
        7.0,
        dtype=dtype,
        device=device,
    )
    strides = strides or [torch.empty(source.shape).stride() for source in sources]
    views = [
        bucket.as_strided(source.shape, stride, start)
        for source, stride, start in zip(sources, strides, starts[:-1], strict=True)
    ]
    return bucket, views


def check_pack(
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    scale: float = 1.0,
    strides: Sequence[Any] = (),
) -> None:
    """Pack on both backends into buckets, compare all of both, and unpack again."""
    bucket, views = slots(sources, dtype, DEVICE, strides)
    expected, expected_views = slots(sources, dtype, "cpu", strides)
    ops.pack_(
        views,
        [s.to(DEVICE) for s in sources],
        scale,
        backend="triton",
    )
    ops.pack_(expected_views, sources, scale, backend="torch")
    assert_same_bits(bucket, expected)

    back = [torch.zeros_like(s, device=DEVICE) for s in sources]
    ops.pack_(back, views, backend="triton")
    for actual, view in zip(back, expected_views, strict=True):
        assert_same_bits(actual, view.to(actual.dtype))


@pytest.mark.parametrize("destination", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_pack_equals_its_twin(
    source: torch.dtype,
    destination: torch.dtype,
    scale: float,
) -> None:
    sizes = (5, 0, 8, 63, 64, 65, 2047, 2048, 2049, 4099, 1)
    sources = [seeded(n, n, special=True).to(source) for n in sizes]
    check_pack(sources, destination, scale)


@pytest.mark.parametrize("offset", range(16))
def test_pack_and_cast_at_any_address(offset: int) -> None:
    """With 128-bit and odd addresses in one call."""
    end = offset + 2500
    for source in (torch.bfloat16, torch.float32):
        memory = seeded(3000).to(source)
        part = memory[offset:end]
        check_pack([part, memory[:77]], torch.bfloat16)
        out = torch.full(
            (3000,),
            7.0,
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        ops.cast_(out[offset:end], part.to(DEVICE), backend="triton")
        assert_same_bits(out[offset:end], part.bfloat16())
        assert (out[:offset] == 7).all()
        assert (out[end:] == 7).all()


def test_pack_reads_strides() -> None:
    image = seeded(2 * 3 * 4 * 5).view(
        2,
        3,
        4,
        5,
    )
    sources = [
        seeded(6 * 7).view(6, 7).t(),
        seeded(400).view(20, 20)[::2, 1::3],
        torch.ones(()).expand(3, 4),
        # The stride of a dimension of length 1 means nothing.
        seeded(200).as_strided((2, 1, 100), (100, 1, 1)),
        seeded(0).view(0, 3),
        # Packed both ways: as it is, and between memory formats.
        image.to(memory_format=torch.channels_last),
        image,
    ]
    check_pack(sources, torch.float32)
    strides = [torch.empty(s.shape).stride() for s in sources[:5]]
    last = torch.empty(image.shape, memory_format=torch.channels_last).stride()
    check_pack(sources, torch.bfloat16, strides=[*strides, last, last])


@pytest.mark.skipif(DEVICE == "cuda", reason="launches nothing")
def test_equal_layouts_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []

    def uploaded(device: torch.device, entries: Any) -> Tensor:
        addresses.extend(entries)
        return torch.zeros(100)

    monkeypatch.setattr(pack, "_uploaded", uploaded)
    monkeypatch.setattr(pack, "launch", lambda *args, **options: None)
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sources = [torch.zeros(200).as_strided((2, 1, 100), (100, 1, 1)), image]
    destinations = [torch.zeros(2, 1, 100), torch.zeros_like(image)]
    pack.pack_(destinations, sources)
    assert [source for source, _, _ in addresses] == [s.data_ptr() for s in sources]


def test_pack_where_the_table_does_not_reach() -> None:
    wide = seeded(100).double()
    holes = torch.zeros(10, 20, device=DEVICE)[:, ::2]
    destinations = [torch.zeros(100, device=DEVICE), holes]
    sources = [wide.to(DEVICE), wide.view(10, 10).to(DEVICE)]
    pack.pack_(destinations, sources, 0.5)
    assert_same_bits(holes, wide.float().view(10, 10) * 0.5)


@pytest.mark.parametrize("position", range(12))
def test_pack_with_empty_tensors_anywhere(position: int) -> None:
    sizes = [0 if index in (position, 11) else 1 + index for index in range(12)]
    check_pack([seeded(size) for size in sizes], torch.float32)
    nothing = [torch.zeros(0, device=DEVICE)]
    ops.pack_(nothing, [torch.zeros(0, device=DEVICE)], backend="triton")


def test_pack_launches_once_for_25_000_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = []

    def count(
        kernel: Any,
        programs: int,
        *args: Any,
        **options: Any,
    ) -> None:
        launches.append(programs)

    monkeypatch.setattr(pack, "launch", count)
    sources = list(torch.zeros(25_000, 4, device=DEVICE)[:, :1])
    destinations = list(torch.zeros(25_000, 64, device=DEVICE)[:, :1])
    ops.pack_(destinations, sources, backend="triton")
    assert launches == [25_000]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any shape and permutation, some with gaps or odd addresses, in any
    format."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    gap = draw(st.sampled_from([1, 1, 2]))
    offset = draw(st.sampled_from([0, 0, 1, 3, 8]))
    numel = math.prod(shape)
    memory = seeded(numel * gap + offset, draw(st.integers(0, 99)))
    values = memory[offset::gap][:numel].view(shape)
    permuted = values.permute(draw(st.permutations(range(len(shape)))))
    return permuted.to(draw(st.sampled_from(FLOATS)), copy=draw(st.booleans()))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    st.lists(tensors(), max_size=5),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.sampled_from([1.0, 0.1]),
)
def test_pack_of_any_tensors(
    sources: list[Tensor],
    dtype: torch.dtype,
    permuted: bool,
    scale: float,
) -> None:
    dense = [torch.empty_like(s) if permuted else torch.empty(s.shape) for s in sources]
    check_pack(
        sources,
        dtype,
        scale,
        [t.stride() for t in dense],
    )


@pytest.mark.parametrize("out", FLOATS)
def test_casts_of_all_patterns(out: torch.dtype) -> None:
    """Every bf16 and fp16 number; every upper half of fp32 with the lower halves around
    a tie."""
    halves = torch.arange(-(2**15), 2**15)
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    short = halves.to(torch.int16)
    whole = ((halves[:, None] << 16) + lower).flatten().to(torch.int32)
    patterns = (
        short.view(torch.bfloat16),
        short.view(torch.float16),
        whole.view(torch.float32),
    )
    for values in patterns:
        made = torch.zeros(values.numel(), dtype=out)
        triton, expected = run_both(ops.cast_, made, values)
        assert_same_bits(triton[0], expected[0])
