"""Units of stage 3 that nobody calls: modules without a forward in a ModuleList, and
Sequentials whose parts are called one by one."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from oracle import Run
from registry import script
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from units import WIDTH, Build, Unit, batch, seeded, squares


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def matrix() -> Tensor:
    return 0.4 * torch.randn(WIDTH, WIDTH)


def walk(x: Tensor, parts: Iterable[nn.Module]) -> Tensor:
    for part in parts:
        x = part(x)
    return x


class Layers(nn.Module):
    """Some layers around a first and a last module of the root."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.last = linear(), nn.ModuleList(layers), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.through(layer, x)
        return self.last(x)

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        raise NotImplementedError


class OfDicts(Layers):
    """Each layer is a ModuleDict."""

    def __init__(self) -> None:
        super().__init__(
            nn.ModuleDict({"mix": linear(), "norm": nn.LayerNorm(WIDTH)})
            for _ in range(3)
        )

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return x + layer["norm"](torch.tanh(layer["mix"](x)))


class OfParameterLists(Layers):
    """Each layer is a ParameterList, which belongs to the root."""

    def __init__(self) -> None:
        super().__init__(
            nn.ParameterList([matrix(), torch.zeros(WIDTH)]) for _ in range(3)
        )

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return x + torch.tanh(F.linear(x, layer[0], layer[1]))


class OfParameterDicts(Layers):
    """Each layer is a ParameterDict."""

    def __init__(self) -> None:
        super().__init__(nn.ParameterDict({"w": matrix()}) for _ in range(3))

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return x + torch.tanh(x @ layer["w"])


class OfLists(Layers):
    """Each layer is a ModuleList of modules with a forward."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([Unit(), linear()]) for _ in range(2))

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return walk(x, layer)


class Parts(nn.Module):
    """No forward; its user knows what to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))


class OfParts(Layers):
    """Each layer has parts, and no forward."""

    def __init__(self) -> None:
        super().__init__(Parts() for _ in range(3))

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return x + layer.gain * layer.down(torch.tanh(layer.up(x)))


class OfNested(Layers):
    """Lists in dicts in lists, with parameters on the way."""

    def __init__(self) -> None:
        super().__init__(
            nn.ModuleDict(
                {
                    "units": nn.ModuleList([Unit(), Unit()]),
                    "scales": nn.ParameterList([torch.full((WIDTH,), 0.8)]),
                    "walked": nn.Sequential(linear(), nn.Tanh()),
                }
            )
            for _ in range(2)
        )

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        x = walk(x, layer["units"]) * layer["scales"][0]
        return x + walk(x, layer["walked"])


def sequential() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(WIDTH))


class OfSequentials(Layers):
    """Ordinary units: each is called."""

    def __init__(self) -> None:
        super().__init__(sequential() for _ in range(3))

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return layer(x)


class Walked(OfSequentials):
    """The parts of each are called."""

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return walk(x, layer)


class WalkedWithSkips(OfSequentials):
    """The parts are called with something in between."""

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        hidden = torch.relu(layer[0](x) + x)
        return layer[2](hidden + torch.sin(layer[1](hidden)))


class Sliced(OfSequentials):
    """A slice of a Sequential is a Sequential of the same parts."""

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return layer[1:](layer[0](x)) + layer[:1](x)


class WalkedAndCalled(OfSequentials):
    """Both, in one forward."""

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        return layer(x) + walk(x, layer)


class WalkedInTurns(OfSequentials):
    """The parts of two are called alternately."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one, other in zip(self.layers[0], self.layers[1], strict=True):
            x = x + one(x) * other(x)
        return self.last(walk(x, self.layers[2]))


class WalkedUnderCheckpoints(OfSequentials):
    """Each part is computed again in backward."""

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        for part in layer:
            x = checkpoint(part, x, use_reentrant=False)
        return x


class Deep(Layers):
    """Sequentials of Sequentials, walked through to the leaves or half way."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(sequential(), nn.Sequential(Unit())) for _ in range(3)
        )

    def through(
        self,
        layer: nn.Module,
        x: Tensor,
    ) -> Tensor:
        inner, last = layer
        return last(walk(x, inner))


class AllLists(nn.ModuleList):
    """The model itself is a list."""

    def __init__(self) -> None:
        super().__init__([Unit(), sequential(), Unit()])

    def forward(self, x: Tensor) -> Tensor:
        return walk(x, self)


MODELS: dict[str, Build] = {
    "dicts": OfDicts,
    "parameter lists": OfParameterLists,
    "parameter dicts": OfParameterDicts,
    "lists": OfLists,
    "modules without forward": OfParts,
    "nested containers": OfNested,
    "sequentials": OfSequentials,
    "walked sequentials": Walked,
    "walked sequentials with skips": WalkedWithSkips,
    "sliced sequentials": Sliced,
    "sequentials walked and called": WalkedAndCalled,
    "sequentials walked in turns": WalkedInTurns,
    "sequentials walked under checkpoints": WalkedUnderCheckpoints,
    "sequentials of sequentials": Deep,
    "a model that is a list": AllLists,
}


def _train(run: Run) -> None:
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, lambda r, s=step: squares(run.model(batch(s, r))))
        run.step()
        run.rest()
    with torch.no_grad():
        run.seen.append(run.model(batch(9, 0)))
    run.rest()


@script(build=seeded(Walked), eps=1e-3)
def units_called_and_walked_by_turns(run: Run) -> None:
    """In one step the model calls its units, in the next one it walks through them."""
    for step in range(4):
        run.model.__class__ = (OfSequentials, Walked)[step % 2]
        run.optimizer.zero_grad()
        run.backward(step, lambda r, s=step: squares(run.model(batch(s, r))))
        run.step()
        run.rest()


# A large eps: no gradient is so small that its sign is a matter of rounding.
for _name, _build in MODELS.items():
    script(f"units: {_name}", build=seeded(_build), eps=1e-3)(_train)


def _train_loop_outside(run: Run) -> None:
    """The script walks, not the model."""
    model = run.model

    def loss(of_rank: int, step: int) -> Tensor:
        x = model.first(batch(step, of_rank))
        for layer in model.layers:
            x = walk(x, layer)
        return squares(model.last(x))

    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step, functools.partial(loss, step=step))
        run.step()
        run.rest()


script(
    "units: sequentials walked by the script", build=seeded(OfSequentials), eps=1e-3
)(_train_loop_outside)
