"""World of one, where p.grad can be read: what a script has kept of it is not written
to by later iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from marks import in_stages
from oracle import Run
from registry import SMALL, assert_like_torch
from torch import Tensor, nn

Keep = Callable[[nn.Parameter], Any]

KEEPS: dict[str, Keep] = {
    "the tensor": lambda p: p.grad,
    "detached": lambda p: p.grad.detach(),
    "a view": lambda p: p.grad.view(-1)[3:],
    "a view of a view": lambda p: p.grad.view(-1)[::2][1:],
    "a dict": lambda p: {"of": {"weight": p.grad}}["of"]["weight"],
    "an array": lambda p: p.grad.numpy(),
    "another library's": lambda p: torch.utils.dlpack.to_dlpack(p.grad),
}
"""Ways to hold on to a gradient."""


def by_the_optimizer(run: Run) -> None:
    run.optimizer.zero_grad()


def by_the_model(run: Run) -> None:
    run.model.zero_grad()


def by_hand(run: Run) -> None:
    for param in run.model.parameters():
        param.grad = None


DROPS = [by_the_optimizer, by_the_model, by_hand]
"""Ways to let the parameters forget it."""

of_drops = pytest.mark.parametrize("drop", DROPS)


def played(stage: int | None, **options: Any) -> Run:
    """Return a run alone, of a stage or of torch's optimizer."""
    torch.manual_seed(0)
    return Run(
        stage,
        1,
        buckets=SMALL,
        **options,
    )


def as_tensor(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    is_capsule = type(kept).__name__ == "PyCapsule"
    return torch.from_dlpack(kept) if is_capsule else torch.tensor(kept)


@in_stages
@of_drops
@pytest.mark.parametrize("way", KEEPS)
def test_what_was_kept_stays(
    way: str,
    drop: Callable[[Run], None],
    stage: int,
) -> None:
    """One gradient of each step; training is that of torch."""
    results = []
    for kind in (stage, None):
        run = played(kind)
        kept, copies = [], []
        for step in range(4):
            drop(run)
            run.backward(step)
            weight = run.model.blocks[0].up.weight
            kept.append(KEEPS[way](weight))
            copies.append(weight.grad.clone())
            run.step()
        same = [as_tensor(k).clone() for k in kept]
        for tensor, copy in zip(same, copies, strict=True):
            if tensor.shape == copy.shape:
                assert torch.equal(tensor, copy)
        run.seen = same
        results.append(run.result())
    assert_like_torch(*results)


@in_stages
@of_drops
def test_all_gradients_were_kept(drop: Callable[[Run], None], stage: int) -> None:
    """Those of two steps side by side, as for their cosine."""
    results = []
    for kind in (stage, None):
        run, last = played(kind), []
        for step in range(4):
            drop(run)
            run.backward(step)
            now = [param.grad for param in run.model.parameters()]
            run.seen += [gradient.clone() for gradient in last]
            last = now
            run.step()
        results.append(run.result())
    assert_like_torch(*results)


@in_stages
def test_what_was_kept_of_accumulated_gradients(stage: int) -> None:
    """Backward adds to the tensor that is there, so what was kept of the first
    micro-batch is the sum of both, until it is dropped."""
    results = []
    for kind in (stage, None):
        run = played(kind)
        for step in range(3):
            run.optimizer.zero_grad()
            run.backward(step)
            run.seen.append(run.model.head.weight.grad)
            run.backward(step + 10)
            run.step()
        results.append(run.result())
    assert_like_torch(*results)


@in_stages
def test_what_was_kept_and_then_clipped(stage: int) -> None:
    results = []
    for kind in (stage, None):
        run = played(kind)
        for step in range(3):
            run.optimizer.zero_grad()
            run.backward(step)
            run.seen.append(run.model.head.weight.grad)
            run.clip(0.1)
            run.step()
        results.append(run.result())
    assert_like_torch(*results)


@in_stages
def test_what_was_kept_is_zeroed_in_place(stage: int) -> None:
    """`zero_grad(set_to_none=False)` writes to the tensor that is there, and the next
    backward adds to it."""
    results = []
    for kind in (stage, None):
        run = played(kind)
        run.backward(0)
        kept = run.model.head.weight.grad
        run.optimizer.zero_grad(set_to_none=False)
        assert not kept.any()
        run.backward(1)
        run.step()
        run.seen.append(kept)
        assert torch.equal(kept, run.model.head.weight.grad)
        results.append(run.result())
    assert_like_torch(*results)


@in_stages
def test_what_was_kept_of_one_parameter_of_many(stage: int) -> None:
    """In every second step, by turns of the parameters, while others are set to None by
    hand."""
    results = []
    for kind in (stage, None):
        run = played(kind)
        params = list(run.model.parameters())
        for step in range(6):
            run.optimizer.zero_grad()
            run.backward(step)
            if step % 2:
                run.seen.append(params[step].grad)
            params[step + 1].grad = None
            run.step()
        results.append(run.result())
    assert_like_torch(*results)


@in_stages
def test_what_was_kept_of_16_bit_gradients(stage: int) -> None:
    run = played(stage, build=lambda: models.forked().bfloat16())
    kept, copies = [], []
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        kept.append(run.model.head.weight.grad)
        copies.append(kept[-1].clone())
        run.step()
    assert all(map(torch.equal, kept, copies))
    assert run.model.head.weight.grad.dtype == torch.bfloat16


def addresses(run: Run) -> list[int]:
    return [param.grad.data_ptr() for param in run.model.parameters()]


def iterate(
    run: Run,
    step: int,
    drop: Callable[[Run], None],
) -> list[int]:
    """Train a step that keeps nothing; return where its gradients were."""
    drop(run)
    run.backward(step)
    run.step()
    return addresses(run)


@in_stages
@of_drops
def test_nothing_kept_is_the_same_memory(
    drop: Callable[[Run], None], stage: int
) -> None:
    run = played(stage)
    iterate(run, 0, drop)
    bytes_before = run.optimizer.memory()
    assert len({tuple(iterate(run, step, drop)) for step in range(1, 5)}) == 1
    assert run.optimizer.memory() == bytes_before


@in_stages
@of_drops
def test_what_is_let_go_costs_nothing_more(
    drop: Callable[[Run], None], stage: int
) -> None:
    """New memory while something is kept, none afterwards; the optimizer counts what is
    its own."""
    run = played(stage)
    iterate(run, 0, drop)
    bytes_before = run.optimizer.memory()
    kept = [run.model.head.weight.grad.view(-1)]
    places = {tuple(iterate(run, 1, drop))}
    kept.append(run.model.head.weight.grad)
    places.add(tuple(iterate(run, 2, drop)))
    assert len(places) == 2
    assert run.optimizer.memory() == bytes_before
    kept.clear()
    assert len({tuple(iterate(run, step, drop)) for step in range(3, 6)}) == 1
    assert run.optimizer.memory() == bytes_before


@in_stages
def test_a_gradient_that_was_only_looked_at_is_not_kept(stage: int) -> None:
    """Norms and printed values leave nothing behind."""
    run = played(stage)
    places = set()
    for step in range(4):
        run.optimizer.zero_grad()
        run.backward(step)
        norms = [float(param.grad.norm()) for param in run.model.parameters()]
        assert all(norm > 0 for norm in norms[:3])
        assert "tensor" in repr(run.model.head.bias.grad)
        places.add(tuple(addresses(run)))
        run.step()
    assert len(places) == 1
