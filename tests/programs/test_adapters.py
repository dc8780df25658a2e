"""Adapters of PEFT on a frozen model: they are trained, saved as PEFT does, loaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import peft
import pytest
import ranks
import real_models as real
import torch
from oracle import STAGES, apart, differing, rank, whole
from tasks import STEPS, TASKS, prepared, train_step
from torch import Tensor, nn

# A deprecation of torch 2.13 in the wrapper that we compare with; its new name is not
# there before.
pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")


def save(model: Any, optimizer: Any, stage: int | None, path: Path) -> None:
    """Save the adapter on rank 0, as a user of PEFT does."""
    if stage is None:
        if rank() == 0:
            model.save_pretrained(path)
    else:
        with optimizer.full_params():
            if rank() == 0:
                model.save_pretrained(path)
    torch.distributed.barrier()


def load(base: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return the parameters of a saved adapter."""
    with real.old_names():
        loaded = peft.PeftModel.from_pretrained(base, path)
    return {
        name: param.detach().clone()
        for name, param in loaded.named_parameters()
        if "lora_" in name
    }


def adapter(stage: int | None, folder: Path) -> dict[str, Any]:
    """Train an adapter, save it, load it into a fresh model; return what came back."""
    task = TASKS["lora"]
    model = task.model()
    base = real.gpt2()
    wrapped, optimizer = prepared(task, model, stage)
    for step in range(STEPS):
        train_step(task, wrapped, optimizer, step, rank())
    params = whole(model, optimizer)
    save(model, optimizer, stage, folder / str(stage))
    found = load(base, folder / str(stage))
    return {
        "saved": found,
        "trained": {name: params[name] for name in found},
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "all": sum(map(Tensor.numel, params.values())),
        "moments": 0 if stage is None else optimizer.memory().moments,
    }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> ranks.Cases:
    """Adapters that DDP and every stage trained and saved."""
    folder = tmp_path_factory.mktemp("adapters")
    cases = {
        stage: functools.partial(adapter, stage, folder) for stage in (None, *STAGES)
    }
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("stage", STAGES)
def test_a_saved_adapter_is_that_of_peft_under_ddp(
    adapters: ranks.Cases, stage: int
) -> None:
    for ours, theirs, first in zip(
        adapters[stage], adapters[None], adapters[1], strict=True
    ):
        assert ours["trainable"] < 0.01 * ours["all"]
        assert len(ours["saved"]) == 2 * real.LAYERS
        assert differing(ours["saved"], ours["trained"]) == []
        assert differing(ours["saved"], first["saved"]) == []
        assert apart(ours["saved"], theirs["saved"]) == {}


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_have_no_moments(adapters: ranks.Cases, stage: int) -> None:
    for ours in adapters[stage]:
        assert 0 < ours["moments"] <= 8 * (ours["trainable"] / 2 + 64 * 4 * real.LAYERS)
