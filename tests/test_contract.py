"""What trainers and schedulers expect of any torch optimizer."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import (
    STAGES,
    Run,
    differing,
    rank,
    set_integer_gradients,
    sharded,
    whole,
    world,
)
from torch import nn
from torch.optim import lr_scheduler

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
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


@pairs
def test_it_is_a_torch_optimizer(ours: Any, theirs: Any) -> None:
    """Fact 1, L1: duck types are refused by schedulers."""
    assert issubclass(ours, torch.optim.Optimizer)
    assert not hasattr(ours, "__slots__")


@pairs
def test_the_signature_is_that_of_torch(ours: Any, theirs: Any) -> None:
    """Names, order, kinds and defaults; our own options are keyword-only and few."""
    mine = inspect.signature(ours).parameters
    its = inspect.signature(theirs).parameters
    assert [n for n, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        n for n, p in its.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
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
    """Fact 7: passed by keyword, and inspected."""
    mine = inspect.signature(getattr(ours, method)).parameters
    its = inspect.signature(getattr(theirs, method)).parameters
    assert [(n, p.default) for n, p in mine.items()] == [
        (n, p.default) for n, p in its.items()
    ]


@pairs
def test_groups_have_the_keys_of_torch(ours: Any, theirs: Any) -> None:
    """OneCycleLR looks for betas here; defaults are complete."""
    mine, its = ours(models.toy().parameters()), theirs(models.toy().parameters())
    assert mine.param_groups[0].keys() == its.param_groups[0].keys()
    assert mine.defaults == its.defaults


@in_stages
def test_groups_hold_the_model_s_own_parameters(stage: int) -> None:
    """Fact 2: never flat shards."""

    def case() -> bool:
        model = models.toy()
        optimizer = sharded(model, stage)
        held = [id(p) for p in optimizer.param_groups[0]["params"]]
        return held == [id(p) for p in model.parameters()] and all(
            p in optimizer.state for p in model.parameters()
        )

    assert ranks.run(2, case) == [True, True]


def test_step_hooks_fire_around_the_closure() -> None:
    """Fact 8: the pre-hook comes before the gradients exist."""
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
    """L2."""
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
    """L1; warnings are errors here, so an order that torch warns about fails."""
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
            seen.append(
                (
                    float(optimizer.param_groups[0]["lr"]),
                    optimizer.param_groups[0]["betas"],
                )
            )
        rates.append(seen)
    assert rates[0] == rates[1]


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
def test_a_copy_of_the_model_is_its_own(stage: int) -> None:
    """deepcopy, as for an average of weights: same values, no shared memory, no hooks
    of the optimizer."""

    def case() -> tuple[list[str], list[str], int]:
        run = Run(stage, world())
        twin = copy.deepcopy(run.model)
        before = {name: p.detach().clone() for name, p in twin.named_parameters()}
        run.backward(0)
        run.step()
        unchanged = differing(dict(twin.named_parameters()), before)
        calls = len(run.optimizer.comm_log())
        tokens, targets = models.batch(0)
        models.loss_of(twin, tokens, targets).backward()
        changed = differing(whole(run.model, run.optimizer), before)
        return unchanged, changed, len(run.optimizer.comm_log()) - calls

    for unchanged, changed, calls in ranks.run(2, case):
        assert unchanged == []
        assert changed != []
        assert calls == 0


def test_a_copy_of_a_trained_model_can_be_trained() -> None:
    """Its gradients, if any, are copies too."""
    run = Run(1, 1)
    run.backward(0)
    run.step()
    twin = copy.deepcopy(run.model)
    optimizer = zerokern.AdamW(twin.parameters())
    run.model = twin
    run.backward(1)
    optimizer.step()
    assert differing(dict(twin.named_parameters()), dict(twin.named_parameters())) == []


def test_the_model_can_be_pickled() -> None:
    """torch.save(model) is what many scripts do."""
    run = Run(1, 1)
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(run.model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert (
        differing(dict(loaded.named_parameters()), dict(run.model.named_parameters()))
        == []
    )


def test_the_state_dict_can_be_pickled_and_copied() -> None:
    run = Run(1, 1)
    run.backward(0)
    run.step()
    saved = run.optimizer.state_dict()
    for copied in (pickle.loads(pickle.dumps(saved)), copy.deepcopy(saved)):
        assert copied["param_groups"] == saved["param_groups"]
        for index, entry in saved["state"].items():
            assert differing(copied["state"][index], entry) == []


@in_stages
def test_a_second_optimizer_takes_the_parameters_over(stage: int) -> None:
    """The first refuses by name, and hooks of the first do nothing any more."""

    def case() -> tuple[list[str], list[str]]:
        first, plain = Run(stage, world()), Run(stage, world())
        for run in (first, plain):
            run.backward(0)
            run.step()
            run.optimizer.zero_grad()
        old = first.optimizer
        first.optimizer = sharded(first.model, stage, lr=1e-2)
        plain.optimizer.load_state_dict(
            {**plain.optimizer.full_state_dict(), "state": {}}
        )
        for method in (old.step, lambda: old.clip_grad_norm_(1.0), old.no_sync):
            with pytest.raises(RuntimeError, match="newer optimizer"):
                method()
        for run in (first, plain):
            for step in (1, 2):
                run.optimizer.zero_grad()
                run.backward(step)
                run.step()
        return differing(
            whole(first.model, first.optimizer), whole(plain.model, plain.optimizer)
        ), [
            call.op
            for call in first.optimizer.comm_log()
            if call.phase == "forward" and call.op == "reduce_scatter"
        ]

    assert ranks.run(2, case) == [([], [])] * 2


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (1, 3), (2, 3), (3, 1), (3, 2), (3, 3)]
)
def test_the_stage_can_change_by_a_new_optimizer(before: int, after: int) -> None:
    def case() -> list[str]:
        run, plain = Run(before, world()), Run(1, world())
        state = None
        for step in range(4):
            for script in (run, plain):
                script.optimizer.zero_grad()
                script.backward(step)
                script.step()
            if step == 1:
                state = run.optimizer.full_state_dict()
                run.optimizer = sharded(run.model, after, lr=1e-2)
                run.optimizer.load_state_dict(state)
        return differing(
            whole(run.model, run.optimizer), whole(plain.model, plain.optimizer)
        )

    assert ranks.run(2, case) == [[], []]


@in_stages
def test_a_model_whose_optimizer_is_gone_is_a_plain_model(stage: int) -> None:
    """Dropping the optimizer leaves no hook that fails."""
    import gc

    run = Run(stage, 1)
    run.backward(0)
    run.step()
    run.optimizer.zero_grad()
    run.optimizer = None
    gc.collect()
    run.backward(1)
    assert all(
        torch.isfinite(p.grad).all()
        for p in run.model.parameters()
        if p.grad is not None
    )


@in_stages
def test_training_uses_the_given_process_group(stage: int) -> None:
    """Two groups of two train apart, each on the mean of its own members."""

    def case() -> tuple[dict[str, torch.Tensor], set[int]]:
        groups = [
            torch.distributed.new_group([0, 1]),
            torch.distributed.new_group([2, 3]),
        ]
        mine = groups[rank() // 2]
        model = models.toy()
        optimizer = sharded(model, stage, process_group=mine)
        for step in range(2):
            optimizer.zero_grad()
            tokens, targets = models.batch(step + 10 * (rank() // 2))
            models.loss_of(model, tokens, targets).backward()
            optimizer.step()
        return whole(model, optimizer), {call.group for call in optimizer.comm_log()}

    results = ranks.run(4, case)
    assert all(groups == {2} for _, groups in results)
    assert (
        differing(results[0][0], results[1][0])
        == differing(results[2][0], results[3][0])
        == []
    )
    assert differing(results[0][0], results[2][0]) != []


def test_a_mesh_is_as_good_as_its_group() -> None:
    def case() -> list[str]:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
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

    expected = dict(models.toy(seed=0).named_parameters())
    assert [differing(result, expected) for result in ranks.run(3, case)] == [[]] * 3


@in_stages
def test_custom_attributes_of_parameters_stay(stage: int) -> None:
    """D30."""

    def case() -> Any:
        model = models.toy()
        model.head.weight.sequence_parallel = True
        sharded(model, stage)
        return model.head.weight.sequence_parallel

    assert ranks.run(2, case) == [True, True]


def test_grad_norm_and_skipped_steps_are_tensors_on_the_device() -> None:
    """E8, E13: readable, without a synchronisation unless the user wants one."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters(), max_grad_norm=0.01)
    models.loss_of(model, *models.batch(0)).backward()
    expected = (
        torch.stack([p.grad.double().square().sum() for p in model.parameters()])
        .sum()
        .sqrt()
    )
    optimizer.step()
    assert torch.allclose(optimizer.grad_norm, expected)
    assert optimizer.skipped_steps == 0


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
