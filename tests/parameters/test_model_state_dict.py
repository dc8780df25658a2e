"""The state dict of a sharded model is that of a plain one: keys, buffers and ties; it
is exported, and outlives the context that made it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
from marks import at_worlds, in_stages
from oracle import differing, rank, sharded, whole, world
from registry import cases_of
from torch import Tensor, nn
from training import params_of, train_shares

case = cases_of("parameters")


class Buffered(nn.Module):
    """Buffers of several kinds, a weight in two places, a module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False] * 8 + [True]))
        self.register_buffer("scale", torch.full((17,), 0.5), persistent=False)
        self.register_buffer("nothing", None)
        self.blocks = nn.ModuleList(models.Block() for _ in range(2))
        self.shared = self.blocks[0].norm
        self.temperatures = nn.ParameterList([torch.tensor(1.5), torch.ones(3)])
        self.head = nn.Linear(17, models.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        x = self.embedding(tokens) * self.mask * self.scale
        for block in self.blocks:
            x = block(x)
        factor, term = self.temperatures
        return self.head(self.shared(x)) * factor + term.mean()


def buffered(seed: int) -> Buffered:
    torch.manual_seed(seed)
    return Buffered()


def described(state: dict[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    """Return keys in order, dtypes, shapes."""
    return [(key, value.dtype, value.shape) for key, value in state.items()]


@case
def saved_and_loaded(stage: int) -> dict[str, Any]:
    model = buffered(0)
    optimizer = sharded(model, stage, lr=1e-2)
    train_shares(model, optimizer, range(2), world())
    with optimizer.full_params():
        saved = {key: value.clone() for key, value in model.state_dict().items()}
    plain, other = buffered(1), buffered(2)
    plain.load_state_dict(saved, strict=True)
    theirs = sharded(other, stage, lr=1e-2)
    with theirs.full_params():
        other.load_state_dict(saved, strict=True)
    tokens, _ = models.batch(9)
    with torch.no_grad():
        outputs = [m(tokens) for m in (model, plain, other)]
    return {
        "described": described(saved),
        "buffers": {key: saved[key] for key in ("count", "mask")},
        "outputs equal": [torch.equal(output, outputs[0]) for output in outputs],
        "differing": differing(whole(other, theirs), whole(model, optimizer)),
    }


@at_worlds
@in_stages
def test_the_state_dict_is_that_of_a_plain_model(stage: int, at: int) -> None:
    """Keys and their order, dtypes and shapes; it loads strictly into a plain model and
    a sharded one."""
    for result in case.done(at)["saved_and_loaded", stage]:
        assert result["described"] == described(buffered(0).state_dict())
        assert result["buffers"]["count"] == 2
        assert torch.equal(result["buffers"]["mask"], buffered(0).mask)
        assert result["outputs equal"] == [True] * 3
        assert result["differing"] == []


def _exported(stage: int, folder: Path) -> dict[str, Tensor]:
    import safetensors.torch

    model = buffered(0)
    optimizer = sharded(model, stage, lr=1e-2)
    train_shares(model, optimizer, range(2), world())
    with optimizer.full_params():
        if rank() == world() - 1:
            safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return whole(model, optimizer)


@at_worlds
@in_stages
def test_safetensors_exports_tied_weights(stage: int, at: int, tmp_path: Path) -> None:
    """Stored once, and both names are there after a strict load into a plain model."""
    safetensors = pytest.importorskip("safetensors.torch")
    trained = ranks.run(at, _exported, stage, tmp_path)[0]
    plain = buffered(3)
    missing, unexpected = safetensors.load_model(
        plain, str(tmp_path / "model.safetensors"), strict=True
    )
    assert (set(missing), unexpected) == (set(), [])
    assert plain.head.weight is plain.embedding.weight
    assert differing(params_of(plain), trained) == []
    # The tied weight is in the file once: no more bytes than there are.
    payload = sum(value.nbytes for value in trained.values())
    assert (tmp_path / "model.safetensors").stat().st_size < payload + 4096


@case
def kept_after_full_params(stage: int) -> dict[str, Any]:
    """Use a state dict where most scripts do: after the context has ended."""
    model = buffered(0)
    optimizer = sharded(model, stage, lr=1e-2)
    train_shares(model, optimizer, range(2), world())
    with optimizer.full_params():
        saved = model.state_dict()
    file, plain = io.BytesIO(), buffered(1)
    torch.save(saved, file)
    plain.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    read = {name: saved[name].clone() for name, _ in model.named_parameters()}
    return {
        "read": read,
        "loaded": params_of(plain),
        "expected": whole(model, optimizer),
        "scratch": optimizer.memory().buffers,
    }


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
def test_a_state_dict_outlives_full_params(stage: int, at: int) -> None:
    """Its memory may go back only if nobody can read it any more; it was a crash of the
    process."""
    for result in case.done(at)["kept_after_full_params", stage]:
        assert differing(result["read"], result["expected"]) == []
        assert differing(result["loaded"], result["expected"]) == []
        assert result["scratch"] == 0
