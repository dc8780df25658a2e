"""The device functions of the storage formats, each in a kernel of its own, against
their twins in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from backends import DEVICE, assert_same_bits, placed
from samples import (
    FORMATS8,
    all_codes,
    eight_bit_inputs,
    every_high,
    low_bytes,
    random_bits,
    seeded,
)
from torch import Tensor

from zerokern.kernels import codecs, formats
from zerokern.kernels.codecs import Format8
from zerokern.kernels.launch import INTERPRETED, cdiv, launch
from zerokern.ops import BLOCK


@triton.jit
def split32_kernel(x_ptr, high_ptr, low_ptr, back_ptr, numel, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    high, low = formats.split32(tl.load(x_ptr + offsets, mask=inside))
    tl.store(high_ptr + offsets, high, mask=inside)
    tl.store(low_ptr + offsets, low, mask=inside)
    tl.store(back_ptr + offsets, formats.join(high, low), mask=inside)


@triton.jit
def split24_kernel(
    x_ptr,
    random_ptr,
    high_ptr,
    low_ptr,
    back_ptr,
    numel,
    TILE: tl.constexpr,
):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    random = tl.load(random_ptr + offsets, mask=inside).to(tl.uint32)
    high, low = formats.split24(tl.load(x_ptr + offsets, mask=inside), random)
    tl.store(high_ptr + offsets, high, mask=inside)
    tl.store(low_ptr + offsets, low, mask=inside)
    tl.store(back_ptr + offsets, formats.join(high, low), mask=inside)


@triton.jit
def bf16_kernel(
    x_ptr,
    random_ptr,
    stochastic_ptr,
    nearest_ptr,
    residual_ptr,
    numel,
    TILE: tl.constexpr,
):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    x = tl.load(x_ptr + offsets, mask=inside)
    random = tl.load(random_ptr + offsets, mask=inside).to(tl.uint32)
    nearest = formats.narrow(x, tl.bfloat16)
    tl.store(stochastic_ptr + offsets, formats.bf16_stochastic(x, random), mask=inside)
    tl.store(nearest_ptr + offsets, nearest, mask=inside)
    tl.store(residual_ptr + offsets, x - formats.widen(nearest), mask=inside)


@triton.jit
def encode8_kernel(
    x_ptr,
    random_ptr,
    codes_ptr,
    scale_ptr,
    back_ptr,
    num_blocks,
    MANTISSA: tl.constexpr,
    SIGNED: tl.constexpr,
    FLOOR: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    offsets = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block < num_blocks
    random = tl.load(random_ptr + offsets, mask=inside).to(tl.uint32)
    x = tl.load(x_ptr + offsets, mask=inside)
    codes, scale = formats.encode8(x, random, MANTISSA, SIGNED, FLOOR)
    back = formats.decode8(codes, scale, MANTISSA, SIGNED)
    tl.store(codes_ptr + offsets, codes, mask=inside)
    tl.store(scale_ptr + block, scale, mask=inside)
    tl.store(back_ptr + offsets, back, mask=inside)


@triton.jit
def decode8_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    num_blocks,
    MANTISSA: tl.constexpr,
    SIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    offsets = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block < num_blocks
    codes = tl.load(codes_ptr + offsets, mask=inside)
    scale = tl.load(scale_ptr + block, mask=inside, other=127)
    out = formats.decode8(codes, scale, MANTISSA, SIGNED)
    tl.store(out_ptr + offsets, out, mask=inside)


@triton.jit
def words_kernel(
    key_ptr,
    block_ptr,
    first_ptr,
    second_ptr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, TILE)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    key = tl.load(key_ptr + row)
    block = tl.load(block_ptr + row)
    first, second = formats.random_words(key, block, BLOCK)
    tl.store(first_ptr + offsets, first.to(tl.int64))
    tl.store(second_ptr + offsets, second.to(tl.int64))


def run(
    kernel: Any,
    inputs: list[Tensor],
    outputs: list[torch.dtype],
) -> list[Tensor]:
    """Run an element-wise kernel; return outputs of these dtypes."""
    numel = inputs[0].numel()
    tile = 1 << 16 if INTERPRETED else 1024
    made = [torch.zeros(numel, dtype=dtype, device=DEVICE) for dtype in outputs]
    tensors = [*map(placed, inputs), *made]
    launch(
        kernel,
        cdiv(numel, tile),
        made[0].device,
        *tensors,
        numel,
        TILE=tile,
    )
    return [tensor.cpu() for tensor in made]


def run_on_blocks(
    kernel: Any,
    form: Format8,
    tensors: list[Tensor],
    blocks: int,
    **options: Any,
) -> None:
    """Run a kernel on blocks of 8-bit codes, on tensors that are placed already."""
    tile = 1024 if INTERPRETED else 16
    launch(
        kernel,
        cdiv(blocks, tile),
        tensors[0].device,
        *tensors,
        blocks,
        MANTISSA=form.mantissa,
        SIGNED=form.signed,
        TILE=tile,
        BLOCK=BLOCK,
        **options,
    )


def test_split32_equals_its_twin() -> None:
    x = every_high()
    high, low = codecs.split32(x)
    done = run(split32_kernel, [x], [torch.bfloat16, torch.int16, torch.float32])
    assert_same_bits(done, [high, low, codecs.join32(high, low)])


def test_split24_equals_its_twin() -> None:
    x = torch.cat((every_high(), low_bytes(), seeded(1 << 16)))
    random = random_bits(x.numel())
    high, low = codecs.split24(x, random)
    done = run(split24_kernel, [x, random], [torch.bfloat16, torch.int8, torch.float32])
    assert_same_bits(done, [high, low, codecs.join24(high, low)])


def test_bf16_roundings_equal_their_twins() -> None:
    """An interpreter that rounded differently from the GPU would hide what the GPU
    does."""
    x = torch.cat((every_high(), seeded(1 << 16)))
    random = random_bits(x.numel())
    outputs = [torch.bfloat16, torch.bfloat16, torch.float32]
    stochastic, nearest, residual = run(bf16_kernel, [x, random], outputs)
    assert_same_bits(stochastic, codecs.bf16_stochastic(x, random))
    assert_same_bits(nearest, x.bfloat16())
    assert_same_bits(residual, x - x.bfloat16().float())

    # Compilers fold fp32 -> bf16 -> fp32 away, and the residual with it.
    between = torch.full((BLOCK,), 1.00390625)
    _, _, tie = run(bf16_kernel, [between, random], outputs)
    assert (tie == 1.00390625 - 1.0).all()


@FORMATS8
def test_encode8_equals_its_twin(form: Format8) -> None:
    x = eight_bit_inputs()
    x = x if form.signed else x.abs()
    random = random_bits(x.numel())
    codes, scale = codecs.encode8(x, random, form)
    done = [torch.zeros_like(t, device=DEVICE) for t in (codes, scale, x)]
    tensors = [placed(x), placed(random), *done]
    blocks = x.numel() // BLOCK
    run_on_blocks(encode8_kernel, form, tensors, blocks, FLOOR=form.floor)
    assert_same_bits(done, [codes, scale, codecs.decode8(codes, scale, form)])


@FORMATS8
def test_decode8_equals_its_twin(form: Format8) -> None:
    codes, scales = all_codes(form)
    out = torch.zeros(codes.numel(), device=DEVICE)
    tensors = [placed(codes), placed(scales), out]
    run_on_blocks(decode8_kernel, form, tensors, scales.numel())
    assert_same_bits(out, codecs.decode8(codes, scales, form))


def test_random_words_equal_their_twin() -> None:
    keys = codecs.mix64(torch.arange(32))
    # Also blocks whose numbers do not fit in 32 bits.
    blocks = torch.tensor([0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**40 + 7] * 4)
    done = [torch.zeros(32 * BLOCK, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    tensors = [placed(keys), placed(blocks), *done]
    launch(
        words_kernel,
        1,
        done[0].device,
        *tensors,
        TILE=32,
        BLOCK=BLOCK,
    )
    pairs = [
        codecs.random_words(key, block[None])
        for key, block in zip(keys, blocks, strict=True)
    ]
    for actual, expected in zip(done, zip(*pairs, strict=True), strict=True):
        # Triton converts uint32 to int64 without a sign.
        assert_same_bits(actual, torch.cat(expected))
