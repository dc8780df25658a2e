"""The nodes of autograd that accumulate gradients into p.grad.

A hook on a parameter runs for every gradient of it, also for one that `autograd.grad`
returns. A hook on its node runs when p.grad is about to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

PASSES = (torch.autograd.grad, torch.autograd.backward)
"""Functions that may be given parameters whose values they do not read."""


def node_of(param: Tensor) -> Node:
    """Return the node of a parameter. Autograd keeps it only as long as somebody holds
    it.

    Raises:
        RuntimeError: torch's own; the parameter is frozen.
    """
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        node = param.view_as(param).grad_fn
    if node is None:
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    accumulates = node.next_functions[0][0]
    assert accumulates is not None
    return accumulates


def run_pass(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    kind: type,
) -> Any:
    """Run a backward pass with respect to parameters without reading these.

    Args:
        function: one of `PASSES`.
        args, options: its arguments, as torch hands them to `__torch_function__`.
        kind: the class of parameters that must not be read.
    """
    options = dict(options)
    if function is torch.autograd.backward:
        options["inputs"] = _edges(options["inputs"], kind)
        return function(*args, **options)
    outputs, inputs = args
    materialize = options.pop("materialize_grads", False)
    if materialize:
        options["allow_unused"] = True
    found = function(outputs, _edges(inputs, kind), **options)
    if not materialize:
        return found
    filled = []
    for gradient, param in zip(found, inputs, strict=True):
        if gradient is None:
            needs = options["create_graph"]
            gradient = torch.zeros_like(param, requires_grad=needs)
        filled.append(gradient)
    return tuple(filled)


def _edges(params: Sequence[Any], kind: type) -> list[Any]:
    """Return the places in the graph of those that must not be read."""
    edges = []
    for param in params:
        is_absent = isinstance(param, kind)
        edges.append(GradientEdge(node_of(param), 0) if is_absent else param)
    return edges
