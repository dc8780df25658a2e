"""`p.grad_dtype`: gradients of 16-bit parameters that autograd adds up in fp32."""

from __future__ import annotations

import functools
from typing import Any

import models
import pytest
import torch
from marks import at_worlds, in_stages
from oracle import apart, differing, sharded, state_of
from registry import cases_of
from torch import Tensor, nn

import zerokern
from zerokern import Precision

case = cases_of("gradients")

pytestmark = pytest.mark.skipif(
    not hasattr(torch.empty(0), "grad_dtype"), reason="torch has no Tensor.grad_dtype"
)

SHAPES = ((5, 7), (), (64,), (3, 65))
SMALL = 2.0**-10
"""Beside 1 it is lost in bf16, and not in fp32."""
MICROS = 16


def weighted(dtype: torch.dtype | None, *, only: str = "") -> models.Weighted:
    """Return a bf16 model whose gradients are what its forward is given.

    Args:
        dtype: of gradients.
        only: of parameters whose names contain this.
    """
    torch.manual_seed(0)
    model = models.Weighted(SHAPES, torch.bfloat16)
    for name, param in model.named_parameters():
        if only in name:
            param.grad_dtype = dtype
    return model


def backward(model: nn.Module, value: float) -> None:
    model([torch.full(shape, value) for shape in SHAPES]).backward()


def small_beside_large(
    stage: int, model: nn.Module, *, no_sync: bool, **options: Any
) -> dict[str, Tensor]:
    """Return the first moments, without decay: the sums of one large gradient and many
    small ones."""
    optimizer = sharded(
        model,
        stage,
        betas=(0.0, 0.0),
        **options,
    )
    backward(model, 1.0)
    for _ in range(MICROS - 1):
        if no_sync:
            with optimizer.no_sync():
                backward(model, SMALL)
        else:
            backward(model, SMALL)
    backward(model, SMALL)
    optimizer.step()
    moments = state_of(model, optimizer)
    return {name: value for name, value in moments.items() if "exp_avg" in name[-7:]}


@case
def sums_in_fp32(stage: int) -> dict[bool, dict[str, Tensor]]:
    return {
        no_sync: small_beside_large(stage, weighted(torch.float32), no_sync=no_sync)
        for no_sync in (False, True)
    }


@at_worlds
@in_stages
@pytest.mark.parametrize("no_sync", (False, True), ids=["reduced each time", "no_sync"])
def test_small_gradients_are_added_in_fp32(
    no_sync: bool,
    stage: int,
    at: int,
) -> None:
    """All of them count; in bf16 none would."""
    for results in case.done(at)["sums_in_fp32", stage]:
        assert len(results[no_sync]) == len(SHAPES)
        for name, moment in results[no_sync].items():
            assert (moment == 1 + MICROS * SMALL).all(), name


@case
def wires(stage: int) -> dict[str, Any]:
    """Return the dtypes of reduced gradients on the wire, and their bytes."""
    found: dict[str, Any] = {}
    for name, dtype, options in (
        ("bf16", torch.bfloat16, {}),
        ("fp32", torch.float32, {}),
        ("none", None, {}),
        (
            "fp32, wire bf16",
            torch.float32,
            {"precision": Precision(wire=torch.bfloat16)},
        ),
    ):
        model = weighted(dtype)
        optimizer = sharded(model, stage, **options)
        backward(model, 1.0)
        optimizer.step()
        log = optimizer.comm_log()
        reduced = [call for call in log if call.op == "reduce_scatter"]
        gathered = [call for call in log if call.op == "all_gather"]
        found[name] = (
            {call.dtype for call in reduced},
            sum(call.bytes for call in reduced),
            {call.dtype for call in gathered},
        )
    return found


@at_worlds
@in_stages
def test_gradients_travel_as_they_are_accumulated(stage: int, at: int) -> None:
    """Twice the bytes, unless a wire is asked for; parameters travel as they are."""
    for found in case.done(at)["wires", stage]:
        if at == 1:
            assert all(dtypes == set() for dtypes, *_ in found.values())
            continue
        for name, dtypes in (
            ("bf16", "bfloat16"),
            ("fp32", "float32"),
            ("fp32, wire bf16", "bfloat16"),
        ):
            assert {str(d).removeprefix("torch.") for d in found[name][0]} == {dtypes}
            assert {str(d).removeprefix("torch.") for d in found[name][2]} == {
                "bfloat16"
            }
        assert found["fp32"][1] == 2 * found["bf16"][1]
        assert found["fp32, wire bf16"][1] == found["bf16"][1]


def toy_of(dtype: torch.dtype, grad_dtype: Any = "as it is") -> models.Toy:
    model = models.toy(blocks=2).to(dtype)
    if grad_dtype != "as it is":
        for param in model.parameters():
            param.grad_dtype = grad_dtype
    return model


def _train(
    model: nn.Module,
    optimizer: Any,
    of: list[int],
    at: int,
) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            for r in of:
                tokens, targets = (
                    models.share(t, r, at) for t in models.batch(10 * step + micro)
                )
                (models.loss_of(model, tokens, targets) / len(of)).backward()
        optimizer.step()


@case
def trained_with(stage: int) -> dict[str, dict[str, Tensor]]:
    """Return masters of a bf16 model after three steps of two micro-batches."""
    found = {}
    at = torch.distributed.get_world_size()
    for name, grad_dtype in (
        ("fp32", torch.float32),
        ("none", None),
        ("bf16", torch.bfloat16),
        ("unset", "as it is"),
    ):
        model = toy_of(torch.bfloat16, grad_dtype)
        optimizer = sharded(
            model,
            stage,
            lr=1e-2,
            eps=1e-3,
        )
        _train(
            model,
            optimizer,
            [torch.distributed.get_rank()],
            at,
        )
        state = state_of(model, optimizer)
        found[name] = {
            key.removesuffix("/master"): value
            for key, value in state.items()
            if key.endswith("/master")
        }
        assert optimizer.memory().buffers == 0
    return found


@functools.cache
def trained_by_torch(at: int) -> dict[str, Tensor]:
    model = toy_of(torch.bfloat16).float()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    _train(
        model,
        plain,
        list(range(at)),
        at,
    )
    return {name: p.detach() for name, p in model.named_parameters()}


@at_worlds
@in_stages
@pytest.mark.parametrize("name", ["fp32", "none", "bf16", "unset"])
def test_trains_near_torch_in_fp32(
    name: str,
    stage: int,
    at: int,
) -> None:
    """Forward and backward are in bf16, whose roundings are 2**-9 of a term; Adam
    divides by the size of a gradient, so small ones count as much as large ones."""
    for found in case.done(at)["trained_with", stage]:
        assert apart(found[name], trained_by_torch(at), limit=0.1) == {}


@at_worlds
@in_stages
def test_to_name_the_own_dtype_changes_nothing(stage: int, at: int) -> None:
    for found in case.done(at)["trained_with", stage]:
        assert differing(found["bf16"], found["unset"]) == []


@case
def of_some_parameters(stage: int) -> dict[str, Tensor]:
    """One bucket, of which some parameters add up in fp32: return the sums."""
    model = weighted(torch.float32, only="terms.2")
    options = {"buckets": zerokern.Buckets(bytes=10**6)}
    return small_beside_large(
        stage,
        model,
        no_sync=False,
        **options,
    )


@at_worlds
@in_stages
def test_a_bucket_takes_the_wider_dtype(stage: int, at: int) -> None:
    """Those that ask for fp32 get it, whatever shares their bucket."""
    for found in case.done(at)["of_some_parameters", stage]:
        assert (found["terms.2.weight/exp_avg"] == 1 + MICROS * SMALL).all()


@case
def read_gradients(stage: int) -> list[torch.dtype]:
    """Return the dtypes of what users see of a gradient."""
    model = weighted(torch.float32)
    optimizer = sharded(model, stage)
    backward(model, 1.0)
    seen = [param.grad.dtype for param in model.parameters()]
    for param in model.parameters():
        gradient = optimizer.full_grad(param)
        assert gradient is not None and (gradient == 1).all()
    optimizer.step()
    backward(model, 1.0)  # adds to what is left in p.grad
    seen += [param.grad.dtype for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backward(model, 1.0)
    return [*seen, *(param.grad.dtype for param in model.parameters())]


@at_worlds
@in_stages
def test_gradients_say_their_dtype(stage: int, at: int) -> None:
    for dtypes in case.done(at)["read_gradients", stage]:
        assert set(dtypes) == {torch.float32}


@case
def set_by_hand(stage: int) -> dict[str, Tensor]:
    """Assign fp32 gradients that bf16 would round."""
    model = weighted(torch.float32)
    optimizer = sharded(model, stage, betas=(0.0, 0.0))
    for param in model.parameters():
        param.grad = torch.full(param.shape, 1 + SMALL)
    optimizer.step()
    return state_of(model, optimizer)


@at_worlds
@in_stages
def test_gradients_set_by_hand_keep_their_bits(stage: int, at: int) -> None:
    for state in case.done(at)["set_by_hand", stage]:
        moments = [v for name, v in state.items() if name.endswith("/exp_avg")]
        assert len(moments) == len(SHAPES)
        assert all((moment == 1 + SMALL).all() for moment in moments)
