"""The reduction: chunks of several ranks into one fp32 shard and its norm, beside the
same from torch's operations."""

import pytest

from bench.cases import every
from bench.timing import now


@pytest.mark.benchmark(timer=now)
@pytest.mark.parametrize(("recipe", "provider", "numel"), every("reduce"))
def test_reduce(score, recipe, provider, numel):
    score("reduce", recipe, provider, numel)
