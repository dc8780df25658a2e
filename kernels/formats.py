"""How a number is stored: device functions between fp32 and the storage formats.

bf16 is converted in integer arithmetic. Triton's interpreter truncates where a GPU rounds to nearest even, and breaks
bf16 subnormals; integers give the same bits in both, so what the tests verify is what ships.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The storage formats, and what Triton calls them."""


@triton.jit
def widen(x):
    """Return x (bf16, fp16 or fp32) as fp32. Exact."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Return x (fp32) as dtype (bf16, fp16 or fp32), rounded to nearest even. NaN stays NaN."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # 0x7FFF plus the last bit that stays carries into it exactly when nearest even rounds up. The carry would turn
        # the NaN 0x7FFFFFFF into -0.0, hence the quiet NaN beside it.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
