"""Models that flat buffers find hard: tied, scalar, empty, strided, mixed, tiny,
frozen, grouped, with odd outputs; and their training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from oracle import rank, sharded, state_of, whole, world
from torch import Tensor, nn

import zerokern

Trained = dict[str, Any]
MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Register a model; its forward takes a float [rows, 6] and returns what `loss_of`
    can sum."""
    MODELS[function.__name__] = function
    return function


class Units(nn.Module):
    """Modules called one after the other, a unit each."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.units = nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        for unit in self.units:
            x = unit(x)
        return x


class WithForward(nn.Module):
    """Parameters by name, and a function of (module, x)."""

    def __init__(
        self, function: Callable[[Any, Tensor], Any], **params: Tensor
    ) -> None:
        super().__init__()
        self.function = function
        for name, value in params.items():
            setattr(
                self,
                name,
                value if isinstance(value, nn.Parameter) else nn.Parameter(value),
            )

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


@model
def tied() -> nn.Module:
    """One weight, in the first and the last unit."""
    first, last = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
    last.weight = first.weight
    middle = nn.Linear(5, 6)
    return Units(first, middle, last)


@model
def tied_inside_a_unit() -> nn.Module:
    weight = nn.Parameter(torch.randn(6, 6))
    return Units(
        WithForward(lambda m, x: x @ m.a @ m.b.T, a=weight, b=weight), nn.Linear(6, 3)
    )


@model
def scalar() -> nn.Module:
    """A temperature."""
    return Units(
        nn.Linear(6, 6),
        WithForward(lambda m, x: x * m.temperature, temperature=torch.tensor(0.7)),
    )


@model
def root_scalar() -> nn.Module:
    return WithForward(lambda m, x: x * m.temperature, temperature=torch.tensor(0.7))


@model
def empty_parameters() -> nn.Module:
    """Of no elements, first, middle and last."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x @ m.weight + m.first.sum() + m.middle.sum() + m.last.sum()

    return Units(
        WithForward(
            forward,
            first=torch.zeros(0),
            weight=torch.randn(6, 3),
            middle=torch.zeros(4, 0),
            last=torch.zeros(0, 2),
        )
    )


@model
def transposed() -> nn.Module:
    """A weight whose memory is column-major."""
    return Units(
        WithForward(lambda m, x: x @ m.weight.T, weight=torch.randn(6, 7).T),
        nn.Linear(7, 3),
    )


@model
def expanded() -> nn.Module:
    """A parameter that is a slice with holes in memory."""
    return Units(
        WithForward(
            lambda m, x: x @ m.weight, weight=nn.Parameter(torch.randn(6, 10)[:, ::2])
        )
    )


@model
def channels_last() -> nn.Module:
    """A convolution whose memory has channels last."""
    conv = nn.Conv2d(2, 5, kernel_size=(1, 2)).to(memory_format=torch.channels_last)
    return Units(
        WithForward(lambda m, x: x.reshape(-1, 2, 1, 3)),
        conv,
        nn.Flatten(),
        nn.Linear(10, 3),
    )


@model
def mixed_dtypes() -> nn.Module:
    """Bf16 Linear and fp32 LayerNorm in one unit."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x).bfloat16()).float()

    return Units(Mixed(), Mixed())


@model
def three_elements() -> nn.Module:
    """Fewer elements than ranks."""
    return WithForward(lambda m, x: (x[:, :3] * m.weight).sum(1), weight=torch.randn(3))


@model
def one_linear() -> nn.Module:
    return nn.Linear(6, 2)


@model
def forty_tiny() -> nn.Module:
    """Used bits fill more than one word."""
    return Units(
        *[
            WithForward(lambda m, x: x + m.shift, shift=torch.randn(6))
            for _ in range(40)
        ]
    )


@model
def frozen_unit() -> nn.Module:
    """A unit without gradients, between two that have them."""
    return Units(
        nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)
    )


@model
def frozen_first_unit() -> nn.Module:
    return Units(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3))


@model
def partly_frozen_unit() -> nn.Module:
    """A bias is trained, its weight is not."""
    unit = nn.Linear(6, 6)
    unit.weight.requires_grad_(False)
    return Units(unit, nn.Linear(6, 3))


@model
def frozen_integers() -> nn.Module:
    """A parameter of integers, which cannot be trained, is only looked at."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x @ m.weight[m.index]

    index = nn.Parameter(torch.tensor([3, 1, 2, 0, 5, 4]), requires_grad=False)
    return Units(WithForward(forward, weight=torch.randn(6, 3), index=index))


@model
def dict_outputs() -> nn.Module:
    """Units that pass dicts, tuples and None on."""
    return Units(
        WithForward(
            lambda m, x: {"x": x @ m.weight, "none": None, "nested": [(x, 1)]},
            weight=torch.randn(6, 6),
        ),
        WithForward(
            lambda m, d: (None, d["x"] * m.scale, d["nested"]), scale=torch.randn(6)
        ),
        WithForward(
            lambda m, t: {"out": t[1] + m.shift, "other": None, "in": t[2][0][0]},
            shift=torch.randn(6),
        ),
    )


@model
def output_never_used() -> nn.Module:
    """The second output, hence its parameter, does not enter the loss."""
    return Units(
        WithForward(
            lambda m, x: (x @ m.a, x @ m.b)[0], a=torch.randn(6, 3), b=torch.randn(6, 3)
        )
    )


@model
def unit_without_parameters() -> nn.Module:
    return Units(nn.Tanh(), nn.Linear(6, 3), nn.ReLU())


@model
def in_place_operations() -> nn.Module:
    """The output of a unit is changed in place by the next."""
    return Units(
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True)
    )


@model
def buffers() -> nn.Module:
    """Buffers are none of our business."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer(
                "mask", torch.tensor([True, False] * 3), persistent=False
            )

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x) * self.mask

    return Units(Counting(), nn.Linear(6, 3))


def loss_of(output: Any) -> Tensor:
    """Sum the tensors that have a gradient, bent so that gradients are not constant."""
    leaves = torch.utils._pytree.tree_flatten(output)[0]
    return sum(
        (t.float() ** 2).mean()
        for t in leaves
        if isinstance(t, Tensor) and t.requires_grad
    )  # type: ignore[return-value]


def rows(step: int) -> Tensor:
    """Return one batch, [12, 6]."""
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def train(name: str, stage: int | None) -> Trained:
    """Train three steps; stage None: torch's AdamW over the mean of the ranks'
    losses."""
    torch.manual_seed(0)
    module = MODELS[name]()
    start = {n: p.detach().clone() for n, p in module.named_parameters()}
    attributes = {
        n: (p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()
    }
    objects = {n: id(p) for n, p in module.named_parameters()}
    ours = (
        None
        if stage is None
        else sharded(module, stage, buckets=zerokern.Buckets(bytes=200), lr=1e-2)
    )
    shapes = {
        n: (p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()
    }
    optimizer = ours or torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        if ours:
            loss_of(module(rows(step).chunk(world())[rank()])).backward()
        else:
            for chunk in rows(step).chunk(reference_world):
                (loss_of(module(chunk)) / reference_world).backward()
        optimizer.step()
    return {
        "start": start,
        "params": whole(module, optimizer),
        "state": state_of(module, optimizer),
        "strides": (
            {n: p.stride() for n, p in module.named_parameters()}
            if stage != 3
            else None
        ),
        "attributes": (
            attributes == shapes
            and objects == {n: id(p) for n, p in module.named_parameters()}
        ),
        "buffers": ours.memory().buffers if ours else 0,
        "module_buffers": {n: b.clone() for n, b in module.named_buffers()},
    }


reference_world = 1


@functools.cache
def reference(name: str, ranks: int) -> Trained:
    """Return what torch makes of it."""
    global reference_world
    reference_world = ranks
    return train(name, None)
