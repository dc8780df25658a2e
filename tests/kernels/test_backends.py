"""One specification, three back ends: whole training runs on two ranks, bit for bit."""

from __future__ import annotations

import models
import oracle
import pytest
import ranks
import torch
from torch import Tensor

import zerokern
from zerokern import config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STAGES = (1, 2, 3)
CASES = [(dtype, stage) for dtype in DTYPES for stage in STAGES]
IDS = [f"{str(dtype).removeprefix('torch.')}-stage{stage}" for dtype, stage in CASES]


def _train(dtype: torch.dtype, stage: int) -> list[Tensor]:
    """Return the parameters, master weights and moments after four clipped steps."""
    rank = oracle.rank()
    world = oracle.world()
    model = models.toy().to(dtype)
    optimizer = zerokern.AdamW(
        model.parameters(),
        lr=1e-2,
        stage=stage,
        model=model,
        max_grad_norm=0.5,
    )
    if config.backend() == "triton":
        for bucket in optimizer.coordinator.gradients:
            bucket.packs_at_once = True  # as on a GPU, where one launch packs a bucket
    for step in range(4):
        tokens, targets = (models.share(t, rank, world) for t in models.batch(step))
        models.loss_of(model, tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.full_state_dict()["state"]
    with optimizer.full_params():
        weights = [p.detach().clone() for p in model.parameters()]
    return weights + [value for entry in state.values() for value in entry.values()]


def _trained(backend: str) -> dict[tuple[torch.dtype, int], list[Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROKERN_BACKEND", backend)
        return ranks.run(2, lambda: {case: _train(*case) for case in CASES})[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_world_of_one_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """A kernel that writes a gradient leaves no trace in torch's version counters."""
    results = []
    for backend in ("torch", "native", "triton"):
        monkeypatch.setenv("ZEROKERN_BACKEND", backend)
        results.append(_train(dtype, 1))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.fixture(scope="module")
def reference() -> dict[tuple[torch.dtype, int], list[Tensor]]:
    return _trained("torch")


@pytest.fixture(scope="module", params=["native", "triton"])
def other(
    request: pytest.FixtureRequest,
) -> dict[tuple[torch.dtype, int], list[Tensor]]:
    return _trained(request.param)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_training_run_has_the_same_bits(
    case: tuple[torch.dtype, int],
    reference: dict[tuple[torch.dtype, int], list[Tensor]],
    other: dict,
) -> None:
    """Also with clipping, although the sums of squares are added in another order:
    these agree to 1e-15."""
    assert len(reference[case]) == len(other[case]) > 60
    assert all(
        torch.equal(a, b) for a, b in zip(reference[case], other[case], strict=True)
    )
