"""Per parameter of a bucket: how many gradients came in a backward pass, and what was
left in p.grad."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .absent import ReducedGradient


class Tally:
    """Counts gradients, to know when a bucket has all of them."""

    def __init__(self, slots: int) -> None:
        self._fired = [0] * slots
        self._expected = [1] * slots
        """Most gradients that any backward pass has brought: a parameter in two
        reentrant checkpoints has two."""
        self._missing = slots

    def count(self, index: int) -> None:
        """One more gradient of a parameter came."""
        self._fired[index] += 1
        self._missing -= self._fired[index] == self._expected[index]

    def complete(self) -> bool:
        """Return whether every parameter has brought as many gradients as it ever
        has."""
        return self._missing == 0

    def end_backward(self) -> None:
        """Remember how many gradients a pass brings, and start counting anew."""
        self._expected = [
            max(pair) for pair in zip(self._fired, self._expected, strict=True)
        ]
        self._fired = [0] * len(self._fired)
        self._missing = len(self._fired)


class Traces:
    """What was left in each p.grad, and whether somebody has written to it since."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self.params = params
        self.placeholders = [
            ReducedGradient.of(p, name) for p, name in zip(params, names, strict=True)
        ]
        """What p.grad becomes when its gradient has left."""
        self._versions = [0] * len(params)

    def leave(self, index: int, grad: Tensor) -> None:
        """Put something into p.grad."""
        self.params[index].grad = grad
        self._versions[index] = _version(grad)

    def take_away(self, index: int) -> None:
        """Say in p.grad that the gradient has left."""
        self.leave(index, self.placeholders[index])

    def forget_writes(self, index: int) -> None:
        """Take what is in p.grad as if it had been left there now."""
        grad = self.params[index].grad
        self._versions[index] = 0 if grad is None else _version(grad)

    def forget_all_writes(self) -> None:
        """The same for every parameter."""
        for index in range(len(self.params)):
            self.forget_writes(index)

    def is_untouched(self, index: int) -> bool:
        """Return whether nobody has written to what is in p.grad since it was left
        there."""
        grad = self.params[index].grad
        return grad is not None and _version(grad) == self._versions[index]

    def is_placeholder(self, index: int) -> bool:
        """Return whether p.grad says that its gradient has left."""
        return self.params[index].grad is self.placeholders[index]

    def is_kept(self, index: int) -> bool:
        """Return whether a gradient that has left is still wanted: nobody has zeroed
        it."""
        return self.is_placeholder(index) and self.is_untouched(index)

    def signature(self) -> list[object]:
        """Return a value that changes when a gradient comes, goes or is written to."""
        grads = [p.grad for p in self.params]
        return [None if grad is None else (id(grad), _version(grad)) for grad in grads]


def _version(grad: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return grad._version
