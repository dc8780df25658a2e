"""`zerokern dryrun`: real training scripts as one rank of any world, against the same
scripts on real ranks."""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import foresight
import pytest
import ranks
import torch.distributed as dist
from repository import ROOT
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerokern import cli
from zerokern.plan.script import dryrun

EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "language model, stage 3": ("causal_lm.py", "--stage", "3"),
    "language model, stage 1": ("causal_lm.py", "--stage", "1"),
    "language model, checkpoints": ("causal_lm.py", "--stage", "3", "--checkpoint"),
    "lora, stage 3": ("lora.py", "--stage", "3"),
    "images, stage 2": ("image.py", "--stage", "2"),
    "diffusion, stage 3": ("diffusion.py", "--stage", "3"),
}
STEPS = 3

ON_GPU = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from zerokern import AdamW

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
assert dist.get_rank() == int(os.environ["RANK"])
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model = model.cuda().bfloat16()
optimizer = AdamW(model.parameters(), lr=1e-3, stage=2, max_grad_norm=1.0)
data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
for inputs, labels in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    with torch.autocast("cuda", torch.bfloat16):
        outputs = model(inputs.to("cuda:0").bfloat16()).float()
        loss = nn.functional.cross_entropy(outputs, labels.cuda(non_blocking=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    everybody = loss.detach().clone()
    dist.all_reduce(everybody)
    if not torch.isfinite(loss):
        raise SystemExit("the loss is not finite")
    print(f"{loss.item():.3f}", loss.tolist(), everybody.cpu().numpy())
    torch.cuda.synchronize()
dist.destroy_process_group()
"""


class Enough(BaseException):
    """The script has made its steps."""


def in_earnest(script: str, *arguments: str) -> Any:
    """Run a script on this rank of a real group until it has made its steps; return its
    log and memory."""
    optimizers: list[Any] = []

    def stepped(optimizer: Any, *_: Any) -> None:
        optimizers.append(optimizer)
        if len(optimizers) == STEPS:
            raise Enough

    hook = register_optimizer_step_post_hook(stepped)
    environment = {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
    }
    try:
        with (
            mock.patch.dict(os.environ, environment),
            mock.patch.object(sys, "argv", [script, *arguments]),
            mock.patch.object(dist, "init_process_group", lambda *args, **kwargs: None),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of libraries, to the script's author
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    except Enough:
        pass
    finally:
        hook.remove()
    return optimizers[-1].comm_log(), optimizers[-1].memory()


@functools.cache
def done(world: int) -> ranks.Cases:
    cases = {
        name: functools.partial(in_earnest, *script) for name, script in SCRIPTS.items()
    }
    return ranks.run_cases(world, cases)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("world", ranks.worlds(2, rarely=4))
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_log_is_that_of_the_real_run(name: str, world: int) -> None:
    script, *arguments = SCRIPTS[name]
    outcome = dryrun(
        EXAMPLES / script, arguments, world=world, rank=world - 1, steps=STEPS
    )
    for log, memory in done(world)[name]:
        assert foresight.differences(outcome.calls[0], log) == []
        assert outcome.memory[0] == memory
    assert outcome.steps == STEPS


def test_a_script_for_gpus_runs_without_any(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ON_GPU)
    outcome = dryrun(script, [], world=64, rank=9)
    assert (outcome.rank, outcome.world, outcome.steps) == (9, 64, 2)
    assert {call.group for call in outcome.calls[0]} == {64}
    assert outcome.peak.bytes > outcome.memory[0].total > 0
    assert outcome.timeline


def test_the_command_prints_tables_and_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ON_GPU)
    assert cli.main(["dryrun", "--world", "512", "--steps", "1", str(script)]) == 0
    printed = capfd.readouterr().out
    assert "as rank 0 of 512: 1 steps" in printed
    assert "reduce_scatter" in printed
    assert "at the peak" in printed
    assert cli.main(["dryrun", "--world", "512", "--json", str(script)]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["world"] == 512
    assert found["collectives"][0]
    assert found["peak"]["holders"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print('nothing to do')", "ended without an optimizer step"),
        ("raise SystemExit(3)", "ended with exit status 3"),
        (
            "import torch\ntorch.nonzero(torch.ones(3))",
            "depends on values, and a rehearsal has none",
        ),
        (None, "is not a file"),
    ],
)
def test_what_cannot_be_rehearsed_is_said(
    tmp_path: Path, text: str | None, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert cli.main(["dryrun", "--world", "2", str(script)]) == 2
    assert says in capfd.readouterr().err


def test_there_is_no_such_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ON_GPU)
    assert cli.main(["dryrun", "--world", "4", "--rank", "4", str(script)]) == 2
    assert "it must be from 0 to 3" in capfd.readouterr().err


LARGE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from zerokern import AdamW

config = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256,
)
model = LlamaForCausalLM(config).bfloat16()
optimizer = AdamW(model.parameters(), lr=1e-4, stage=3, model=model)
text = torch.zeros(1, 4096, dtype=torch.int64)
while True:
    model(input_ids=text, labels=text, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_70_billion_parameters_on_1024_ranks(tmp_path: Path) -> None:
    """One core, in a process of its own: under a minute, of the processor's, and 4
    GiB."""
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    options = ["--world", "1024", "--steps", "1", "--json"]
    command = [sys.executable, "-m", "zerokern", "dryrun", *options, str(script)]
    core = {min(os.sched_getaffinity(0))}
    with (tmp_path / "found.json").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, preexec_fn=lambda: os.sched_setaffinity(0, core)
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["params"] == 70_553_706_496
    held = sum(found["persistent_bytes"][0].values())
    assert held == pytest.approx(18 * found["params"] / 1024, rel=0.01)
    assert usage.ru_utime + usage.ru_stime < 60
    assert usage.ru_maxrss * 1024 < 4 * 2**30
