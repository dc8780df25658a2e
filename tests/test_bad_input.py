"""Bad input: the error says the value, the rule and the remedy, and parameters and
state stay as they were."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import (
    STAGES,
    differing,
    rank,
    set_integer_gradients,
    sharded,
    state_of,
    whole,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerokern
from zerokern import ops

in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


def aliased() -> list[nn.Parameter]:
    """Return two parameters on one memory."""
    memory = torch.zeros(4)
    return [nn.Parameter(memory), nn.Parameter(memory)]


def not_a_leaf() -> list[torch.Tensor]:
    """Return a function of a parameter."""
    return [nn.Parameter(torch.ones(3)) * 2]


def twice() -> list[nn.Parameter]:
    """Return one parameter two times."""
    param = nn.Parameter(torch.ones(3))
    return [param, nn.Parameter(torch.ones(3)), param]


def group_twice() -> list[dict[str, Any]]:
    """Return one group two times."""
    group = {"params": [nn.Parameter(torch.ones(3))]}
    return [group, dict(group)]


def one() -> list[nn.Parameter]:
    """Return one good parameter."""
    return [nn.Parameter(torch.ones(3))]


def of(*tensors: torch.Tensor) -> list[nn.Parameter]:
    """Return parameters."""
    return [nn.Parameter(t) for t in tensors]


Make = Callable[[], Any]
REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "stage 0": (
        lambda: zerokern.AdamW(one(), stage=0),
        ValueError,
        r"stage=0.*1.*2.*3",
    ),
    "stage 4": (lambda: zerokern.AdamW(one(), stage=4), ValueError, r"stage=4"),
    "stage text": (lambda: zerokern.AdamW(one(), stage="2"), ValueError, r"stage='2'"),
    "stage None": (
        lambda: zerokern.AdamW(one(), stage=None),
        ValueError,
        r"stage=None",
    ),
    "stage 3 without model": (
        lambda: zerokern.AdamW(one(), stage=3),
        ValueError,
        r"pass model=model",
    ),
    "model that is none": (
        lambda: zerokern.AdamW(one(), stage=3, model="gpt"),
        TypeError,
        r"model=str.*Module",
    ),
    "empty list": (lambda: zerokern.AdamW([]), ValueError, r"empty.*model\.parameters"),
    "exhausted generator": (lambda: zerokern.AdamW(iter([])), ValueError, r"empty"),
    "all groups empty": (
        lambda: zerokern.AdamW([{"params": []}, {"params": []}]),
        ValueError,
        r"every parameter group is empty",
    ),
    "a tensor": (lambda: zerokern.AdamW(one()[0]), TypeError, r"single tensor.*list"),
    "numbers": (lambda: zerokern.AdamW([1, 2]), TypeError, r"int.*Parameter"),
    "several devices": (
        lambda: zerokern.AdamW([*one(), nn.Parameter(torch.empty(3, device="meta"))]),
        ValueError,
        r"several devices.*cpu.*meta.*one device",
    ),
    "parameter twice": (
        lambda: zerokern.AdamW(twice()),
        ValueError,
        r"parameter 0.*once",
    ),
    "group twice": (lambda: zerokern.AdamW(group_twice()), ValueError, r"once"),
    "aliased memory": (
        lambda: zerokern.AdamW(aliased()),
        ValueError,
        r"shares memory.*one Parameter",
    ),
    "not a leaf": (lambda: zerokern.AdamW(not_a_leaf()), ValueError, r"not a leaf"),
    "complex": (
        lambda: zerokern.AdamW(of(torch.zeros(3, dtype=torch.complex64))),
        TypeError,
        r"complex64.*float32",
    ),
    "float64": (
        lambda: zerokern.AdamW(of(torch.zeros(3, dtype=torch.float64))),
        TypeError,
        r"float64.*float32",
    ),
    "sparse parameter": (
        lambda: zerokern.AdamW([nn.Parameter(torch.eye(3).to_sparse())]),
        ValueError,
        r"sparse.*dense",
    ),
    "lr negative": (lambda: zerokern.AdamW(one(), lr=-1.0), ValueError, r"lr=-1\.0"),
    "lr NaN": (lambda: zerokern.AdamW(one(), lr=float("nan")), ValueError, r"lr=nan"),
    "lr of two numbers": (
        lambda: zerokern.AdamW(one(), lr=torch.ones(2)),
        ValueError,
        r"lr.*one number",
    ),
    "eps negative": (
        lambda: zerokern.AdamW(one(), eps=-1e-8),
        ValueError,
        r"eps=-1e-08",
    ),
    "weight decay negative": (
        lambda: zerokern.AdamW(one(), weight_decay=-0.1),
        ValueError,
        r"weight_decay=-0\.1",
    ),
    "beta 1": (
        lambda: zerokern.AdamW(one(), betas=(1.0, 0.9)),
        ValueError,
        r"betas\[0\]=1\.0",
    ),
    "beta negative": (
        lambda: zerokern.AdamW(one(), betas=(0.9, -0.1)),
        ValueError,
        r"betas\[1\]=-0\.1",
    ),
    "lr negative in a group": (
        lambda: zerokern.AdamW([{"params": one(), "lr": -2.0}]),
        ValueError,
        r"lr=-2\.0",
    ),
    "amsgrad in 8 bits": (
        lambda: zerokern.AdamW(
            one(), amsgrad=True, precision=zerokern.Precision(moments="8bit")
        ),
        ValueError,
        r"amsgrad=True.*8bit.*bf16",
    ),
    "amsgrad in one group": (
        lambda: zerokern.AdamW([{"params": one(), "amsgrad": True}, {"params": one()}]),
        ValueError,
        r"amsgrad differs.*\[True, False\]",
    ),
    "split master of fp16": (
        lambda: zerokern.AdamW(
            of(torch.zeros(3).half()), precision=zerokern.Precision(master="split32")
        ),
        ValueError,
        r"split32.*bfloat16.*\(3,\).*float16.*master='fp32'",
    ),
    "fp16 without a master": (
        lambda: zerokern.SGD(
            of(torch.zeros(3).half()), precision=zerokern.Precision(master="none")
        ),
        ValueError,
        r"'none'.*float16",
    ),
    "unknown master": (
        lambda: zerokern.Precision(master="split16"),
        ValueError,
        r"master='split16'.*'split32'",
    ),
    "unknown moments": (
        lambda: zerokern.Precision(moments="int8"),
        ValueError,
        r"moments='int8'.*'8bit'",
    ),
    "gradients of integers": (
        lambda: zerokern.Precision(gradients=torch.int8),
        ValueError,
        r"gradients=torch\.int8",
    ),
    "seed of no integer": (
        lambda: zerokern.Precision(seed=1.5),
        ValueError,
        r"seed=1\.5",
    ),
    "momentum negative": (
        lambda: zerokern.SGD(one(), momentum=-0.9),
        ValueError,
        r"momentum=-0\.9",
    ),
    "nesterov without momentum": (
        lambda: zerokern.SGD(one(), nesterov=True),
        ValueError,
        r"nesterov=True.*momentum",
    ),
    "nesterov with dampening": (
        lambda: zerokern.SGD(one(), momentum=0.9, dampening=0.1, nesterov=True),
        ValueError,
        r"dampening=0\.1",
    ),
    "beta of Lion": (
        lambda: zerokern.Lion(one(), betas=(0.9, 1.0)),
        ValueError,
        r"betas\[1\]=1\.0",
    ),
    "differentiable": (
        lambda: zerokern.AdamW(one(), differentiable=True),
        ValueError,
        r"differentiable=True",
    ),
    "max_grad_norm zero": (
        lambda: zerokern.AdamW(one(), max_grad_norm=0.0),
        ValueError,
        r"max_grad_norm=0\.0.*positive",
    ),
    "max_grad_norm NaN": (
        lambda: zerokern.AdamW(one(), max_grad_norm=float("nan")),
        ValueError,
        r"max_grad_norm=nan",
    ),
    "bucket of 0 bytes": (lambda: zerokern.Buckets(bytes=0), ValueError, r"bytes=0"),
    "wire of integers": (
        lambda: zerokern.Precision(wire=torch.int8),
        ValueError,
        r"wire=torch\.int8",
    ),
    "unknown option": (lambda: zerokern.AdamW(one(), bucket=3), TypeError, r"bucket"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_construction(name: str) -> None:
    """Value, rule, remedy."""
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3},
        {"stage": 7},
        {"lr": -1.0},
        {"differentiable": True},
        {"betas": (2.0, 0.0)},
    ],
    ids=str,
)
def test_a_refused_construction_leaves_the_model_as_it_was(
    options: dict[str, Any],
) -> None:
    """No hook, no flat buffer, no other values; an older optimizer goes on."""
    model = models.toy()
    older = zerokern.AdamW(model.parameters(), lr=1e-2)
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError):
        zerokern.AdamW(model.parameters(), **options)
    assert [p.data_ptr() for p in model.parameters()] == places
    models.loss_of(model, *models.batch(0)).backward()
    older.step()
    assert all(entry["step"] == 1 for entry in older.state_dict()["state"].values())


def test_stage3_parameters_must_be_of_the_model() -> None:
    def case() -> str:
        model = models.toy()
        with pytest.raises(ValueError, match="not in model") as error:
            zerokern.AdamW(
                [*model.parameters(), nn.Parameter(torch.ones(3))], stage=3, model=model
            )
        return str(error.value)

    assert ranks.run(2, case)[0].startswith("1 parameters")


class Forwarding(DistributedDataParallel):
    """As many projects have it: a wrapper that shows the module's own attributes."""


@in_stages
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, Forwarding])
def test_a_model_in_ddp_is_refused_until_it_is_out(
    stage: int, wrapper: type[nn.Module]
) -> None:
    def case() -> None:
        model = models.toy()
        wrapped: nn.Module | None = wrapper(model)
        for given in (model, wrapped):
            with pytest.raises(
                ValueError, match=r"wrapped in DistributedDataParallel.*ddp\.module"
            ):
                zerokern.AdamW(model.parameters(), stage=stage, model=given)
        wrapped = given = None
        optimizer = zerokern.AdamW(model.parameters(), stage=stage, model=model)
        model(torch.ones(2, 20, dtype=torch.int64)).sum().backward()
        optimizer.step()

    ranks.run(2, case)


def test_both_group_and_mesh_are_refused() -> None:
    def case() -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match="process_group and mesh"):
            zerokern.AdamW(one(), process_group=mesh.get_group(), mesh=mesh)

    ranks.run(2, case)


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    def case() -> None:
        mesh = torch.distributed.init_device_mesh(
            "cpu", (2, 1), mesh_dim_names=("dp", "tp")
        )
        with pytest.raises(ValueError, match=r"2 dimensions.*mesh\['dp'\]"):
            zerokern.AdamW(one(), mesh=mesh)

    ranks.run(2, case)


def test_a_group_without_this_rank_is_refused() -> None:
    def case() -> None:
        group = torch.distributed.new_group([0])
        if rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                zerokern.AdamW(one(), process_group=group)

    ranks.run(2, case)


# ------------------------------------------------------------ ranks that disagree (D28)


def _other_size(model: nn.Module) -> None:
    model.head = nn.Linear(17, 38)


def _other_name(model: nn.Module) -> None:
    model.tail = model.head
    del model.head


def _other_dtype(model: nn.Module) -> None:
    model.blocks[2].down.bfloat16()


def _one_more(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.ones(3))


def _one_frozen(model: nn.Module) -> None:
    model.blocks[1].norm.bias.requires_grad_(False)


def _reversed(params: list[Any]) -> list[Any]:
    return params[::-1]


def _two_groups(params: list[Any]) -> list[Any]:
    return [{"params": params[:5]}, {"params": params[5:]}]


DISAGREEMENTS: dict[
    str, tuple[Callable[[Any], None] | None, Any, dict[str, Any], str]
] = {
    "size": (_other_size, list, {}, r"head\.(weight|bias).*38"),
    "name": (_other_name, list, {}, r"tail\.weight"),
    "dtype": (_other_dtype, list, {}, r"blocks\.2\.down\.weight.*bfloat16"),
    "one more": (_one_more, list, {}, r"extra"),
    "frozen": (_one_frozen, list, {}, r"blocks\.1\.norm\.bias.*frozen"),
    "order": (None, _reversed, {}, r"parameter 0"),
    "groups": (None, _two_groups, {}, r"param group"),
    "bucket size": (None, list, {"buckets": zerokern.Buckets(bytes=100)}, r"bucket 0"),
}


def _disagree(stage: int, name: str) -> tuple[str, bool]:
    change, arrange, options, _ = DISAGREEMENTS[name]
    model = models.toy()
    if rank() != 1:
        change, arrange, options = None, list, {}
    if change:
        change(model)
    params = arrange(list(model.named_parameters()))
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    try:
        sharded(model, stage, params, **options)
    except ValueError as error:
        return str(error), before == {
            n: p.data_ptr() for n, p in model.named_parameters()
        }
    return "", False


CASES = {
    (s, n): lambda s=s, n=n: _disagree(s, n)
    for s in STAGES
    for n in DISAGREEMENTS
    if (s, n)
    # Stage 3 takes the model's order, and units.
    not in (
        (3, "order"),
        (3, "bucket size"),
    )
}
_answers: list[ranks.Cases] = []


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_ranks_that_disagree_get_one_error_on_all(stage: int, name: str) -> None:
    """It names the first difference and the rank; nothing was changed, and nobody
    hangs."""
    if not _answers:
        _answers.append(ranks.run_cases(3, CASES))
    for message, untouched in _answers[0][stage, name]:
        assert "Rank 1 has" in message
        assert re.search(DISAGREEMENTS[name][3], message)
        assert untouched


def test_after_a_disagreement_the_ranks_can_build_and_train() -> None:
    def case() -> list[str]:
        model = models.toy()
        with pytest.raises(ValueError, match="different models"):
            zerokern.AdamW(
                model.parameters() if rank() else list(model.parameters())[1:]
            )
        optimizer = zerokern.AdamW(model.parameters())
        before = whole(model, optimizer)
        set_integer_gradients(model, 0)
        optimizer.step()
        return differing(whole(model, optimizer), before)

    assert all(ranks.run(2, case))


# ---------------------------------------------------------------------- while training


def unchanged_by(
    error: type[Exception], match: str, misuse: Callable[[nn.Module, Any], Any]
) -> None:
    """Assert that a misuse raises, that nothing changed, and that the next step is
    right."""
    model, twin = models.toy(), models.toy()
    optimizer, plain = (
        zerokern.AdamW(model.parameters(), lr=1e-2),
        zerokern.AdamW(twin.parameters(), lr=1e-2),
    )
    for m, o in ((model, optimizer), (twin, plain)):
        set_integer_gradients(m, 0)
        o.step()
        o.zero_grad()
    with pytest.raises(error, match=match):
        misuse(model, optimizer)
    assert (
        differing(
            whole(model, optimizer) | state_of(model, optimizer),
            whole(twin, plain) | state_of(twin, plain),
        )
        == []
    )
    for m, o in ((model, optimizer), (twin, plain)):
        o.zero_grad()
        set_integer_gradients(m, 1)
        o.step()
    assert (
        differing(
            whole(model, optimizer) | state_of(model, optimizer),
            whole(twin, plain) | state_of(twin, plain),
        )
        == []
    )


def test_a_closure_without_a_loss() -> None:
    def misuse(model: nn.Module, optimizer: Any) -> None:
        optimizer.step(lambda: set_integer_gradients(model, 5))

    unchanged_by(TypeError, r"NoneType.*return the loss", misuse)


def test_a_closure_that_raises() -> None:
    def misuse(model: nn.Module, optimizer: Any) -> None:
        set_integer_gradients(model, 5)
        optimizer.step(lambda: 1 / 0)

    unchanged_by(ZeroDivisionError, "division", misuse)


def test_an_infinity_norm() -> None:
    unchanged_by(
        ValueError,
        r"norm_type inf.*2\.0",
        lambda model, optimizer: optimizer.clip_grad_norm_(1.0, float("inf")),
    )


@pytest.mark.parametrize("bound", [-1.0, float("nan")])
def test_a_negative_bound(bound: float) -> None:
    unchanged_by(
        ValueError,
        r"max_norm",
        lambda model, optimizer: optimizer.clip_grad_norm_(bound),
    )


def test_a_late_group() -> None:
    unchanged_by(
        ValueError,
        r"add_param_group.*construction.*new optimizer",
        lambda model, optimizer: optimizer.add_param_group({"params": one()}),
    )


def test_a_parameter_that_was_moved_away() -> None:
    """D33: the optimizer would train memory that nobody reads."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    set_integer_gradients(model, 0)
    model.head.weight.data = model.head.weight.data.clone()
    with pytest.raises(
        RuntimeError, match=r"head\.weight|parameter .* no longer lives"
    ):
        optimizer.step()


@in_stages
def test_a_sparse_gradient(stage: int) -> None:
    """It names the parameter and the remedy; the next dense step is right."""

    def case() -> list[str]:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))

        model, twin = build(), build()
        optimizer, plain = (
            sharded(model, stage, model.named_parameters()),
            sharded(twin, stage),
        )
        with pytest.raises(TypeError, match=r"0\.weight.*sparse.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.zero_grad()
        model[0].sparse = twin[0].sparse = False
        for m, o in ((model, optimizer), (twin, plain)):
            m(torch.tensor([1, 2 + rank()])).square().sum().backward()
            o.step()
        return differing(whole(model, optimizer), whole(twin, plain))

    assert ranks.run(2, case) == [[], []]


def test_a_sparse_gradient_set_by_hand() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = zerokern.AdamW(model.parameters())
    before = model.weight.detach().clone()
    model.weight.grad = torch.sparse_coo_tensor(
        [[1]], torch.ones(1, 4), (10, 4), check_invariants=True
    )
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_torch_clipping_works_or_says_what_to_call() -> None:
    """E9: torch's own clip_grad_norm_ must not be a silent no-op on reduced
    gradients."""

    def case() -> bool:
        results = []
        for clip in ("torch", "ours"):
            model = models.toy()
            optimizer = zerokern.AdamW(
                model.parameters(), stage=2, weight_decay=0.0, betas=(0.0, 0.0), eps=1.0
            )
            models.loss_of(model, *models.batch(0)).backward()
            try:
                norm = (
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                    if clip == "torch"
                    else optimizer.clip_grad_norm_(1e-3)
                )
            except RuntimeError as error:
                return "clip_grad_norm_" in str(error) or "memory" in str(error)
            optimizer.step()
            results.append((float(norm), whole(model, optimizer)))
        return (
            results[0][0] == pytest.approx(results[1][0])
            and differing(results[0][1], results[1][1]) == []
        )

    assert ranks.run(2, case) == [True, True]


# ----------------------------------------------- stage 3: parameters that are not there


def _sharded_model() -> tuple[nn.Module, Any]:
    model = models.toy().bfloat16()
    return model, sharded(model, 3, lr=1e-2)


def _state_dict_outside() -> tuple[str, str, list[str]]:
    """G25, C15: never silent placeholders."""
    model, optimizer = _sharded_model()
    with pytest.raises(RuntimeError, match=r"full_params") as reading:
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"full_params") as loading:
        model.load_state_dict(models.toy(seed=1).bfloat16().state_dict())
    with optimizer.full_params():
        inside = model.state_dict()
    assert list(inside) == list(models.toy().state_dict())
    return (
        str(reading.value),
        str(loading.value),
        differing(
            whole(model, optimizer), dict(models.toy().bfloat16().named_parameters())
        ),
    )


def _edit(*, fails: bool) -> tuple[list[str], list[str], int]:
    """C1, C4: edits are kept, in the masters too, unless the body raises; the memory
    goes back; the next step works."""
    model, optimizer = _sharded_model()
    set_integer_gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = whole(model, optimizer) | state_of(model, optimizer)
    try:
        with optimizer.full_params(), torch.no_grad():
            model.head.bias.fill_(3.0)
            model.blocks[1].up.weight.mul_(2.0)
            if fails:
                raise KeyError("by the user")
    except KeyError:
        assert fails
    changed = differing(whole(model, optimizer) | state_of(model, optimizer), before)
    scratch = optimizer.memory().buffers
    twice = whole(model, optimizer)
    set_integer_gradients(model, 1)
    optimizer.step()
    return changed, differing(whole(model, optimizer), twice), scratch


def _nested() -> list[str]:
    model, optimizer = _sharded_model()
    before = whole(model, optimizer)
    with optimizer.full_params():
        with optimizer.full_params():
            pass
        inside = {name: p.detach().clone() for name, p in model.named_parameters()}
    return differing(inside, before)


def _forward_inside() -> tuple[bool, int]:
    """Evaluation of a gathered model."""
    model, optimizer = _sharded_model()
    with torch.no_grad():
        outside = model(models.batch(0)[0])
        with optimizer.full_params():
            inside = model(models.batch(0)[0])
            again = model(models.batch(0)[0])
    return (
        torch.equal(outside, inside) and torch.equal(inside, again),
        optimizer.memory().buffers,
    )


def _load_inside() -> list[str]:
    model, optimizer = _sharded_model()
    source = models.toy(seed=1).bfloat16()
    with optimizer.full_params():
        model.load_state_dict(source.state_dict())
    return differing(whole(model, optimizer), dict(source.named_parameters()))


STAGE3: dict[str, Callable[[], Any]] = {
    "state_dict": _state_dict_outside,
    "edit": lambda: _edit(fails=False),
    "failed edit": lambda: _edit(fails=True),
    "nested": _nested,
    "forward": _forward_inside,
    "load": _load_inside,
}
_stage3: list[ranks.Cases] = []


@pytest.fixture
def stage3() -> ranks.Cases:
    """All cases of stage 3 in a world of 2."""
    if not _stage3:
        _stage3.append(ranks.run_cases(2, STAGE3))
    return _stage3[0]


def test_state_dict_of_a_sharded_model_is_refused_outside_of_full_params(
    stage3: ranks.Cases,
) -> None:
    for reading, loading, changed in stage3["state_dict"]:
        assert "with optimizer.full_params()" in reading
        assert "with optimizer.full_params()" in loading
        assert changed == []


EDITED = [
    "blocks.1.up.weight",
    "blocks.1.up.weight/master",
    "head.bias",
    "head.bias/master",
]


def test_edits_inside_full_params_are_kept(stage3: ranks.Cases) -> None:
    for changed, trained, scratch in stage3["edit"]:
        assert changed == EDITED
        assert trained != []
        assert scratch == 0


def test_edits_are_dropped_when_the_body_raises(stage3: ranks.Cases) -> None:
    for changed, trained, scratch in stage3["failed edit"]:
        assert changed == []
        assert trained != []
        assert scratch == 0


def test_full_params_can_be_nested(stage3: ranks.Cases) -> None:
    assert stage3["nested"] == [[], []]


def test_a_forward_inside_full_params(stage3: ranks.Cases) -> None:
    assert stage3["forward"] == [(True, 0)] * 2


def test_a_checkpoint_is_loaded_inside_full_params(stage3: ranks.Cases) -> None:
    assert stage3["load"] == [[], []]


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
@pytest.mark.parametrize("fails", (False, True), ids=["returns", "raises"])
def test_edits_inside_full_params_are_kept_in_stages_1_and_2(
    stage: int, fails: bool
) -> None:
    """The model is edited in place there; the master weights follow, whatever became of
    the body."""

    def case() -> list[str]:
        model = models.toy().bfloat16()
        optimizer = sharded(model, stage)
        before = whole(model, optimizer) | state_of(model, optimizer)
        try:
            with optimizer.full_params(), torch.no_grad():
                model.head.bias.fill_(3.0)
                if fails:
                    raise KeyError("by the user")
        except KeyError:
            assert fails
        return differing(whole(model, optimizer) | state_of(model, optimizer), before)

    assert ranks.run(2, case) == [["head.bias", "head.bias/master"]] * 2


# ---------------------------------------------------------------------- kernels


SCRIPT = """
import torch
from zerokern import ops
out = torch.zeros(64)
try:
    ops.cast_(out, torch.ones(64), backend="triton")
except ValueError as error:
    assert not out.any()
    print(error)
"""


def test_triton_on_a_cpu_tensor_outside_the_interpreter() -> None:
    environment = {
        key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
        check=True,
    )
    assert "backend 'triton'" in done.stdout
    assert "TRITON_INTERPRET=1" in done.stdout


def test_an_unknown_backend_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROKERN_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"ZEROKERN_BACKEND is 'cuda'.*auto"):
        ops.cast_(torch.zeros(64), torch.zeros(64))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ops.cast_(torch.zeros(64), torch.zeros(65)), ValueError),
        (
            lambda: ops.cast_(torch.zeros(64), torch.zeros(64, dtype=torch.int32)),
            TypeError,
        ),
        (lambda: ops.cast_(torch.zeros(128)[::2], torch.zeros(64)), ValueError),
        (lambda: ops.pack_([torch.zeros(3)], []), ValueError),
        (lambda: ops.pack_([torch.zeros(3)], [torch.zeros(4)]), ValueError),
        (
            lambda: ops.pack_([torch.zeros(3)], [torch.zeros(3, device="meta")]),
            ValueError,
        ),
        (
            lambda: ops.pack_([torch.zeros(3)], [torch.zeros(3, dtype=torch.int64)]),
            TypeError,
        ),
    ],
    ids=["sizes", "dtype", "strided", "lengths", "shapes", "devices", "integers"],
)
def test_ops_refuse_what_does_not_fit(call: Make, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"cast_|pack_"):
        call()
