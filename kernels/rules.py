"""The update rules in plain torch, fp32 in and fp32 out: the specification of the
functions of the same names in `update.py`. Every operation is rounded on its own, in
the order in which it is written.

Each takes weight, first moment, second moment, largest second moment and the gradient,
fp32 of one shape (None for a state that the rule does not have), and the scalars of the
parameter by the names of TABLE; it returns the new states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

State = Tensor | None  # a moment that the rule may not have
Updated = tuple[Tensor, State, State, State]


def sqrt_rn(x: Tensor) -> Tensor:
    """Return the correctly rounded fp32 square root.

    torch's vectorised fp32 square root on the CPU misses the last bit now and then. The
    fp64 root of an fp32 number is never so close to the middle of two fp32 numbers that
    rounding it once more could go wrong.
    """
    return x.double().sqrt_().float()


def adam(
    w: Tensor,
    m: State,
    v: State,
    largest: State,
    g: Tensor,
    scalars: Mapping[str, Tensor],
) -> Updated:
    """Adam (Kingma and Ba, arXiv:1412.6980), AdamW (Loshchilov and Hutter,
    arXiv:1711.05101), AMSGrad (Reddi et al., arXiv:1904.09237) if there is a largest
    second moment."""
    assert m is not None and v is not None
    m = scalars["beta1"] * m + scalars["one_minus_beta1"] * g
    v = scalars["beta2"] * v + scalars["one_minus_beta2"] * (g * g)
    if largest is not None:
        largest = torch.where(v > largest, v, largest)
    root = sqrt_rn(v if largest is None else largest)
    step = (m * scalars["step_size"]) / (root * scalars["inv_sqrt_c2"] + scalars["eps"])
    return w * scalars["decay"] - step, m, v, largest


def lion(
    w: Tensor,
    m: State,
    v: State,
    largest: State,
    g: Tensor,
    scalars: Mapping[str, Tensor],
) -> Updated:
    """Lion (Chen et al., arXiv:2302.06675): a step of the sign of an interpolation,
    then the moment with beta2."""
    assert m is not None
    c = scalars["beta1"] * m + scalars["one_minus_beta1"] * g
    direction = torch.where(c > 0, 1.0, torch.where(c < 0, -1.0, c))
    m = scalars["beta2"] * m + scalars["one_minus_beta2"] * g
    return w * scalars["decay"] - direction * scalars["step_size"], m, v, largest


def sgd(
    w: Tensor,
    m: State,
    v: State,
    largest: State,
    g: Tensor,
    scalars: Mapping[str, Tensor],
) -> Updated:
    """Stochastic gradient descent, with momentum (Sutskever et al., ICML 2013, as
    torch.optim.SGD words it) if there is a buffer for it. A step whose momentum is 0
    leaves that as it is."""
    direction = g
    if m is not None:
        beta1 = scalars["beta1"]
        moved = beta1 * m + scalars["one_minus_beta1"] * g
        ahead = torch.where(scalars["nesterov"] != 0, g + beta1 * moved, moved)
        direction = torch.where(beta1 != 0, ahead, g)
        m = torch.where(beta1 != 0, moved, m)
    return w * scalars["decay"] - direction * scalars["step_size"], m, v, largest


RULES = {"adam": adam, "lion": lion, "sgd": sgd}
