"""How far results may lie apart, each with its reason. What is not here is compared bit
for bit."""

PARTIAL_RELATIVE = 1e-15
"""Triton and torch add the 4096 exact fp64 squares of a partial sum in different
orders: some roundings of 2^-53."""

NATIVE_PARTIAL_RELATIVE = 3e-14
"""The C loop adds 256 squares in each of 16 lanes, one after the other: up to 260
roundings of 2^-53."""

RULE_ULP = 2.0
"""Weights and moments against torch's in fp64, in ulp of the largest term: a rounded
scalar, two products and a sum."""

UPDATE_ULP = 4.0
"""Added for a weight, in ulp of its update: a root, a quotient, two products, two sums.
It shows where |w| is small."""

L2_ULP = 2.0
"""Added where weight decay is in the gradient: another product and sum, whose error the
square doubles."""

TRAJECTORY = {
    ("fp32", "fp32"): 1e-4,
    ("bf16+fp32", "fp32"): 1e-4,
    ("fp16+fp32", "fp32"): 1e-4,
    ("split32", "fp32"): 1e-4,
    ("split24", "fp32"): 2e-3,
    ("bf16", "fp32"): 0.15,
    ("bf16+fp32", "bf16"): 0.015,
    ("bf16+fp32", "8bit"): 0.05,
    ("split32", "8bit"): 0.05,
    ("split24", "8bit"): 0.05,
    ("bf16", "8bit"): 0.15,
}
"""Distance to torch's AdamW in fp64 after 1000 steps of noisy gradients, over the
length of the way.

fp32: torch's own fp32 AdamW is as far off (5.5e-5), for 1 - lr * weight_decay rounds
the same way a thousand times. The others round at random, so their errors grow with the
root of the number of steps, and the coarsest format rules.
"""
