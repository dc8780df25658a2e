"""The update rules against torch.optim, or a written-out formula, in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import tolerances
import torch
from kernel_shards import columns_of, moments_of, shard_of, update, weights_of
from samples import seeded, ulp
from scalar_tables import ADAMW, Variant, scalars_of
from torch import Tensor

from zerokern import ops
from zerokern.ops import BLOCK, Shard


class Exact(NamedTuple):
    """A result in fp64, and the magnitude of the largest term that it was summed from,
    to which its error is relative.

    Of a weight, also the magnitude of its update if no terms cancelled in it.
    """

    value: Tensor
    largest: Tensor
    update: Tensor | None = None


def check_against(
    exact: Sequence[Exact],
    state: Shard,
    extra: float = 0.0,
) -> None:
    """Compare fp32 weight and moments with fp64 ones; `extra` ulp more where decay is
    in the gradient."""
    results = [weights_of(state), *(m for m in moments_of(state) if m is not None)]
    for index, (actual, expected) in enumerate(zip(results, exact, strict=True)):
        allowed = (tolerances.RULE_ULP + extra) * ulp(expected.largest)
        if expected.update is not None:
            allowed += (tolerances.UPDATE_ULP + extra) * ulp(expected.update)
        assert ((actual.double() - expected.value).abs() <= allowed).all(), index


class Adam(NamedTuple):
    """One step of Adam or AdamW: by torch in fp64, and what its terms amount to."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool

    def variant(self) -> Variant:
        hyper = {
            "lr": self.lr,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "weight_decay": self.weight_decay,
            "decoupled": float(self.decoupled),
            "sign": -1.0 if self.maximize else 1.0,
        }
        return Variant("adam", hyper, amsgrad=self.amsgrad)

    def states(self, step: int) -> dict[str, Tensor]:
        """Return fp32 moments such as there are after some steps: zeros after none."""
        exp_avg_sq = seeded(4096, 2).abs() * 0.01
        states = {"exp_avg": seeded(4096, 1) * 0.1, "exp_avg_sq": exp_avg_sq}
        if self.amsgrad:
            states["max_exp_avg_sq"] = exp_avg_sq + seeded(4096, 4) * 0.001
        if step == 0:
            return {name: torch.zeros_like(state) for name, state in states.items()}
        return states

    def by_torch(
        self,
        step: int,
        weight: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weight and the states after one more step."""
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = grad
        rule = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        optimizer = rule(
            [parameter],
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            foreach=False,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
        )
        state = {name: value.clone() for name, value in states.items()}
        state["step"] = torch.tensor(float(step))
        optimizer.state[parameter] = state
        optimizer.step()
        return parameter.data, optimizer.state[parameter]

    def exact(
        self,
        step: int,
        weight: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
    ) -> list[Exact]:
        """Return weight and states, all fp64, beside the largest terms of each."""
        new_weight, after = self.by_torch(step, weight, grad, states)
        # The terms of the gradient may cancel.
        g_sum = grad.abs()
        decayed = weight
        if self.decoupled:
            decayed = weight * (1 - self.lr * self.weight_decay)
        else:
            g_sum = g_sum + self.weight_decay * weight.abs()
        m_sum = torch.maximum(
            self.beta1 * states["exp_avg"].abs(),
            (1 - self.beta1) * g_sum,
        )
        v_sum = self.beta2 * states["exp_avg_sq"] + (1 - self.beta2) * g_sum**2
        largest = torch.maximum(weight.abs(), new_weight.abs())
        moved = (new_weight - decayed).abs() * m_sum / after["exp_avg"].abs()
        exact = [
            Exact(new_weight, largest, moved),
            Exact(after["exp_avg"], m_sum),
            Exact(after["exp_avg_sq"], v_sum),
        ]
        if self.amsgrad:
            largest = torch.maximum(v_sum, states["max_exp_avg_sq"])
            exact.append(Exact(after["max_exp_avg_sq"], largest))
        return exact


@pytest.mark.parametrize("step", [0, 1, 10, 10_000])
@pytest.mark.parametrize(
    ("lr", "beta1", "beta2", "weight_decay"),
    [
        (1e-3, 0.9, 0.999, 0.01),
        (3e-4, 0.9, 0.95, 0.1),
        (1e-2, 0.8, 0.99999, 0.0),
        (1.0, 0.0, 0.9, 0.0),
    ],
)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
def test_adam_is_torch_in_fp64(
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decoupled: bool,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """Also the bias correction of the first step, and decay before the update."""
    adam = Adam(lr, beta1, beta2, weight_decay, decoupled, amsgrad, maximize)
    weight = seeded(4096)
    grad = seeded(4096, 3)
    states = adam.states(step)
    variant = adam.variant()
    shard = shard_of(variant, "fp32", "fp32", weight, *states.values())
    update(
        shard,
        grad,
        columns_of([0] * 64),
        "torch",
        **scalars_of(variant, step=step),
    )

    before = {name: state.double() for name, state in states.items()}
    exact = adam.exact(
        step,
        weight.double(),
        grad.double(),
        before,
    )
    check_against(exact, shard, tolerances.L2_ULP * (not decoupled))


@pytest.mark.parametrize("step", [0, 1, 10])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [
        (0.0, 0.0, False),
        (0.9, 0.0, False),
        (0.9, 0.3, False),
        (0.9, 0.0, True),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
def test_sgd_is_torch_in_fp64(
    step: int,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
) -> None:
    weight = seeded(4096)
    grad = seeded(4096, 3)
    buffer = seeded(4096, 1)
    hyper = {
        "lr": 0.1,
        "beta1": momentum,
        "beta2": dampening,
        "nesterov": float(nesterov),
        "decoupled": 0.0,
        "weight_decay": weight_decay,
        "sign": -1.0 if maximize else 1.0,
    }
    variant = Variant("sgd", hyper, momentum=momentum != 0)
    state = shard_of(variant, "fp32", "fp32", weight, buffer * (step > 0))
    scalars = scalars_of(variant, step=step)
    update(state, grad, columns_of([0] * 64), "torch", **scalars)

    parameter = torch.nn.Parameter(weight.double())
    parameter.grad = grad.double()
    optimizer = torch.optim.SGD(
        [parameter],
        lr=0.1,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        maximize=maximize,
        foreach=False,
    )
    if momentum and step:
        optimizer.state[parameter]["momentum_buffer"] = buffer.double()
    optimizer.step()

    w = weight.double()
    g = grad.double()
    g_sum = g.abs() + weight_decay * w.abs()
    m_sum = g_sum + (momentum * buffer.double().abs() if step else 0.0)
    steepest = 0.1 * (g_sum + momentum * m_sum if nesterov else m_sum)
    exact = [Exact(parameter.data, torch.maximum(w.abs(), steepest), steepest)]
    if momentum:
        exact.append(Exact(optimizer.state[parameter]["momentum_buffer"], m_sum))
    check_against(exact, state, tolerances.L2_ULP * (weight_decay > 0))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_lion_is_its_formula_in_fp64(sign: float) -> None:
    lr = 1e-2
    beta1 = 0.9
    beta2 = 0.99
    weight_decay = 0.1
    weight = seeded(4096)
    grad = seeded(4096, 3)
    moment = seeded(4096, 1)
    hyper = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "sign": sign,
    }
    variant = Variant("lion", hyper)
    state = shard_of(variant, "fp32", "fp32", weight, moment)
    update(
        state,
        grad,
        columns_of([0] * 64),
        "torch",
        **scalars_of(variant, step=5),
    )

    w = weight.double()
    m = moment.double()
    g = sign * grad.double()
    direction = torch.sign(beta1 * m + (1 - beta1) * g)
    new_weight = w * (1 - lr * weight_decay) - lr * direction
    new_moment = beta2 * m + (1 - beta2) * g
    exact = [
        Exact(new_weight, w.abs() + lr),
        Exact(new_moment, beta2 * m.abs() + (1 - beta2) * g.abs()),
    ]
    check_against(exact, state)

    # Where there is nothing to follow there is no step, and NaN shows.
    still = shard_of(variant, "fp32", "fp32", torch.ones(BLOCK))
    nothing = torch.zeros(BLOCK)
    nothing[1] = math.nan
    scalars = scalars_of(variant, weight_decay=0.0)
    update(still, nothing, columns_of([0]), "torch", **scalars)
    assert still.param[1].isnan()
    assert (still.param[2:] == 1.0).all()


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999, 0.9999, 0.99999])
def test_the_first_step_is_unbiased(beta2: float) -> None:
    """Moments and their corrections must be of the same betas, rounded or not."""
    grad = seeded(4096)
    scalars = scalars_of(ADAMW, beta2=beta2, lr=1.0, weight_decay=0.0)
    state = shard_of(ADAMW, "fp32", "fp32", torch.zeros(4096))
    update(
        state,
        grad,
        columns_of([0] * 64),
        "torch",
        **scalars,
    )

    table = dict(zip(ops.TABLE, scalars["table"][:, 0].double(), strict=True))
    m, v, _ = moments_of(state)
    assert m is not None and v is not None
    m, v, g = m.double(), v.double(), grad.double()
    inverse_root = table["inv_sqrt_c2"]
    assert ((m * table["step_size"] - g).abs() <= 2 * ulp(g)).all()
    assert ((v.sqrt() * inverse_root - g.abs()).abs() <= 2 * ulp(g)).all()
    assert ((v * inverse_root**2 - g * g).abs() <= 3 * ulp(g * g)).all()
