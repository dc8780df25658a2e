"""The update in one pass, beside torch's own AdamW and, for 16 bits, the casts around it."""

import pytest

from bench.cases import every
from bench.timing import now


@pytest.mark.benchmark(timer=now)
@pytest.mark.parametrize(("recipe", "provider", "numel"), every("adamw"))
def test_adamw(score, recipe, provider, numel):
    score("adamw", recipe, provider, numel)
