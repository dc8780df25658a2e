"""Features that a model returns: outputs of its units, alone or beside its own. Each
bucket is reduced once a step (`scripts/test_reductions_of_scripts.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import Run
from registry import script
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from units import Stack, batch, seeded, squares

import zerokern

Loss = Callable[[Any, Tensor], Tensor]


class Hidden(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the input and output of every unit."""
        hidden = [self.first(x)]
        for unit in self.units:
            hidden.append(unit(hidden[-1]))
        return self.last(hidden[-1]), hidden


class Headless(Stack):
    def forward(self, x: Tensor) -> Tensor:
        """Return the last unit's output as it is."""
        x = self.first(x)
        for unit in self.units:
            x = unit(x)
        return x


class Named(Hidden):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        output, hidden = super().forward(x)
        return {"output": output, "pyramid": {str(i): h for i, h in enumerate(hidden)}}


class Twins(Headless):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the same tensor twice."""
        output = super().forward(x)
        return output, output


class Recomputed(Hidden):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return what units gave that keep nothing for backward."""
        hidden = [self.first(x)]
        for unit in self.units:
            hidden.append(checkpoint(unit, hidden[-1], use_reentrant=False))
        return self.last(hidden[-1]), hidden


def output_alone(model: Any, x: Tensor) -> Tensor:
    return squares(model(x)[0])


def all_hidden_states(model: Any, x: Tensor) -> Tensor:
    output, hidden = model(x)
    return squares(output) + torch.stack([h.abs().mean() for h in hidden]).sum()


def one_hidden_state(model: Any, x: Tensor) -> Tensor:
    """The units behind it have no gradient."""
    return squares(model(x)[1][2])


def last_output(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


def pyramid(model: Any, x: Tensor) -> Tensor:
    found = model(x)
    levels = [squares(level) for level in found["pyramid"].values()]
    return squares(found["output"]) + torch.stack(levels).mean()


def both_twins(model: Any, x: Tensor) -> Tensor:
    one, other = model(x)
    return squares(one) + (one * other.detach()).mean() + other.sum(1).tanh().mean()


FEATURES: dict[str, tuple[type[Stack], Loss]] = {
    "output beside hidden states": (Hidden, output_alone),
    "all hidden states": (Hidden, all_hidden_states),
    "one hidden state": (Hidden, one_hidden_state),
    "output of the last unit": (Headless, last_output),
    "hidden states in a dict": (Named, pyramid),
    "the same output twice": (Twins, both_twins),
    "all hidden states, recomputed": (Recomputed, all_hidden_states),
}
WHEN = {
    "": zerokern.Buckets(bytes=600),
    ", updates in backward": zerokern.Buckets(bytes=600, update_in_backward=True),
}
NAMES = [name + when for name in FEATURES for when in WHEN]


def _looped(loss: Loss) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        for step in range(3):
            run.optimizer.zero_grad()
            run.backward(step, lambda r, s=step: loss(run.model, batch(s, r)))
            run.step()
            run.rest()

    return loop


for _name, (_build, _loss) in FEATURES.items():
    for _when, _buckets in WHEN.items():
        script(
            _name + _when,
            build=seeded(_build),
            eps=1e-3,
            buckets=_buckets,
        )(_looped(_loss))
