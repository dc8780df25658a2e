"""Flat casts, beside torch's copy_."""

import pytest

from bench.cases import every
from bench.timing import now


@pytest.mark.benchmark(timer=now)
@pytest.mark.parametrize(("recipe", "provider", "numel"), every("cast"))
def test_cast(score, recipe, provider, numel):
    score("cast", recipe, provider, numel)
