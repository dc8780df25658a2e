"""Buffers of modules, which differ by rank where each rank has drawn its own: with the
model known, all ranks start with those of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import at_worlds, in_stages
from oracle import differing, rank, sharded, world
from registry import cases_of
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from units import WIDTH, Unit, batch, squares

import zerokern

case = cases_of("parameters")

DRAWN: dict[str, Any] = {
    "features": lambda r: torch.full((WIDTH, WIDTH), 0.5 + r),
    "scalar": lambda r: torch.tensor(2.0 + r),
    "counter": lambda r: torch.tensor(r),
    "table": lambda r: torch.arange(6) * (r + 1),
    "bytes": lambda r: torch.full((3,), 7 + r, dtype=torch.uint8),
    "mask": lambda r: torch.arange(5) > r,
    "flag": lambda r: torch.tensor(r == 0),
    "waves": lambda r: torch.full((4,), complex(r, 1), dtype=torch.complex128),
    "narrow waves": lambda r: torch.full((2, 3), complex(1, r)),
    "half precision": lambda r: torch.full((3,), 0.25 * r, dtype=torch.float16),
    "brain float": lambda r: torch.full((), 0.5 + r, dtype=torch.bfloat16),
    "double precision": lambda r: torch.full((2,), 1e-3 * r, dtype=torch.float64),
    "strided": lambda r: torch.full((4, 3), r - 5.0).t(),
    "order": lambda r: torch.arange(6).roll(r),
    "order of floats": lambda r: torch.linspace(0, 1, 5).roll(r),
    "short": lambda r: torch.full((3,), r - 2, dtype=torch.int16),
    "word": lambda r: torch.full((3,), r, dtype=torch.uint16),
    "eight bits": lambda r: torch.full((2,), 1.0 + r).to(torch.float8_e4m3fn),
    "conjugate": lambda r: torch.full((2,), complex(1, r)).conj(),
    "empty": lambda r: torch.zeros(0),
}
"""One of each kind, of a rank."""


class Buffered(nn.Module):
    """Has all of these, and a norm with statistics; a unit has one, too."""

    def __init__(self, of_rank: int) -> None:
        super().__init__()
        for index, (name, draw) in enumerate(DRAWN.items()):
            key = name.replace(" ", "_")
            self.register_buffer(key, draw(of_rank), persistent=index % 2 == 0)
        self.units = nn.ModuleList(Unit() for _ in range(2))
        self.units[1].register_buffer("noise", torch.full((WIDTH,), 1.0 + of_rank))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean += of_rank

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(torch.sin(x @ self.features))
        return self.norm(x) * self.units[1].noise


def buffered(of_rank: int) -> Buffered:
    torch.manual_seed(0)
    return Buffered(of_rank)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def with_model(model: nn.Module, stage: int) -> zerokern.AdamW:
    return zerokern.AdamW(model.parameters(), stage=stage, model=model)


def sent(optimizer: Any) -> list[str]:
    """Return what was broadcast at construction."""
    return [call.unit for call in optimizer.comm_log() if call.op == "broadcast"]


@case
def drawn_by_each_rank(stage: int) -> Any:
    """Return what was sent, and where buffers differ from rank 0's, at first and after
    a step."""
    model = buffered(rank())
    strides = {name: b.stride() for name, b in model.named_buffers()}
    objects = {name: id(b) for name, b in model.named_buffers()}
    optimizer = with_model(model, stage)
    first = differing(buffers_of(model), buffers_of(buffered(0)))
    same = strides == {name: b.stride() for name, b in model.named_buffers()}
    same &= objects == {name: id(b) for name, b in model.named_buffers()}
    squares(model(batch(0, 0))).backward()
    optimizer.step()
    return sent(optimizer), first, same, buffers_of(model)


@at_worlds
@in_stages
def test_all_ranks_start_with_the_buffers_of_rank_0(stage: int, at: int) -> None:
    """Of every dtype and shape, in place."""
    results = case.done(at)["drawn_by_each_rank", stage]
    for _, first, same, _ in results:
        assert first == []
        assert same
    for *_, buffers in results[1:]:
        assert differing(buffers, results[0][-1]) == []


@at_worlds
@in_stages
def test_only_what_differs_is_sent(stage: int, at: int) -> None:
    """Each once; not what has no elements."""
    names = {n for n, b in buffered(0).named_buffers() if b.numel()}
    equal = {"norm.running_var", "norm.num_batches_tracked"}
    for result in case.done(at)["drawn_by_each_rank", stage]:
        assert sorted(result[0]) == (sorted(names - equal) if at > 1 else [])


@case
def equal_on_all_ranks(stage: int) -> Any:
    model = buffered(0)
    before = buffers_of(model)
    optimizer = with_model(model, stage)
    return sent(optimizer), differing(buffers_of(model), before)


@at_worlds
@in_stages
def test_equal_buffers_are_not_sent(stage: int, at: int) -> None:
    for broadcast, changed in case.done(at)["equal_on_all_ranks", stage]:
        assert broadcast == changed == []


@case
def of_one_rank_only(stage: int) -> Any:
    """The last rank alone has drawn something else, and only in a module that several
    places share."""
    model = nn.Module()
    inner = Unit()
    model.units = nn.ModuleList([inner, inner])
    value = torch.full((3,), float(rank() == torch.distributed.get_world_size() - 1))
    inner.register_buffer("shared", value if rank() else torch.zeros(3))
    optimizer = with_model(model, stage)
    return sent(optimizer), inner.shared.tolist()


@at_worlds
@in_stages
def test_a_shared_buffer_is_sent_once(stage: int, at: int) -> None:
    for broadcast, value in case.done(at)["of_one_rank_only", stage]:
        assert broadcast == (["units.0.shared"] if at > 1 else [])
        assert value == [0.0] * 3


LEFT_ALONE: dict[str, Callable[[], Tensor]] = {
    "coordinates": lambda: torch.eye(3).to_sparse(),
    "two tensors": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
}
"""What has no words of its own to compare."""


@case
def of_odd_kinds(stage: int) -> Any:
    """Train with such buffers; return which are no longer the same object."""
    model = buffered(0)
    for name, make in LEFT_ALONE.items():
        model.register_buffer(name.replace(" ", "_"), make(), persistent=False)
    before = dict(model.named_buffers())
    optimizer = with_model(model, stage)
    squares(model(batch(0, 0))).backward()
    optimizer.step()
    after = dict(model.named_buffers())
    return sent(optimizer), [name for name in before if after[name] is not before[name]]


@at_worlds
@in_stages
def test_sparse_and_wrapped_buffers_stay(stage: int, at: int) -> None:
    for broadcast, changed in case.done(at)["of_odd_kinds", stage]:
        assert broadcast == changed == []


@case
def of_another_shape(stage: int) -> list[str]:
    """Ranks have buffers of other shapes or numbers: return what they are told."""
    said = []
    for value in (torch.ones(2 + rank()), None if rank() else torch.ones(2)):
        model = nn.Linear(WIDTH, WIDTH)
        model.register_buffer("odd", value)
        if world() > 1:
            with pytest.raises(ValueError) as error:
                with_model(model, stage)
            said.append(str(error.value))
    return said


@at_worlds
@in_stages
def test_buffers_of_other_shapes_are_refused_by_name(stage: int, at: int) -> None:
    """On every rank, rather than waited for."""
    for said in case.done(at)["of_another_shape", stage]:
        assert len(said) == (2 if at > 1 else 0)
        assert all("'odd'" in message for message in said)


@case(stages=(1, 2))
def without_the_model(stage: int) -> Any:
    """Parameters are all that the optimizer knows of."""
    model = buffered(rank())
    optimizer = sharded(model, stage)
    return sent(optimizer), differing(buffers_of(model), buffers_of(buffered(rank())))


@at_worlds
@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
def test_buffers_are_left_alone_without_the_model(stage: int, at: int) -> None:
    for broadcast, changed in case.done(at)["without_the_model", stage]:
        assert broadcast == changed == []


@case
def taken_over(stage: int) -> Any:
    """Statistics that ranks have gathered on their own, and what a newer optimizer
    makes of them."""
    model = buffered(0)
    first = with_model(model, stage)
    model(batch(0, rank()))
    mean = model.norm.running_mean.clone()
    second = with_model(model, stage)
    with pytest.raises(RuntimeError, match="newer optimizer"):
        first.step()
    return mean, sent(second), model.norm.running_mean.clone()


@at_worlds
@in_stages
def test_a_newer_optimizer_makes_them_equal_again(stage: int, at: int) -> None:
    results = case.done(at)["taken_over", stage]
    of_rank_0 = results[0][0]
    for number, (mean, broadcast, after) in enumerate(results):
        assert torch.equal(after, of_rank_0)
        assert torch.equal(mean, of_rank_0) == (number == 0)
        assert ("norm.running_mean" in broadcast) == (at > 1)
