"""`generate` of transformers on ranks that stop at different lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import ranks
import real_models as real
import torch
from oracle import STAGES, differing, rank, sharded, whole
from registry import cases_of
from tasks import EPS, LR, TASKS, Task, loss_of
from torch import Tensor, nn
from wire import short_group

case = cases_of("programs")

GENERATORS = {
    "gpt2": real.gpt2,
    "llama": real.llama,
    "mixtral": real.mixtral,
    "t5": real.t5,
}
WAYS = ("synced", "join")


def generate(model: Any, rows: dict[str, Tensor], **options: Any) -> Tensor:
    """Generate up to 3 tokens on even ranks and up to 9 on odd ones."""
    return model.generate(
        rows["input_ids"][:, :4],
        max_new_tokens=(3, 9)[rank() % 2],
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


def generate_and_train(
    build: Callable[[], nn.Module], stage: int | None, how: str
) -> dict[str, Any]:
    """Generate, then train a step; stage None generates on an unsharded model."""
    task = Task(build=build)
    model = task.model()
    optimizer = None if stage is None else sharded(model, stage, lr=LR, eps=EPS)
    joined = how == "join" and optimizer is not None
    model.eval()
    with optimizer.join() if joined else nullcontext():
        options = {} if joined else {"synced_gpus": how == "synced" and bool(stage)}
        tokens = generate(model, task.rows(0, 0), **options)
    model.train()
    if optimizer is None:
        return {"tokens": tokens}
    loss_of(model, task.rows(0, rank())).backward()
    optimizer.step()
    return {
        "tokens": tokens,
        "params": whole(model, optimizer),
        "left": optimizer.memory().buffers,
    }


@functools.cache
def generated() -> ranks.Cases:
    """Generate with unsharded models, and in every stage."""
    cases = {
        (name, stage, how): functools.partial(generate_and_train, build, stage, how)
        for name, build in GENERATORS.items()
        for stage in (None, *STAGES)
        for how in WAYS
    }
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", WAYS)
def test_ranks_may_stop_generating_at_different_lengths(
    name: str, stage: int, how: str
) -> None:
    cases = generated()
    found = cases[name, stage, how]
    for ours, plain, first in zip(
        found, cases[name, None, how], cases[name, 1, "synced"], strict=True
    ):
        assert torch.equal(ours["tokens"], plain["tokens"])
        assert ours["left"] == 0
        assert differing(ours["params"], first["params"]) == []
    assert found[0]["tokens"].shape != found[1]["tokens"].shape


@case(stages=(3,))
def generation_without_a_word(stage: int) -> str:
    """Generate without telling the other rank, then train a step; return the error."""
    task = TASKS["gpt2"]
    model = task.model()
    optimizer = sharded(model, stage, lr=LR, process_group=short_group(3.0))
    try:
        generate(model, task.rows(0, 0))
        loss_of(model, task.rows(0, rank())).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_stop_generating_unasked_are_told_of_the_collective() -> None:
    for message in case.done(2)["generation_without_a_word", 3]:
        assert "'transformer.h." in message or "root" in message
