"""Models built on the meta device: stage 3 makes their parameters unit by unit, and no
rank ever holds all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import safetensors.torch
import torch
from marks import in_stages
from oracle import STAGES, differing, rank, whole
from safetensors import safe_open
from torch import Tensor, nn

import zerokern


class Normed(models.Toy):
    """A toy with buffers: persistent and not, floating and not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(super().forward(tokens).flatten(0, 1)).view(*tokens.shape, -1)


def on_meta(**options: Any) -> nn.Module:
    """Return a model without memory."""
    with torch.device("meta"):
        return Normed(**options)


def ones(module: nn.Module) -> None:
    """An init function: constants that tell the module and the parameter."""
    for index, param in enumerate(module.parameters(recurse=False)):
        param.fill_(index + param.dim())
    if isinstance(module, nn.BatchNorm1d):
        module.reset_running_stats()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def steps(model: nn.Module, optimizer: Any, count: int = 2) -> dict[str, Tensor]:
    """Train; return parameters and buffers."""
    for step in range(count):
        optimizer.zero_grad()
        tokens, targets = (models.share(t, rank(), 2) for t in models.batch(step))
        models.loss_of(model, tokens, targets).backward()
        optimizer.step()
    return whole(model, optimizer) | buffers_of(model)


def by_function(stage: int, tied: bool) -> dict[str, Any]:
    """Initialise by a function, on meta and not; return what both train to."""
    model = on_meta(tied=tied)
    params = list(model.parameters())
    optimizer = zerokern.AdamW(params, stage=stage, model=model, init=ones, lr=1e-2)
    ids = list(map(id, params))
    of_model = list(map(id, model.parameters()))
    of_group = list(map(id, optimizer.param_groups[0]["params"]))
    plain = Normed(tied=tied)
    with torch.no_grad():
        for module in plain.modules():
            if not (tied and module is plain.head):
                ones(module)
    other = zerokern.AdamW(plain.parameters(), stage=stage, model=plain, lr=1e-2)
    return {
        "same objects": ids == of_model == of_group,
        "tied": not tied or model.head.weight is model.embedding.weight,
        "ours": steps(model, optimizer),
        "plain": steps(plain, other),
    }


def by_reset(stage: int, seed_of_rank: bool) -> dict[str, Tensor]:
    """Initialise by reset_parameters, with the ranks' generators in the same or in
    different states."""
    torch.manual_seed(rank() if seed_of_rank else 0)
    model = on_meta()
    optimizer = zerokern.AdamW(model.parameters(), stage=stage, model=model)
    return whole(model, optimizer)


class Lazy(Mapping[str, Tensor]):
    """A mapping that counts what it was asked for, and how much of it is alive at a
    time."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state, self.asked = state, []

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.state[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def by_mapping(stage: int, folder: str) -> list[str]:
    """Load from a mapping and from a safetensors file; return what differs from the
    model that was saved."""
    torch.manual_seed(3)
    saved = Normed()
    saved.norm.running_mean.normal_()
    state = saved.state_dict()
    path = Path(folder) / f"{stage}.{rank()}.safetensors"
    safetensors.torch.save_file(state, path)
    found = []
    lazy = Lazy(state)
    with safe_open(path, "pt") as file:
        for source in (lazy, file):
            model = on_meta()
            optimizer = zerokern.AdamW(
                model.parameters(), stage=stage, model=model, init=source
            )
            now = whole(model, optimizer) | buffers_of(model)
            found += differing(now, dict(state))
    found += [name for name in state if lazy.asked.count(name) != 1]
    return found


def peak() -> tuple[int, int]:
    """Return the most parameter bytes that lived at a time while a model of 8 blocks
    was made, and all of them."""
    seen = []

    def init(module: nn.Module) -> None:
        ones(module)
        seen.append(
            sum(
                p.untyped_storage().nbytes()
                for p in model.parameters()
                if not p.is_meta
            )
        )

    with torch.device("meta"):
        model = models.Gpt(width=64, layers=8)
    optimizer = zerokern.AdamW(model.parameters(), stage=3, model=model, init=init)
    return max(seen) + optimizer.memory().parameters, sum(
        4 * p.numel() for p in model.parameters()
    )


def refused(stage: int) -> list[str]:
    """Return what is said of bad input; each leaves the model on the meta device."""
    said = []

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        odd = Odd()
    of_one = {"head.weight": torch.zeros(37, 17)}
    too_small = {name: torch.zeros(2) for name in Normed().state_dict()}
    for model, options in (
        (odd, {}),
        (on_meta(), {"init": of_one}),
        (on_meta(), {"init": too_small}),
        (Normed(), {"init": ones}),
    ):
        try:
            zerokern.AdamW(model.parameters(), stage=stage, model=model, **options)
        except ValueError as error:
            said.append(str(error))
    try:
        zerokern.AdamW(on_meta().parameters(), stage=1)
    except ValueError as error:
        said.append(str(error))
    return said


@functools.cache
def made(world: int, folder: str) -> ranks.Cases:
    cases: dict[Any, Any] = {"peak": peak}
    for stage in STAGES:
        cases |= {
            ("function", stage, tied): functools.partial(by_function, stage, tied)
            for tied in (False, True)
        }
        cases |= {
            ("reset", stage, own): functools.partial(by_reset, stage, own)
            for own in (False, True)
        }
        cases["mapping", stage] = functools.partial(by_mapping, stage, folder)
        cases["refused", stage] = functools.partial(refused, stage)
    return ranks.run_cases(world, cases)


@pytest.fixture(scope="module", params=(1, 2), ids="world{}".format)
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ranks.Cases:
    return made(request.param, str(tmp_path_factory.mktemp("saved")))


@in_stages
@pytest.mark.parametrize("tied", (False, True))
def test_an_init_function_gives_what_it_gives_a_plain_model(
    cases: ranks.Cases, stage: int, tied: bool
) -> None:
    """Ties last, and param groups hold the model's own parameters."""
    for result in cases["function", stage, tied]:
        assert result["same objects"] and result["tied"]
        assert differing(result["ours"], result["plain"]) == []


@in_stages
@pytest.mark.parametrize("own_seeds", (False, True))
def test_all_ranks_start_from_the_same_values(
    cases: ranks.Cases, stage: int, own_seeds: bool
) -> None:
    first, *others = cases["reset", stage, own_seeds]
    assert all(
        value.isfinite().all() and value.std() > 0
        for value in first.values()
        if value.dim() > 1
    )
    for other in others:
        assert differing(other, first) == []


@in_stages
def test_a_checkpoint_is_read_tensor_by_tensor(cases: ranks.Cases, stage: int) -> None:
    for found in cases["mapping", stage]:
        assert found == []


def test_no_rank_ever_holds_all_parameters(cases: ranks.Cases) -> None:
    """Shards, and one unit."""
    for most, all_of_them in cases["peak"]:
        if len(cases["peak"]) > 1:
            assert most < 0.75 * all_of_them


@in_stages
def test_what_cannot_be_made_is_named(cases: ranks.Cases, stage: int) -> None:
    for odd, missing, shape, needless, without_model in cases["refused", stage]:
        assert "Odd" in odd and "init=" in odd
        assert "embedding.weight" in missing
        assert "(2,)" in shape
        assert "none" in needless and "without model" not in needless
        assert "model=model" in without_model
