"""Parameters that many tests share: stages, and sizes of the world."""

from __future__ import annotations

import pytest
import ranks
from oracle import STAGES

in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
in_stages_1_and_2 = pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
"""Where every rank has all parameters whole between steps."""

at_worlds = pytest.mark.parametrize("at", ranks.worlds(1, 2, rarely=3))
"""Alone, two ranks, and now and then three, which no size divides."""
at_odd_worlds = pytest.mark.parametrize("at", ranks.worlds(1, 3, rarely=2))
"""Alone, three ranks, and now and then two."""
at_even_worlds = pytest.mark.parametrize("at", ranks.worlds(2, 4, rarely=3))
"""Two ranks, four, and now and then three."""
