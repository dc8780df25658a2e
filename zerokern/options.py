"""The options that every optimizer has beside the arguments of torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .config import Buckets, Precision


class Options(TypedDict, total=False):
    """Arguments of every optimizer beside those that torch's has."""

    stage: int
    """1 shards optimizer state, 2 gradients too, 3 parameters too. Default: 1."""
    model: nn.Module | None
    """The module whose parameters these are. Stage 3 needs it, to gather units before
    their forward."""
    process_group: ProcessGroup | None
    """Ranks to shard over; default: the default group, if there is one."""
    mesh: DeviceMesh | None
    """A 1-d DeviceMesh, instead of process_group."""
    precision: Precision | None
    """Formats of master weights, moments and gradients; dtype on the wire."""
    buckets: Buckets | None
    """Sizes, overlap, units."""
    max_grad_norm: float | None
    """Clip the total gradient norm at every step; costs no pass of its own."""
    init: Callable[[nn.Module], Any] | Any | None
    """Gives a model that was built on the meta device its values, and needs `model`; in
    stage 3 one unit at a time. A function of a module, called for each, children first;
    or a mapping from names to tensors, or an open safetensors file. Default: each
    module's reset_parameters()."""


def signature_of(init: Callable[..., None]) -> inspect.Signature:
    """Return the signature of a constructor that takes `**options: Unpack[Options]`,
    with every option by name, for `help` and whoever fills arguments in by name."""
    signature = inspect.signature(init)
    params = list(signature.parameters.values())[1:]  # without self
    own = [param for param in params if param.kind is not param.VAR_KEYWORD]
    for name, annotation in Options.__annotations__.items():
        default = 1 if name == "stage" else None
        kind = inspect.Parameter.KEYWORD_ONLY
        option = inspect.Parameter(name, kind, default=default, annotation=annotation)
        own.append(option)
    return signature.replace(parameters=own)
