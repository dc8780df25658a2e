"""The entries of the scalar table and of `hyper` by name, as constants that Triton
compiles in. `native.c` has an enum of the same names."""

from __future__ import annotations

import triton.language as tl

from .arguments import HYPER, TABLE

COEF = tl.constexpr(TABLE.index("coef"))
BETA1 = tl.constexpr(TABLE.index("beta1"))
ONE_MINUS_BETA1 = tl.constexpr(TABLE.index("one_minus_beta1"))
BETA2 = tl.constexpr(TABLE.index("beta2"))
ONE_MINUS_BETA2 = tl.constexpr(TABLE.index("one_minus_beta2"))
STEP_SIZE = tl.constexpr(TABLE.index("step_size"))
INV_SQRT_C2 = tl.constexpr(TABLE.index("inv_sqrt_c2"))
EPS = tl.constexpr(TABLE.index("eps"))
DECAY = tl.constexpr(TABLE.index("decay"))
L2 = tl.constexpr(TABLE.index("l2"))
NESTEROV = tl.constexpr(TABLE.index("nesterov"))
ACTIVE = tl.constexpr(TABLE.index("active"))

HYPER_LR = tl.constexpr(HYPER.index("lr"))
HYPER_BETA1 = tl.constexpr(HYPER.index("beta1"))
HYPER_BETA2 = tl.constexpr(HYPER.index("beta2"))
HYPER_EPS = tl.constexpr(HYPER.index("eps"))
HYPER_WEIGHT_DECAY = tl.constexpr(HYPER.index("weight_decay"))
HYPER_SIGN = tl.constexpr(HYPER.index("sign"))
HYPER_DECOUPLED = tl.constexpr(HYPER.index("decoupled"))
HYPER_NESTEROV = tl.constexpr(HYPER.index("nesterov"))
