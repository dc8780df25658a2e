"""Packing: many gradients into one bucket, beside torch._foreach_copy_."""

import pytest

from bench.cases import every
from bench.timing import now


@pytest.mark.benchmark(timer=now)
@pytest.mark.parametrize(("recipe", "provider", "numel"), every("pack"))
def test_pack(score, recipe, provider, numel):
    score("pack", recipe, provider, numel)
