"""Tensors leave a unit by other doors than its output: in containers, as attributes, in
objects that came in."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from units import Stack, Unit, loss_script, of, squares


@dataclass
class Output:
    value: Tensor
    detail: Any = None


class ReturnsDataclass(Unit):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x), {"hidden": [self.hidden(x)]})


@loss_script(of(ReturnsDataclass))
def a_dataclass(model: Any, x: Tensor) -> Tensor:
    x, total = model.first(x), torch.zeros(())
    for unit in model.units:
        output = unit(x)
        x = output.value
        total = total + output.detail["hidden"][0].square().mean()
    return squares(x) + total


class ReturnsMapping(Unit):
    def forward(self, x: Tensor) -> UserDict[str, Tensor]:
        return UserDict(value=super().forward(x), hidden=self.hidden(x))


@loss_script(of(ReturnsMapping))
def a_mapping_that_is_no_dict(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for unit in model.units:
        output = unit(x)
        x = output["value"] + output["hidden"]
    return squares(x)


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


class ChangesGraph(Unit):
    def forward(self, graph: Graph) -> None:
        graph.nodes = super().forward(graph.nodes)


@loss_script(of(ChangesGraph))
def an_object_that_is_changed(model: Any, x: Tensor) -> Tensor:
    graph = Graph(model.first(x))
    for unit in model.units:
        unit(graph)
    return squares(model.last(graph.nodes))


class Keeps(Unit):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.hidden(x)
        return super().forward(x)


@loss_script(of(Keeps))
def attributes_alone(model: Any, x: Tensor) -> Tensor:
    """Deep supervision by what units keep; the output is not used."""
    model(x)
    return sum((squares(unit.kept) for unit in model.units), torch.zeros(()))


@loss_script(of(Keeps))
def attributes_and_the_output(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    kept = [squares(unit.kept) for unit in model.units]
    return squares(output) + sum(kept, torch.zeros(()))


@loss_script(Stack)
def features_of_a_forward_hook(model: Any, x: Tensor) -> Tensor:
    features: list[Tensor] = []
    handles = [
        unit.inner.register_forward_hook(lambda *call: features.append(call[-1]))
        for unit in model.units
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return squares(torch.stack(features))


class Fills(Unit):
    def forward(self, cache: dict[str, Tensor]) -> None:
        cache[f"layer {len(cache)}"] = super().forward([*cache.values()][-1])


@loss_script(of(Fills))
def a_cache_that_is_filled(model: Any, x: Tensor) -> Tensor:
    cache = {"layer 0": model.first(x)}
    for unit in model.units:
        unit(cache)
    return squares(torch.stack([*cache.values()]))


class ShowsWeight(Unit):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weight.t()


@loss_script(of(ShowsWeight))
def a_view_of_a_weight(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for unit in model.units:
        x, weight = unit(x)
        x = torch.tanh(x @ weight)
    return squares(x)


class Recursive(Unit):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        return super().forward(x)


@loss_script(of(Recursive))
def a_unit_that_calls_itself(model: Any, x: Tensor) -> Tensor:
    return squares(model(x))


@loss_script(Stack)
def one_unit_many_times(model: Any, x: Tensor) -> Tensor:
    for _ in range(4):
        x = model.units[1](x)
    return squares(x)


@loss_script(Stack)
def one_loss_of_two_forwards(model: Any, x: Tensor) -> Tensor:
    """Contrastive learning."""
    return squares(model(x) * model(x.flip(0)))


@loss_script(Stack)
def evaluation_in_between(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    with torch.no_grad():
        target = model(x.flip(0))
    return squares(output * target)
