"""Models of public libraries that were built on the meta device: filled from the file
of `save_pretrained`, or by the library's own function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import real_models as real
import torch
from oracle import STAGES, differing, rank, whole
from safetensors import safe_open
from tasks import EPS, LR, STEPS, TASKS, Task, train_step
from torch import Tensor, nn

import zerokern

SAVED = {
    "gpt2": Task(build=real.gpt2),
    "t5": Task(build=real.t5),
    "resnet": Task(build=real.resnet, batch=real.images, units=real.resnet_layer),
}


def train(task: Task, model: nn.Module, stage: int, init: Any) -> dict[str, Tensor]:
    """Return the parameters after two steps, and the buffers."""
    optimizer = zerokern.AdamW(
        model.parameters(),
        LR,
        eps=EPS,
        stage=stage,
        model=model,
        init=init,
        buckets=zerokern.Buckets(units=task.units),
    )
    for step in range(2):
        train_step(task, model, optimizer, step, rank())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return whole(model, optimizer) | buffers


def from_file(task: Task, stage: int, folder: Path) -> dict[str, list[str]]:
    """Train from a file that save_pretrained wrote, and from the model that was
    saved."""
    saved: Any = task.model()
    if rank() == 0:
        saved.save_pretrained(folder)
    torch.distributed.barrier()
    with torch.device("meta"):
        made = task.build().train()
    with safe_open(folder / "model.safetensors", "pt") as file:
        ours = train(task, made, stage, file)
    theirs = train(task, saved, stage, None)
    return {
        "differing": differing(ours, theirs),
        "absent": [name for name, param in made.named_parameters() if param.is_meta],
    }


def from_function(stage: int) -> dict[str, Any]:
    """Train GPT-2 from the library's own function."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = real.gpt2().train()
    optimizer = zerokern.AdamW(
        model.parameters(),
        LR,
        eps=EPS,
        stage=stage,
        model=model,
        init=model._init_weights,
    )
    start = whole(model, optimizer)
    losses = [
        train_step(TASKS["gpt2"], model, optimizer, 0, rank()).item()
        for _ in range(STEPS)
    ]
    return {
        "start": start,
        "losses": losses,
        "tied": model.lm_head.weight is model.transformer.wte.weight,
    }


@pytest.fixture(scope="module")
def meta_cases(tmp_path_factory: pytest.TempPathFactory) -> ranks.Cases:
    """What came of models that were built without memory."""
    folder = tmp_path_factory.mktemp("saved")
    cases: dict[Any, Callable[[], Any]] = {
        stage: functools.partial(from_function, stage) for stage in STAGES
    }
    for name, task in SAVED.items():
        for stage in STAGES:
            cases[name, stage] = functools.partial(
                from_file, task, stage, folder / f"{name}{stage}"
            )
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_trains_from_the_file_of_save_pretrained(
    meta_cases: ranks.Cases, name: str, stage: int
) -> None:
    for result in meta_cases[name, stage]:
        assert result == {"differing": [], "absent": []}


def assert_gpt2_starts_as_it_should(name: str, value: Tensor) -> None:
    kind = name.split(".")[-2]
    if kind.startswith("ln_"):
        constant = float(name.endswith("weight"))
        assert torch.equal(value, torch.full_like(value, constant))
    elif name.endswith("bias"):
        assert not value.any()
    else:  # normal with deviation 0.02, less where it enters the residual stream
        deviation = 0.02 / (2 * real.LAYERS) ** 0.5 if kind == "c_proj" else 0.02
        assert 0.85 * deviation < value.std() < 1.15 * deviation
        assert abs(value.mean()) < 0.15 * deviation


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_is_initialised_by_its_own_function(
    meta_cases: ranks.Cases, stage: int
) -> None:
    first, second = meta_cases[stage]
    assert differing(first["start"], second["start"]) == []
    for name, value in first["start"].items():
        assert_gpt2_starts_as_it_should(name, value)
    for result in (first, second):
        assert result["tied"]
        assert result["losses"][-1] < result["losses"][0]


def refusal_of_a_file(stage: int, folder: Path) -> str:
    """Load Llama, whose rotary frequencies are a buffer that is not saved, from its
    file; return the error."""
    saved: Any = TASKS["llama"].model()
    saved.save_pretrained(folder)
    with torch.device("meta"):
        model = real.llama()
    with safe_open(folder / "model.safetensors", "pt") as file:
        try:
            zerokern.AdamW(model.parameters(), stage=stage, model=model, init=file)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_buffer_on_meta_that_no_file_has_is_refused_by_name(
    tmp_path: Path, stage: int
) -> None:
    """Memory that nobody wrote would be the frequencies of the rotary embedding."""
    assert "inv_freq" in refusal_of_a_file(stage, tmp_path)
