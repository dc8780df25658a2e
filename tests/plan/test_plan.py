"""`zerokern plan`: the models that it takes, what it refuses, what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zerokern import cli
from zerokern.plan.rehearsal import Rehearsal
from zerokern.plan.workload import find, of_count

SMALL = ["--params", "30e6", "--layers", "4", "--sequence", "64", "--recipe", "fp32"]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "architectures": ["LlamaForCausalLM"],
}
T5 = {
    "model_type": "t5",
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "vocab_size": 320,
    "decoder_start_token_id": 0,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x

def with_loss():
    batch = torch.randn(8, 64)
    return Net(), lambda model: model(batch).square().mean()

def needs(path):
    return Net()

def lazy():
    return nn.LazyLinear(3)

def reads():
    return nn.Linear(3, len(open("no such file").read()))

def other():
    return 7

number = 7
"""


def planned(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what the command says as JSON."""
    assert cli.main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command says instead of planning."""
    try:
        assert cli.main(["plan", *arguments]) == 2
    except SystemExit as exit_:
        assert exit_.code == 2
    return capfd.readouterr().err


# ---------------------------------------------------------------------- what is planned


@pytest.mark.parametrize(
    ("config", "per"),
    [
        pytest.param(LLAMA, "tokens", id="llama"),
        pytest.param(T5, "tokens", id="t5", marks=pytest.mark.long),
        pytest.param(VIT, "samples", id="vit"),
        pytest.param(MIXTRAL, "tokens", id="mixtral"),
    ],
)
def test_a_configuration_of_transformers(
    config: dict[str, Any], per: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = ["--gpus", "4", "--sequence", "16", "--recipe", "fp32"]
    strategies = planned(capfd, str(path), *options)["strategies"]
    assert [strategy["stage"] for strategy in strategies] == [1, 2, 3]
    assert all(strategy["fits"] for strategy in strategies)
    assert find(str(path), batch=1, sequence=16, dtype=torch.float32).per == per


def test_model_flops_are_those_of_matrix_products_and_attention(tmp_path: Path) -> None:
    """6 FLOPs per token and parameter that it meets, experts that it does not meet left
    out; attention on top."""
    path, tokens, width, layers = tmp_path / "config.json", 16, 64, 3
    for config, unused in ((LLAMA, 0), (MIXTRAL, layers * 2 * 3 * 64 * 128)):
        path.write_text(json.dumps(config))
        workload = find(str(path), batch=1, sequence=tokens, dtype=torch.bfloat16)
        with Rehearsal(1) as rehearsal:
            model, loss = workload.build()
            assert loss is not None
            rehearsal.record()
            loss(model).backward()
            found = rehearsal.record().flops()
            matrices = [
                param.numel()
                for name, param in model.named_parameters()
                if param.dim() > 1 and "embed" not in name
            ]
        met = sum(matrices) - unused
        # Two products forward, five backward.
        attention = layers * 2 * tokens * tokens * width * (2 + 5)
        assert found == 6 * tokens * met + attention, config["model_type"]


def test_an_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planned_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    options = ["--gpus", "4", "--dtype", "fp32", "--stage", "3"]
    with_loss = planned(capfd, "planned_models:with_loss", *options)["strategies"][0]
    assert with_loss["params"] == 3 * 65 * 64
    assert with_loss["peak"]["bytes"] > 0
    shards_of_others = with_loss["params"] * 4 * 3 / 4
    assert sum(with_loss["sent_bytes"].values()) > 3 * shards_of_others

    without = planned(capfd, "planned_models:Net", *options)["strategies"][0]
    assert without["peak"] is None
    assert without["persistent_bytes"] == with_loss["persistent_bytes"]


@pytest.mark.parametrize(
    ("params", "layers"), [(125e6, 12), (1.3e9, 24), (7e9, 32), (70e9, 80), (1e12, 128)]
)
def test_a_decoder_has_about_as_many_parameters_as_asked(
    params: float, layers: int
) -> None:
    workload = of_count(int(params), layers, batch=1, sequence=8, dtype=torch.bfloat16)
    with Rehearsal(1):
        model, _ = workload.build()
        count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(params, rel=0.08)


# ---------------------------------------------------------------------- what is refused


def test_a_forward_that_fails_is_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Torch's grouped products have shapes in bf16 only.
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    options = ["--dtype", "fp32", "--sequence", "16"]
    said = complaint(capfd, str(tmp_path / "config.json"), *options)
    assert said.count("\n") == 1
    assert "the forward pass fails on tensors without values" in said
    assert "--dtype" in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("planned_models:needs", "needs arguments (path); give a function without any"),
        ("planned_models:lazy", "gets its shape from the first batch"),
        ("planned_models:reads", "cannot be built without data or files"),
        ("planned_models:other", "returned a int; it must return a torch.nn.Module"),
        ("planned_models:number", "is a int; give a module class or a function"),
        ("planned_models:gone", "cannot be imported"),
        ("no_such_module:gone", "cannot be imported"),
        ("Net", "neither a file nor an import path"),
        ("config.json", "no configuration that transformers knows"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_by_name(
    name: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "planned_models.py").write_text(MODULE)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert says in complaint(capfd, name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--gpus", "8"],
            "give a model (package.module:factory or config.json) or --params",
        ),
        ([*SMALL, "--gpu-memory", "80"], "write it with its unit, for example 80GiB"),
        ([*SMALL, "--inter", "400"], "write bytes as 450GB/s or bits as 400Gb/s"),
        ([*SMALL, "--gpus", "1.5"], "whole number"),
        ([*SMALL, "--gpu-memory", "1GiB"], "leaves nothing"),
        ([*SMALL, "--stage", "4"], "invalid choice"),
        (
            ["--params", "1000", "--layers", "32"],
            "parameters are too few for 32 layers",
        ),
        ([*SMALL, "--gpus", "64000000"], "more ranks than elements"),
        ([*SMALL, "--machine", "no such file"], "is no machine file"),
        (
            ["--calibrate", "--machine", "no such folder/mine.json"],
            "there is no folder no such folder",
        ),
        (
            [*SMALL, "--plot", "no such folder/plan.png"],
            "there is no folder no such folder",
        ),
    ],
)
def test_bad_input_is_refused_by_name(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert says in complaint(capfd, *arguments)


# ---------------------------------------------------------------------- what it says


def test_the_report_adds_up(capfd: pytest.CaptureFixture[str]) -> None:
    found = planned(capfd, *SMALL, "--gpus", "64", "--accumulate", "2")
    all_held = []
    for strategy in found["strategies"]:
        held = sum(strategy["persistent_bytes"].values())
        assert strategy["fits"]
        assert strategy["peak"]["bytes"] > held

        sent = strategy["sent_bytes"]
        crossed = strategy["inside_bytes"] + strategy["across_bytes"]
        assert sent.keys() == {"reduce_scatter", "all_gather", "all_gather_words"}
        assert crossed == pytest.approx(sum(sent.values()), rel=1e-3)

        assert strategy["step_s"] >= strategy["compute_s"] > 0
        assert 0 < strategy["utilisation"] < 1
        all_held.append(held)
    assert all_held[0] > all_held[1] > all_held[2]
    assert found["recommended"] == "stage 1, fp32"


def test_the_command_prints_a_table_and_draws(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.png"
    assert cli.main(["plan", *SMALL, "--gpus", "16", "--plot", str(picture)]) == 0
    printed = capfd.readouterr().out
    assert "Take stage 1, fp32" in printed
    assert "activations" in printed
    assert "assumed: H100 nodes" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
