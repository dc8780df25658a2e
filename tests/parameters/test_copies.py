"""Copies of a model that has an optimizer: deep, averaged, pickled. They are plain
models with memory of their own."""

from __future__ import annotations

import copy
import io

import models
import torch
from marks import in_stages, in_stages_1_and_2
from oracle import Run, apart, differing, sharded, whole, world
from registry import cases_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import params_of

import zerokern

case = cases_of("parameters")


@case
def averages(stage: int) -> list[str]:
    """Average the weights of 3 steps inside full_params; return where a plain model's
    average differs."""
    nets = models.toy(blocks=3), models.toy(blocks=3)
    plain = zerokern.AdamW(nets[1].parameters(), lr=1e-2)
    optimizers = sharded(nets[0], stage, lr=1e-2), plain
    averaged = []
    for net, optimizer in zip(nets, optimizers, strict=True):
        with optimizer.full_params():
            average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            optimizer.zero_grad()
            models.loss_of(net, *models.batch(step)).backward()
            optimizer.step()
            with optimizer.full_params():
                average.update_parameters(net)
        with torch.no_grad():
            average(models.batch(0)[0])  # a plain model: no hook of ours follows it
        averaged.append(params_of(average.module))
    return differing(*averaged)


@in_stages
def test_averages_of_weights(stage: int) -> None:
    assert case.done(2)["averages", stage] == [[], []]


@case
def copied(stage: int) -> bool:
    """Copy and pickle the model inside full_params; the copy is plain and trains by
    itself."""
    net = models.toy(blocks=3)
    optimizer = sharded(net, stage)
    with optimizer.full_params():
        twin = copy.deepcopy(net)
        other = copy.deepcopy(twin)
    other.load_state_dict(twin.state_dict())
    plain = torch.optim.AdamW(twin.parameters())
    models.loss_of(twin, *models.batch(0)).backward()
    plain.step()
    before = len(optimizer.comm_log())
    twin(models.batch(0)[0])
    return len(optimizer.comm_log()) == before and all(
        type(p) is nn.Parameter for p in twin.parameters()
    )


@in_stages
def test_copies_are_plain_models(stage: int) -> None:
    assert case.done(2)["copied", stage] == [True, True]


@case(stages=(1, 2))
def copied_while_training(stage: int) -> tuple[list[str], list[str], int]:
    """Return what a step has changed in a copy, what in the model, and how many
    collectives a backward of the copy has started."""
    run = Run(stage, world())
    twin = copy.deepcopy(run.model)
    before = params_of(twin)
    run.backward(0)
    run.step()
    unchanged = differing(params_of(twin), before)
    calls = len(run.optimizer.comm_log())
    models.loss_of(twin, *models.batch(0)).backward()
    changed = differing(whole(run.model, run.optimizer), before)
    return unchanged, changed, len(run.optimizer.comm_log()) - calls


@in_stages_1_and_2
def test_a_copy_of_the_model_is_its_own(stage: int) -> None:
    """deepcopy, as for an average of weights: same values, no shared memory, no hooks
    of the optimizer."""
    for unchanged, changed, calls in case.done(2)["copied_while_training", stage]:
        assert unchanged == []
        assert changed != []
        assert calls == 0


def trained_alone() -> Run:
    """Return a run after one step in a world of one."""
    run = Run(1, 1)
    run.backward(0)
    run.step()
    return run


def test_a_copy_of_a_trained_model_can_be_trained() -> None:
    """Its gradients, if any, are copies too."""
    run = trained_alone()
    original = run.model
    trained = []
    for optimizer in (zerokern.AdamW, torch.optim.AdamW):
        twin = copy.deepcopy(original)
        updates = optimizer(twin.parameters(), eps=1e-3)
        run.model = twin
        run.backward(1)
        updates.step()
        trained.append(params_of(twin))
    assert apart(*trained) == {}
    assert differing(trained[0], params_of(original)) != []


def test_the_model_can_be_pickled() -> None:
    """torch.save(model) is what many scripts do."""
    run = trained_alone()
    run.optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(run.model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert differing(params_of(loaded), params_of(run.model)) == []
