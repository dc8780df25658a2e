"""What trainers and schedulers expect of any torch optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from marks import in_stages
from oracle import differing, rank, set_integer_gradients, sharded, whole
from torch import nn
from torch.optim import lr_scheduler
from training import everything, params_of

import zerokern

PAIRS = [(zerokern.AdamW, torch.optim.AdamW), (zerokern.Adam, torch.optim.Adam)]
OWN_OPTIONS = {
    "stage",
    "model",
    "process_group",
    "mesh",
    "precision",
    "buckets",
    "max_grad_norm",
    "init",
}
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda c: c.__name__)


@pairs
def test_it_is_a_torch_optimizer(ours: Any, theirs: Any) -> None:
    """Duck types are refused by schedulers."""
    assert issubclass(ours, torch.optim.Optimizer)
    assert not hasattr(ours, "__slots__")


def positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


@pairs
def test_the_signature_is_that_of_torch(ours: Any, theirs: Any) -> None:
    """Names, order, kinds and defaults; our own options are keyword-only and few."""
    mine = inspect.signature(ours).parameters
    its = inspect.signature(theirs).parameters
    assert positional(mine) == positional(its)
    assert its.keys() <= mine.keys()
    for name, parameter in its.items():
        assert (name, mine[name].kind, mine[name].default) == (
            name,
            parameter.kind,
            parameter.default,
        )
    extra = {name: p for name, p in mine.items() if name not in its}
    assert extra.keys() == OWN_OPTIONS
    assert {p.kind for p in extra.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pairs
@pytest.mark.parametrize(
    "method", ["step", "zero_grad", "load_state_dict", "state_dict", "add_param_group"]
)
def test_methods_take_what_those_of_torch_take(
    ours: Any, theirs: Any, method: str
) -> None:
    """Passed by keyword, and inspected."""
    mine, its = (
        [(n, p.default) for n, p in inspect.signature(f).parameters.items()]
        for f in (getattr(ours, method), getattr(theirs, method))
    )
    assert mine == its


@pairs
def test_groups_have_the_keys_of_torch(ours: Any, theirs: Any) -> None:
    """OneCycleLR looks for betas here; defaults are complete."""
    mine = ours(models.toy().parameters())
    its = theirs(models.toy().parameters())
    assert mine.param_groups[0].keys() == its.param_groups[0].keys()
    assert mine.defaults == its.defaults


@in_stages
def test_groups_hold_the_model_s_own_parameters(stage: int) -> None:
    """Never flat shards."""

    def case() -> bool:
        model = models.toy()
        optimizer = sharded(model, stage)
        held = [id(p) for p in optimizer.param_groups[0]["params"]]
        return held == [id(p) for p in model.parameters()] and all(
            p in optimizer.state for p in model.parameters()
        )

    assert ranks.run(2, case) == [True, True]


def test_step_hooks_fire_around_the_closure() -> None:
    """The pre-hook comes before the gradients exist."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: order.append("pre"))
    optimizer.register_step_post_hook(lambda *_: order.append("post"))

    def closure() -> torch.Tensor:
        order.append("closure")
        optimizer.zero_grad()
        loss = models.loss_of(model, *models.batch(0))
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure)
    assert order == ["pre", "closure", "post"]
    assert isinstance(loss, torch.Tensor)


def test_step_returns_none_without_a_closure_and_a_number_of_one() -> None:
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    assert optimizer.step() is None
    assert optimizer.step(lambda: 1.5) == 1.5


def test_closures_run_with_gradients_enabled() -> None:
    optimizer = zerokern.AdamW(models.toy().parameters())
    seen: list[bool] = []
    with torch.no_grad():
        optimizer.step(lambda: seen.append(torch.is_grad_enabled()) or 0.0)
    assert seen == [True]


def test_repr_shows_groups_and_their_options() -> None:
    text = repr(zerokern.AdamW(models.toy().parameters(), lr=0.125))
    assert text.startswith("AdamW (")
    assert "lr: 0.125" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
        lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, cycle_momentum=True),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
    ids=["LambdaLR", "OneCycleLR", "CosineAnnealingLR", "CyclicLR", "SequentialLR"],
)
def test_schedulers_move_the_rate_as_for_torch(make: Any) -> None:
    """Warnings are errors here, so an order that torch warns about fails."""
    rates = []
    for optimizer_class in (zerokern.AdamW, torch.optim.AdamW):
        model = models.toy()
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        scheduler = make(optimizer)
        seen = []
        for step in range(5):
            set_integer_gradients(model, step)
            optimizer.step()
            scheduler.step()
            group = optimizer.param_groups[0]
            seen.append((float(group["lr"]), group["betas"]))
        rates.append(seen)
    assert rates[0] == rates[1]


@in_stages
def test_training_uses_the_given_process_group(stage: int) -> None:
    """Two groups of two train apart, each on the mean of its own members."""

    def case() -> tuple[dict[str, torch.Tensor], set[int]]:
        groups = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = groups[rank() // 2]
        model = models.toy()
        optimizer = sharded(model, stage, process_group=mine)
        for step in range(2):
            optimizer.zero_grad()
            tokens, targets = models.batch(step + 10 * (rank() // 2))
            models.loss_of(model, tokens, targets).backward()
            optimizer.step()
        sizes = {call.group for call in optimizer.comm_log()}
        return whole(model, optimizer), sizes

    results = ranks.run(4, case)
    assert all(sizes == {2} for _, sizes in results)
    first, second, third, fourth = (params for params, _ in results)
    assert differing(first, second) == []
    assert differing(third, fourth) == []
    assert differing(first, third) != []


def test_a_mesh_is_as_good_as_its_group() -> None:
    def case() -> list[str]:
        mesh = dist.init_device_mesh("cpu", (2,))
        found = []
        for options in ({"mesh": mesh}, {"process_group": mesh.get_group()}):
            model = models.toy()
            optimizer = zerokern.AdamW(model.parameters(), **options)
            set_integer_gradients(model, 0)
            optimizer.step()
            found.append(whole(model, optimizer))
        return differing(*found)

    assert ranks.run(2, case) == [[], []]


@in_stages
def test_ranks_start_from_the_values_of_rank_0(stage: int) -> None:
    """As with DDP: seeds may differ."""

    def case() -> dict[str, torch.Tensor]:
        model = models.toy(seed=rank())
        return whole(model, sharded(model, stage))

    expected = params_of(models.toy(seed=0))
    for result in ranks.run(3, case):
        assert differing(result, expected) == []


@in_stages
def test_custom_attributes_of_parameters_stay(stage: int) -> None:
    def case() -> Any:
        model = models.toy()
        model.head.weight.sequence_parallel = True
        sharded(model, stage)
        return model.head.weight.sequence_parallel

    assert ranks.run(2, case) == [True, True]


def test_grad_norm_and_skipped_steps_are_tensors_on_the_device() -> None:
    """Readable, without a synchronisation unless the user wants one."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters(), max_grad_norm=0.01)
    models.loss_of(model, *models.batch(0)).backward()
    squares = [p.grad.double().square().sum() for p in model.parameters()]
    expected = torch.stack(squares).sum().sqrt()
    optimizer.step()
    assert torch.allclose(optimizer.grad_norm, expected)
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("optimizer", [zerokern.AdamW, zerokern.SGD, zerokern.Lion])
def test_a_learning_rate_may_be_a_number_or_a_tensor(optimizer: Any) -> None:
    results = []
    for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64)):
        model = models.toy()
        ours = optimizer(model.parameters(), lr=lr)
        for step in range(3):
            set_integer_gradients(model, step)
            ours.step()
        results.append(whole(model, ours))
    assert differing(*results) == []


@pytest.mark.parametrize(
    "optimizer", [zerokern.Adam, zerokern.AdamW, zerokern.SGD, zerokern.Lion]
)
def test_every_rule_is_a_torch_optimizer_and_takes_frozen_parameters(
    optimizer: Any,
) -> None:
    model = models.toy()
    model.head.weight.requires_grad_(False)
    frozen = model.head.weight.detach().clone()
    ours = optimizer(model.parameters())
    assert isinstance(ours, torch.optim.Optimizer)
    set_integer_gradients(model, 0)
    ours.step()
    assert torch.equal(model.head.weight, frozen)


def test_the_public_names() -> None:
    names = {
        "SGD",
        "Adam",
        "AdamW",
        "Buckets",
        "Call",
        "GradScaler",
        "Lion",
        "Memory",
        "Options",
        "Precision",
    }
    assert set(zerokern.__all__) == names
    assert nn.Module  # the library adds nothing to torch's own classes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_default_dtype_changes_no_bit(dtype: torch.dtype) -> None:
    """Models are built in fp32; whole scripts run under another default."""
    results = []
    for default in (torch.float32, dtype):
        model = models.toy()
        torch.set_default_dtype(default)
        try:
            optimizer = zerokern.AdamW(model.parameters())
            for step in range(3):
                set_integer_gradients(model, step)
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(everything(model, optimizer))
    assert differing(*results) == []
