"""What is recommended among forecasts, and the reason that is given for it."""

from __future__ import annotations

import pytest

from zerokern import Memory, Precision
from zerokern.plan.advice import advise
from zerokern.plan.forecast import Forecast, Setting, Strategy
from zerokern.plan.ledger import Peak
from zerokern.plan.rehearsal import Launch, Trace, Wait, Work

GIB = 2**30


def made(
    stage: int,
    needs: float,
    *,
    recipe: str = "fp32",
    checkpointing: bool = False,
    state: float = 1,
    unit: float = 0.1,
    world: int = 8,
    sent: int = 0,
    flops: int = 3 * 10**12,
) -> Forecast:
    """Return a forecast that needs so many GiB."""
    events = [Work("forward", flops=flops), Launch(1, "all_gather", world, sent)]
    return Forecast(
        strategy=Strategy(
            stage=stage,
            recipe=recipe,
            precision=Precision(),
            checkpointing=checkpointing,
        ),
        setting=Setting(world=world),
        params=10**9,
        padding=0,
        others=0,
        memory=Memory(
            parameters=int(state * GIB),
            gradients=0,
            master=0,
            moments=0,
            buffers=0,
            tables=0,
        ),
        peak=Peak(int(needs * GIB)),
        largest_unit=int(unit * GIB),
        calls=(),
        trace=Trace([*events, Wait(1)]),
        samples=1,
    )


@pytest.mark.parametrize(
    ("forecasts", "stage", "says"),
    [
        ([made(1, 20), made(2, 15), made(3, 5)], 1, "needs 20.00 GiB of 38.00 GiB"),
        ([made(1, 50), made(2, 30), made(3, 5)], 2, "stage 1 would need 50.00 GiB"),
        ([made(1, 50), made(2, 45), made(3, 20)], 3, "stage 2 would need 45.00 GiB"),
        ([made(3, 50), made(3, 30, recipe="8bit")], 3, "with fp32 state nothing fits"),
        (
            [made(3, 50), made(3, 20, checkpointing=True, flops=4 * 10**12)],
            3,
            "checkpointing saves 30.00 GiB of activations for 33% more compute",
        ),
        ([made(3, 20, world=64, sent=10**12)], 3, "zerokern does not have them yet"),
        ([made(1, 20, sent=10**12)], 1, "no_sync(), hide it"),
        ([made(3, 90, unit=30)], None, "tensor parallelism"),
        ([made(3, 90, state=80)], None, "take more GPUs"),
        ([made(3, 90, state=5)], None, "take a smaller micro-batch"),
    ],
)
def test_the_recommendation_has_a_reason(
    forecasts: list[Forecast], stage: int | None, says: str
) -> None:
    advice = advise(forecasts, 40 * GIB, 2 * GIB)
    assert (advice.strategy and advice.strategy.stage) == stage
    assert says in advice.reason


def test_gathers_in_forward_are_recommended_where_they_help() -> None:
    slow = made(1, 20, sent=10**12)

    def reason(late: Forecast) -> str:
        return advise([slow], 40 * GIB, 2 * GIB, lambda strategy: late).reason

    assert "gather_in_forward=True" in reason(made(1, 20, sent=10**11))
    assert "gather_in_forward" not in reason(slow)
    assert "gather_in_forward" not in reason(made(1, 39))
