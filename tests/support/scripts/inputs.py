"""backward with respect to what a loop names: all parameters, some, the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor
from units import Stack, batch, seeded, squares

SMOOTH = {"build": seeded(Stack), "eps": 1e-3}

Passes = Callable[[Run, Tensor, int], None]


def _all(
    run: Run,
    x: Tensor,
    step: int,
) -> None:
    run.part(squares(run.model(x))).backward(inputs=list(run.model.parameters()))


def _some(
    run: Run,
    x: Tensor,
    step: int,
) -> None:
    model: Any = run.model
    chosen = [*model.units[step % 3].parameters(), *model.last.parameters()]
    run.part(squares(model(x))).backward(inputs=chosen)


def _two_losses(
    run: Run,
    x: Tensor,
    step: int,
) -> None:
    """Each trains a part."""
    model: Any = run.model
    output = model(x)
    first = list(model.first.parameters())
    others = [p for n, p in model.named_parameters() if not n.startswith("first")]
    run.part(squares(output)).backward(inputs=first, retain_graph=True)
    run.part(output.abs().mean()).backward(inputs=others)


def _batch_then_parameters(
    run: Run,
    x: Tensor,
    step: int,
) -> None:
    """An adversarial example by one signed step."""
    x = x.requires_grad_()
    squares(run.model(x)).backward(inputs=[x])
    assert x.grad is not None
    moved = (x + 0.1 * x.grad.sign()).detach()
    run.part(squares(run.model(moved))).backward()


def _batch_and_parameters(
    run: Run,
    x: Tensor,
    step: int,
) -> None:
    x = x.requires_grad_()
    params = list(run.model.parameters())
    run.part(squares(run.model(x))).backward(inputs=[x, *params])
    assert x.grad is not None


def _list_of_roots(
    run: Run,
    x: Tensor,
    step: int,
) -> None:
    """With weights of their own."""
    output = run.model(x)
    roots = [run.part(squares(output)), run.part(output)]
    torch.autograd.backward(roots, [torch.tensor(0.7), torch.full_like(output, 0.1)])


PASSES: dict[str, Passes] = {
    f.__name__.strip("_").replace("_", " "): f
    for f in (
        _all,
        _some,
        _two_losses,
        _batch_then_parameters,
        _batch_and_parameters,
        _list_of_roots,
    )
}


def _looped(passes: Passes, micros: int) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        for step in range(4):
            run.optimizer.zero_grad()
            for micro in range(micros):
                for rank in run.each():
                    passes(run, batch(10 * step + micro, rank), step)
            run.step()
        run.rest()

    return loop


for _name, _passes in PASSES.items():
    script(f"backward, {_name}", **SMOOTH)(_looped(_passes, 1))
    script(f"backward of micro-batches, {_name}", **SMOOTH)(_looped(_passes, 2))
