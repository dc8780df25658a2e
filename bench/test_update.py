"""The update in one pass, beside torch's own optimizers and, for 16 bits, the casts
around them."""

import pytest

from bench.cases import every
from bench.timing import now


@pytest.mark.benchmark(timer=now)
@pytest.mark.parametrize(("recipe", "provider", "numel"), every("update"))
def test_update(score, recipe, provider, numel):
    score("update", recipe, provider, numel)
