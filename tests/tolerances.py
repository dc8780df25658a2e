"""How far results may lie apart, each with its reason. What is not here is compared bit for bit."""

PARTIAL_RELATIVE = 1e-15
"""Triton and torch add the 4096 exact fp64 squares of a partial sum in different orders: some roundings of 2^-53."""

NATIVE_PARTIAL_RELATIVE = 3e-14
"""The C loop adds 256 squares in each of 16 lanes, one after the other: up to 260 roundings of 2^-53."""

ADAMW_ULP = 2.0
"""Weights and moments against torch's in fp64, in ulp of the largest term: a rounded scalar, two products and a sum."""

UPDATE_ULP = 4.0
"""Added for a weight, in ulp of its update: a root, a quotient, two products, two sums. It shows where |w| is small."""

L2_ULP = 2.0
"""Added where weight decay is in the gradient: another product and sum, whose error the square doubles."""
