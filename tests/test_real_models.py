"""Models of public libraries train as under DistributedDataParallel and torch's AdamW,
in every stage, in equal bits.

The reference runs in the same group of ranks: DDP sums gradients in another order than
we do, nothing else differs.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import peft
import pytest
import ranks
import real_models as real
import torch
import torch._dynamo  # an optimizer imports it: here, before ranks are forked
from oracle import STAGES, apart, differing, rank, sharded, whole
from real_models import Task
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerokern

# A deprecation of torch 2.13 in the wrapper that we compare with; its new name is not
# there before.
pytestmark = pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")

STEPS, LR = 5, 1e-2
EPS = 1e-3
"""Of Adam, in both runs. Some gradients are zero but for rounding: a bias of
attention's keys moves all scores alike, one before a BatchNorm is subtracted again.
With 1e-8 Adam would blow 1e-9 of noise up to a step; so it is 1e-6 of one, and
`REDUCED_SUMS` holds for them too."""

TASKS = {
    "gpt2": Task(build=real.gpt2, batch=real.tokens),
    "gpt2, reentrant checkpoints": Task(
        build=real.checkpointed(real.gpt2, reentrant=True), batch=real.tokens
    ),
    "gpt2, checkpoints": Task(
        build=real.checkpointed(real.gpt2, reentrant=False), batch=real.tokens
    ),
    "llama": Task(build=real.llama, batch=real.tokens),
    "llama, reentrant checkpoints": Task(
        build=real.checkpointed(real.llama, reentrant=True), batch=real.tokens
    ),
    "llama, checkpoints": Task(
        build=real.checkpointed(real.llama, reentrant=False), batch=real.tokens
    ),
    "mixtral": Task(build=real.mixtral, batch=real.tokens),
    "qwen2_moe": Task(build=real.qwen2_moe, batch=real.tokens),
    "switch": Task(build=real.switch, batch=real.tokens, unused=True),
    "t5": Task(build=real.t5, batch=real.tokens),
    "t5, by type": Task(build=real.t5, batch=real.tokens, units=real.t5_block),
    "t5, reentrant checkpoints": Task(
        build=real.checkpointed(real.t5, reentrant=True), batch=real.tokens
    ),
    "t5, checkpoints": Task(
        build=real.checkpointed(real.t5, reentrant=False), batch=real.tokens
    ),
    "vit": Task(build=real.vit, batch=real.images),
    "resnet": Task(build=real.resnet, batch=real.images),
    "resnet, by type": Task(
        build=real.resnet, batch=real.images, units=real.resnet_layer
    ),
    "lora": Task(build=real.lora, batch=real.tokens),
    "lora, reentrant checkpoints": Task(
        build=lambda: real.lora(real.checkpointed(real.gpt2, reentrant=True)),
        batch=real.tokens,
    ),
    "unet": Task(build=real.UNet, batch=real.noisy_images),
    "unet, by type": Task(
        build=real.UNet, batch=real.noisy_images, units=real.unet_block
    ),
}
SLOW = {
    "llama, reentrant checkpoints",
    "llama, checkpoints",
    "t5, reentrant checkpoints",
    "t5, checkpoints",
    "t5, by type",
}
OTHER_WORLDS = {
    (1, "gpt2"),
    (1, "switch"),
    (3, "mixtral"),
    (3, "switch"),
    (3, "resnet, by type"),
    (3, "lora"),
}

Result = dict[str, Any]


def train(name: str, stage: int | None) -> Result:
    """Train on this rank's batches; with stage None, under DDP and torch's AdamW."""
    task = TASKS[name]
    model = task.model()
    wrapped: nn.Module = model
    if stage is None:
        wrapped = DistributedDataParallel(
            model, find_unused_parameters=task.unused, broadcast_buffers=False
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    else:
        optimizer = sharded(
            model,
            stage,
            lr=LR,
            eps=EPS,
            buckets=zerokern.Buckets(units=task.units, bytes=20_000),
        )
    gathered = gathered_in_forward(model, optimizer) if stage == 3 else [0]
    experts = chosen_experts(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = real.loss_of(wrapped, task.rows(step, rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {
        "losses": {"losses": torch.stack(losses)},
        "params": whole(model, optimizer),
        "buffers": buffers,
        "gathered": max(gathered),
        "experts": experts,
        "left": 0 if stage is None else optimizer.memory().buffers,
    }


def gathered_in_forward(model: nn.Module, optimizer: Any) -> list[int]:
    """Return a list that fills with the bytes of scratch memory after each module's
    forward, outside of backward."""
    seen = []

    def look(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            seen.append(optimizer.memory().buffers)

    for module in model.modules():
        module.register_forward_hook(look)
    return seen


def chosen_experts(model: nn.Module) -> list[tuple[int, ...]]:
    """Return a list that fills with the experts that each router chose first."""
    seen: list[tuple[int, ...]] = []

    def look(module: nn.Module, _: Any, output: tuple[Tensor, ...]) -> None:
        logits = next(
            t for t in output if t.is_floating_point() and t.shape[-1] == real.EXPERTS
        )
        seen.append(tuple(logits.argmax(-1).unique().tolist()))

    for module in model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(look)
    return seen


@functools.cache
def trained(ranks_: int, names: tuple[str, ...]) -> ranks.Cases:
    """Train some models under DDP and in every stage."""
    return ranks.run_cases(
        ranks_,
        {
            (name, stage): functools.partial(train, name, stage)
            for name in names
            for stage in (None, *STAGES)
        },
    )


def group_of(at: int, name: str) -> tuple[str, ...]:
    """Return the names that share a group of ranks: those of default runs, or a slow
    one alone."""
    return (
        (name,) if at != 2 or name in SLOW else tuple(n for n in TASKS if n not in SLOW)
    )


def every_model() -> Iterator[Any]:
    """Yield (world, name) as parameters."""
    for name in TASKS:
        yield pytest.param(
            2, name, id=name, marks=[pytest.mark.long] if name in SLOW else []
        )
    for at, name in sorted(OTHER_WORLDS):
        yield pytest.param(at, name, id=f"{name}, world {at}", marks=pytest.mark.long)


each_model = pytest.mark.parametrize(("at", "name"), list(every_model()))


@each_model
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["losses", "params", "buffers"])
def test_models_train_as_under_ddp(at: int, name: str, stage: int, what: str) -> None:
    cases = trained(at, group_of(at, name))
    for ours, theirs in zip(cases[name, stage], cases[name, None], strict=True):
        assert apart(ours[what], theirs[what]) == {}
        assert ours["left"] == 0


@each_model
@pytest.mark.parametrize("stage", [2, 3])
def test_stages_agree_bit_for_bit(at: int, name: str, stage: int) -> None:
    cases = trained(at, group_of(at, name))
    for ours, first in zip(cases[name, stage], cases[name, 1], strict=True):
        for what in ("losses", "params", "buffers"):
            assert differing(ours[what], first[what]) == []


# Not T5: the gradients of the encoder's output are added in another order, under plain
# torch too.
RECOMPUTED = [
    name for name in TASKS if "checkpoints" in name and not name.startswith("t5")
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.long] if n in SLOW else [])
        for n in RECOMPUTED
    ],
)
def test_recomputed_layers_change_no_bit(name: str, stage: int) -> None:
    plain = name.split(",")[0]
    ours, theirs = (
        trained(2, group_of(2, name))[name, stage],
        trained(2, group_of(2, plain))[plain, stage],
    )
    for r in range(2):
        assert differing(ours[r]["params"], theirs[r]["params"]) == []


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "switch"])
def test_routing_changes_from_step_to_step(name: str) -> None:
    """What the comparison of these models stands on: experts with and without tokens,
    others on each rank."""
    first, second = trained(2, group_of(2, name))[name, 3]
    assert len(set(first["experts"])) > 1
    assert first["experts"] != second["experts"]
    assert any(len(chosen) < real.EXPERTS for chosen in first["experts"])


# ---------------------------------------------------------------------- units


def planned_bytes(task: Task, ranks_: int) -> int:
    """Return the bytes of what a forward may hold: the root unit and the two largest
    others, padded."""
    model = task.model()
    unit_of: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, child in module.named_children():
            is_one = (
                isinstance(module, nn.ModuleList)
                if task.units is None
                else task.units(child)
            )
            for param in child.parameters() if is_one else ():
                unit_of.setdefault(id(param), f"{name}.{key}")
    sizes: dict[str, int] = {"": 0}
    for param in model.parameters():
        unit = unit_of.get(id(param), "")
        sizes[unit] = sizes.get(unit, 0) + -(-param.numel() // 64) * 64
    padded = {
        unit: -(-size // (64 * ranks_)) * 64 * ranks_ for unit, size in sizes.items()
    }
    return 4 * (padded.pop("") + sum(sorted(padded.values())[-2:]))


def whole_bytes(name: str) -> int:
    """Return the bytes of all parameters of a model."""
    return sum(4 * param.numel() for param in TASKS[name].model().parameters())


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama",
        "mixtral",
        "qwen2_moe",
        "t5",
        "vit",
        "resnet, by type",
        "unet, by type",
        "lora",
    ],
)
def test_a_forward_gathers_the_root_and_two_units(name: str) -> None:
    for result in trained(2, group_of(2, name))[name, 3]:
        assert (
            0 < result["gathered"] <= planned_bytes(TASKS[name], 2) < whole_bytes(name)
        )


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_units_by_type_gather_less_than_the_default(name: str) -> None:
    """The ResNet's ModuleList holds stages of layers, the U-Net has none: the default
    gathers much at once."""
    cases = trained(2, group_of(2, name))
    for by_type, default in zip(
        cases[f"{name}, by type", 3], cases[name, 3], strict=True
    ):
        assert by_type["gathered"] < 0.8 * default["gathered"]
        assert differing(by_type["params"], default["params"]) == []


# ---------------------------------------------------------------------- adapters


def adapter(stage: int | None, folder: Path) -> dict[str, Any]:
    """Train an adapter, save it with PEFT on rank 0, load it into a fresh model; return
    what came back."""
    task = TASKS["lora"]
    model: Any = task.model()
    base = real.gpt2()
    if stage is None:
        wrapped: nn.Module = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    else:
        wrapped, optimizer = model, sharded(model, stage, lr=LR, eps=EPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        real.loss_of(wrapped, task.rows(step, rank())).backward()
        optimizer.step()
    params = whole(model, optimizer)
    path = folder / str(stage)
    if stage is None:
        if rank() == 0:
            model.save_pretrained(path)
    else:
        with optimizer.full_params():
            if rank() == 0:
                model.save_pretrained(path)
    torch.distributed.barrier()
    with real.old_names():
        loaded = peft.PeftModel.from_pretrained(base, path)
    found = {
        name: p.detach().clone()
        for name, p in loaded.named_parameters()
        if "lora_" in name
    }
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "saved": found,
        "trained": {name: params[name] for name in found},
        "trainable": trainable,
        "all": sum(map(Tensor.numel, params.values())),
        "moments": 0 if stage is None else optimizer.memory().moments,
    }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> ranks.Cases:
    """Adapters that DDP and every stage trained and saved."""
    folder = tmp_path_factory.mktemp("adapters")
    return ranks.run_cases(
        2,
        {stage: functools.partial(adapter, stage, folder) for stage in (None, *STAGES)},
    )


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


# ---------------------------------------------------------------------- generation


def generate(
    build: Callable[[], nn.Module], stage: int | None, how: str
) -> dict[str, Any]:
    """Generate up to 3 tokens on rank 0 and up to 9 on rank 1, then train a step."""
    task = Task(build=build, batch=real.tokens)
    model: Any = task.model()
    optimizer = None if stage is None else sharded(model, stage, lr=LR, eps=EPS)
    prompt = task.rows(0, 0)["input_ids"][:, :4]
    options = {
        "max_new_tokens": (3, 9)[rank()],
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model.eval()
    if how == "join" and optimizer is not None:
        with optimizer.join():
            tokens = model.generate(prompt, **options)
    else:
        tokens = model.generate(
            prompt, synced_gpus=how == "synced" and stage is not None, **options
        )
    model.train()
    if optimizer is None:
        return {"tokens": tokens}
    real.loss_of(model, task.rows(0, rank())).backward()
    optimizer.step()
    return {
        "tokens": tokens,
        "params": whole(model, optimizer),
        "left": optimizer.memory().buffers,
    }


GENERATORS = {
    "gpt2": real.gpt2,
    "llama": real.llama,
    "mixtral": real.mixtral,
    "t5": real.t5,
}
WAYS = ("synced", "join")


@functools.cache
def generated() -> ranks.Cases:
    """Generate with unsharded models, and in every stage."""
    cases = {
        (name, stage, how): functools.partial(generate, build, stage, how)
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
    for r in range(2):
        ours, plain = cases[name, stage, how][r], cases[name, None, how][r]
        assert torch.equal(ours["tokens"], plain["tokens"])
        assert ours["left"] == 0
        assert differing(ours["params"], cases[name, 1, "synced"][r]["params"]) == []
    assert (
        cases[name, stage, how][0]["tokens"].shape
        != cases[name, stage, how][1]["tokens"].shape
    )


def generate_alone() -> str:
    """Stage 3 without a word to the other rank: generate, then train a step; return the
    error."""
    task = TASKS["gpt2"]
    model: Any = task.model()
    optimizer = sharded(model, 3, lr=LR, process_group=faults.short_group(3.0))
    prompt = task.rows(0, 0)["input_ids"][:, :4]
    try:
        model.generate(
            prompt,
            max_new_tokens=(3, 9)[rank()],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        real.loss_of(model, task.rows(0, rank())).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_stop_generating_unasked_are_told_of_the_collective() -> None:
    for message in ranks.run(2, generate_alone):
        assert "'transformer.h." in message or "root" in message


# ------------------------------------------------------------ models on the meta device

SAVED = {
    "gpt2": Task(build=real.gpt2, batch=real.tokens),
    "t5": Task(build=real.t5, batch=real.tokens),
    "resnet": Task(build=real.resnet, batch=real.images, units=real.resnet_layer),
}


def from_file(task: Task, stage: int, folder: Path) -> dict[str, list[str]]:
    """Train from a file that save_pretrained wrote, and from the model that was
    saved."""
    saved: Any = task.model()
    if rank() == 0:
        saved.save_pretrained(folder)
    torch.distributed.barrier()
    with torch.device("meta"):
        made = task.build().train()
    results = []
    with safe_open(folder / "model.safetensors", "pt") as file:
        for model, init in ((made, file), (saved, None)):
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
                optimizer.zero_grad()
                real.loss_of(model, task.rows(step, rank())).backward()
                optimizer.step()
            results.append(
                whole(model, optimizer)
                | {n: buffer.clone() for n, buffer in model.named_buffers()}
            )
    return {
        "differing": differing(*results),
        "absent": [n for n, p in made.named_parameters() if p.is_meta],
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
    start, losses = whole(model, optimizer), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = real.loss_of(model, TASKS["gpt2"].rows(0, rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "start": start,
        "losses": losses,
        "tied": model.lm_head.weight is model.transformer.wte.weight,
    }


@functools.cache
def on_meta(folder: Path) -> ranks.Cases:
    """Train what was built without memory."""
    cases: dict[Any, Callable[[], Any]] = {
        (name, stage): functools.partial(
            from_file, task, stage, folder / f"{name}{stage}"
        )
        for name, task in SAVED.items()
        for stage in STAGES
    }
    return ranks.run_cases(
        2, cases | {stage: functools.partial(from_function, stage) for stage in STAGES}
    )


@pytest.fixture(scope="module")
def meta_cases(tmp_path_factory: pytest.TempPathFactory) -> ranks.Cases:
    """Results of models that were built on the meta device."""
    return on_meta(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_trains_from_the_file_of_save_pretrained(
    meta_cases: ranks.Cases, name: str, stage: int
) -> None:
    for result in meta_cases[name, stage]:
        assert result == {"differing": [], "absent": []}


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_is_initialised_by_its_own_function(
    meta_cases: ranks.Cases, stage: int
) -> None:
    first, second = meta_cases[stage]
    assert differing(first["start"], second["start"]) == []
    for name, value in first["start"].items():
        kind = name.split(".")[-2]
        if kind.startswith("ln_"):
            assert torch.equal(
                value, torch.full_like(value, float(name.endswith("weight")))
            )
        elif name.endswith("bias"):
            assert not value.any()
        else:  # normal with deviation 0.02, less where it enters the residual stream
            deviation = 0.02 / (2 * real.LAYERS) ** 0.5 if kind == "c_proj" else 0.02
            assert 0.85 * deviation < value.std() < 1.15 * deviation
            assert abs(value.mean()) < 0.15 * deviation
    for result in (first, second):
        assert result["tied"]
        assert result["losses"][-1] < result["losses"][0]


def buffer_that_no_file_has(stage: int, folder: Path) -> str:
    """Load Llama, whose rotary frequencies are a buffer that is not saved, from its
    file; return the refusal."""
    saved: Any = TASKS["llama"].model()
    saved.save_pretrained(folder / str(rank()))
    with torch.device("meta"):
        model = real.llama()
    with safe_open(folder / str(rank()) / "model.safetensors", "pt") as file:
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
    assert "inv_freq" in buffer_that_no_file_has(stage, tmp_path)


# ---------------------------------------------------------------------- examples

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "causal_lm.py": ["--checkpoint"],
    "moe.py": [],
    "lora.py": [],
    "image.py": [],
    "diffusion.py": [],
}


def run_example(script: str, *arguments: str, nproc: int = 2) -> list[float]:
    """Run an example as a user does; return the losses that it prints."""
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        f"examples/{script}",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        float(line.split()[-1])
        for line in done.stdout.splitlines()
        if line.startswith("step")
    ]


@pytest.mark.long
@pytest.mark.parametrize("script", EXAMPLES)
def test_examples_learn_and_every_stage_prints_the_same(
    script: str, tmp_path: Path
) -> None:
    options = [
        *EXAMPLES[script],
        *(["--out", str(tmp_path / "adapter")] if script == "lora.py" else []),
    ]
    losses = [run_example(script, "--stage", str(stage), *options) for stage in STAGES]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1] < 0.9 * losses[0][0]
    if script == "lora.py":
        assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 0


def test_the_example_of_a_language_model_runs() -> None:
    losses = run_example("causal_lm.py", "--stage", "3", "--steps", "20")
    assert losses[-1] < losses[0]


def test_every_example_is_listed_with_its_command() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    assert sorted(EXAMPLES) == sorted(
        path.name for path in (ROOT / "examples").glob("*.py")
    )
    for script in EXAMPLES:
        assert f"torchrun --nproc-per-node 2 examples/{script}" in listed
        assert len((ROOT / "examples" / script).read_text().splitlines()) < 100
