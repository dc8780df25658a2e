"""Parameters that are not there: sharded ones refuse to be read and name the remedy,
ones under way are waited for."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages, in_stages_1_and_2
from oracle import STAGES, Run, apart, differing, rank, sharded, whole
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from training import params_of

import zerokern
from zerokern import Buckets

Use = Callable[[nn.Module, nn.Parameter], Any]

READS: dict[str, Use] = {
    "arithmetic": lambda model, p: p * 2,
    "a functional": lambda model, p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "inside a list": lambda model, p: torch.cat([torch.ones_like(p, device="cpu"), p]),
    "a foreach": lambda model, p: torch._foreach_norm([p]),
    "indexing": lambda model, p: p[0],
    "writing": lambda model, p: p.copy_(torch.zeros(p.shape)),
    "data": lambda model, p: p.data,
    "setting data": lambda model, p: setattr(p, "data", torch.zeros(p.shape)),
    "numpy": lambda model, p: p.detach().numpy(),
    "tolist": lambda model, p: p.tolist(),
    "a copy of it": lambda model, p: copy.deepcopy(p),
    "a copy of the model": lambda model, p: copy.deepcopy(model),
    "a pickle": lambda model, p: pickle.dumps(p),
    "torch.save": lambda model, p: torch.save(p, io.BytesIO()),
    "a cast of the model": lambda model, p: model.double(),
    "an average of models": lambda model, p: AveragedModel(model),
    "a method other than forward": (
        lambda model, p: model.blocks[1].encode(torch.ones(2, 17))
    ),
    "a vector of parameters": lambda model, p: nn.utils.parameters_to_vector(
        model.parameters()
    ),
    "the weight of another unit": lambda model, p: model.penalty(),
}
TELLS: dict[str, Use] = {
    "shape": lambda model, p: (
        p.shape == (33, 17) and p.size(0) == 33 and p.dim() == 2 and len(p) == 33
    ),
    "numel": lambda model, p: (
        p.numel() == 561 and sum(q.numel() for q in model.parameters()) > 561
    ),
    "dtype": lambda model, p: (
        p.dtype == torch.float32 and p.device.type == "cpu" and p.is_floating_point()
    ),
    "kind": lambda model, p: (
        isinstance(p, nn.Parameter)
        and p.is_leaf
        and p.requires_grad
        and not p.is_sparse
    ),
    "hash": lambda model, p: p in {p} and p is model.blocks[0].up.weight,
    "repr": lambda model, p: "nan" in repr(p),
    "grad": lambda model, p: p.grad is None,
    "freezing": lambda model, p: p.requires_grad_(False).requires_grad_(True) is p,
    "a hook": lambda model, p: p.register_hook(lambda grad: None).remove() is None,
    "tensors like it": lambda model, p: (
        torch.equal(torch.ones_like(p), torch.ones(33, 17))
        and torch.zeros_like(p).is_contiguous()
        and type(p.new_zeros(3)) is Tensor
    ),
}


class Encoding(models.Block):
    """A block with a second entrance."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) @ self.down.weight.T + self.forward(x)


class Model(models.Toy):
    """A toy of such blocks, and a term that reads a block's weight from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Encoding() for _ in range(3))

    def penalty(self) -> Tensor:
        return self.blocks[0].up.weight.square().sum()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.blocks[0](self.embedding(tokens)) @ self.head.weight.T


def model() -> Model:
    """Return the same one every time."""
    torch.manual_seed(0)
    return Model()


def read_sharded(use: Use) -> str:
    """Return what is said to somebody who reads a sharded parameter; training must go
    on as if nobody had."""
    net = model()
    optimizer = sharded(net, 3)
    models.loss_of(net, *models.batch(0)).backward()
    optimizer.step()
    said = ""
    try:
        use(net, net.blocks[0].up.weight)
    except RuntimeError as error:
        said = str(error)
    optimizer.zero_grad()
    models.loss_of(net, *models.batch(1)).backward()
    optimizer.step()
    other = model()
    reference = sharded(other, 3)
    for step in range(2):
        reference.zero_grad()
        models.loss_of(other, *models.batch(step)).backward()
        reference.step()
    assert differing(whole(net, optimizer), whole(other, reference)) == []
    assert optimizer.memory().buffers == 0
    return said


def ask_sharded(use: Use) -> bool:
    """Return whether a sharded parameter answers."""
    net = model()
    optimizer = sharded(net, 3)
    answer = bool(use(net, net.blocks[0].up.weight))
    with optimizer.full_params():
        assert type(net.blocks[0].up.weight) is nn.Parameter
    return answer


def with_method(stage: int | None, name: str, ranks_played: int) -> dict[str, Any]:
    """Train through a method other than forward."""
    run = Run(stage, ranks_played, build=model, buckets=Buckets(bytes=6000))
    if not run.torch:
        module = run.model if name == "embed" else run.model.blocks[1]
        run.optimizer.register_forward_method(module, name)

    def loss(of_rank: int, step: int) -> Tensor:
        if name == "embed":
            batch = models.batch(step)
            tokens, targets = (models.share(t, of_rank, ranks_played) for t in batch)
            logits = run.model.embed(tokens).flatten(0, 1)
            return nn.functional.cross_entropy(logits, targets.flatten())
        x = torch.linspace(-1, 1, 34).view(2, 17) * (of_rank + 1)
        return run.model.blocks[1].encode(x).square().mean() + run.loss(step, of_rank)

    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, lambda of_rank, step=step: loss(of_rank, step))
        run.step()
    return run.result()


def _read_from_the_last(net: nn.Module, optimizer: Any) -> None:
    for param in reversed(list(net.parameters())):
        param.sum()


def _load_its_half(net: nn.Module, optimizer: Any) -> None:
    halves = {name: value * 0.5 for name, value in net.state_dict().items()}
    net.load_state_dict(halves)


READ_LATE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "nobody": lambda net, optimizer: None,
    "the last first": _read_from_the_last,
    "a copy": lambda net, optimizer: copy.deepcopy(net),
    "state_dict": lambda net, optimizer: {
        name: value.clone() for name, value in net.state_dict().items()
    },
    "loading": _load_its_half,
    "writing": lambda net, optimizer: [p.data.mul_(0.5) for p in net.parameters()],
    "full_state_dict": lambda net, optimizer: optimizer.full_state_dict(),
    "metadata": lambda net, optimizer: [p.shape for p in net.parameters()],
}


def reads_while_under_way(stage: int, use: str) -> list[str]:
    """Return what differs between a model that is read while parameters are gathered in
    the next forward, and one whose parameters are there after the step."""
    results = []
    for late in (True, False):
        net = model()
        buckets = Buckets(bytes=3000, gather_in_forward=late)
        optimizer = sharded(net, stage, lr=1e-2, buckets=buckets)
        for step in range(3):
            optimizer.zero_grad()
            tokens, targets = (
                models.share(tensor, rank(), 2) for tensor in models.batch(step)
            )
            models.loss_of(net, tokens, targets).backward()
            optimizer.step()
            READ_LATE[use](net, optimizer)
        results.append(params_of(net))
        assert all(type(p) is nn.Parameter for p in net.parameters())
    return differing(*results)


def clips_by_torch(stage: int) -> list[str]:
    """Return what torch's clip_grad_norm_ says in each of two steps."""
    net = model()
    optimizer = sharded(net, stage)
    said = []
    for step in range(2):
        optimizer.zero_grad()
        models.loss_of(net, *models.batch(step)).backward()
        try:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        optimizer.step()
    return said


def dropped() -> str:
    """Return what a parameter says whose optimizer was dropped while it was sharded."""
    net = model()
    optimizer = sharded(net, 3)
    del optimizer
    gc.collect()
    try:
        net.head.weight.sum()
    except RuntimeError as error:
        return str(error)
    return ""


@functools.cache
def done() -> ranks.Cases:
    cases: dict[Any, Callable[[], Any]] = {
        ("read", name): functools.partial(read_sharded, READS[name]) for name in READS
    }
    cases |= {
        ("ask", name): functools.partial(ask_sharded, TELLS[name]) for name in TELLS
    }
    for stage in STAGES:
        cases |= {
            ("method", stage, m): functools.partial(with_method, stage, m, 2)
            for m in ("encode", "embed")
        }
        cases["clip", stage] = functools.partial(clips_by_torch, stage)
    for stage, use in itertools.product((1, 2), READ_LATE):
        case = functools.partial(reads_while_under_way, stage, use)
        cases["late", stage, use] = case
    cases["dropped"] = dropped
    return ranks.run_cases(2, cases)


@pytest.mark.parametrize("name", READS)
def test_reading_a_sharded_parameter_is_an_error_that_names_the_remedy(
    name: str,
) -> None:
    """Never NaN, never stale values, never an empty tensor."""
    for said in done()["read", name]:
        assert "sharded" in said
        assert "register_forward_method" in said
        assert "full_params" in said


@pytest.mark.parametrize("name", TELLS)
def test_a_sharded_parameter_tells_what_it_is(name: str) -> None:
    assert done()["ask", name] == [True, True]


@in_stages
@pytest.mark.parametrize("name", ("encode", "embed"))
def test_other_methods_than_forward(stage: int, name: str) -> None:
    """After register_forward_method, in each stage."""
    expected = with_method(None, name, 2)
    for result in done()["method", stage, name]:
        assert apart(result["params"], expected["params"]) == {}
        assert not any(result["buffers"])


def test_a_method_that_is_not_there() -> None:
    net = model()
    optimizer = zerokern.AdamW(net.parameters())
    with pytest.raises(ValueError, match="no method 'enkode'"):
        optimizer.register_forward_method(net.blocks[0], "enkode")


@in_stages_1_and_2
@pytest.mark.parametrize("use", READ_LATE)
def test_a_parameter_under_way_is_waited_for(stage: int, use: str) -> None:
    """Whoever reads it first waits for it."""
    assert done()["late", stage, use] == [[], []]


@in_stages
def test_torch_clipping_of_reduced_gradients_says_what_to_call(stage: int) -> None:
    for said in done()["clip", stage]:
        for text in said:
            assert "optimizer.clip_grad_norm_(max_norm)" in text
            assert "full_grad" in text


def test_a_parameter_whose_shards_are_gone() -> None:
    for said in done()["dropped"]:
        assert "is gone" in said


def test_the_model_of_a_world_of_one_is_plain() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = model()
        optimizer = sharded(net, 3)
        models.loss_of(net, *models.batch(0)).backward()
        optimizer.step()
        assert torch.isfinite(net.blocks[0].up.weight.sum())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
