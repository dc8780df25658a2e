"""Faults that users of sharded training have met with parameters: gathered, edited,
tied, frozen, grouped, odd."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch._dynamo  # an optimizer imports it: here, before ranks are forked
import torch.distributed as dist
from oracle import (
    STAGES,
    Run,
    apart,
    differing,
    integer_gradient,
    rank,
    set_integer_gradients,
    sharded,
    state_of,
    whole,
    world,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import lr_scheduler

import zerokern
from zerokern.sharding.sharded import ShardedParameters

WORLDS = (1, 2, 3)
CASES: dict[str, Callable[[int], Any]] = {}
at_worlds = pytest.mark.parametrize("at", ranks.worlds(1, 2, rarely=3))
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """Register what every rank does in a stage."""
    CASES[function.__name__] = function
    return function


@functools.cache
def done(at: int) -> ranks.Cases:
    """Run all cases in all stages on one group of ranks."""
    return ranks.run_cases(
        at, {(n, s): functools.partial(f, s) for n, f in CASES.items() for s in STAGES}
    )


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return parameters and state."""
    return whole(model, optimizer) | state_of(model, optimizer)


def step_by_hand(model: nn.Module, optimizer: Any, step: int) -> None:
    """Take one step on integer gradients, whose sums are exact in any world."""
    optimizer.zero_grad()
    set_integer_gradients(model, step)
    optimizer.step()


def train_shares(model: nn.Module, optimizer: Any, steps: range, of: int) -> None:
    """Train on this rank's share of each batch; with torch's optimizer, on the shares
    of `of` ranks in turn."""
    ours = isinstance(optimizer, zerokern.AdamW)
    for step in steps:
        optimizer.zero_grad()
        for r in [rank()] if ours else range(of):
            loss = models.loss_of(
                model, *(models.share(t, r, of) for t in models.batch(step))
            )
            (loss if ours else loss / of).backward()
        optimizer.step()


@contextmanager
def gathered(optimizer: Any) -> Iterator[None]:
    """Have the parameters whole, of torch's optimizer too."""
    with (
        optimizer.full_params() if hasattr(optimizer, "full_params") else nullcontext()
    ):
        yield


# ---------------------------------------------------------- C: gathered, and given back


def gathered_bytes(optimizer: Any) -> int:
    """Return the bytes of the buffers that hold whole parameters, counted from their
    storages and not on a ledger."""
    store = optimizer.coordinator.parameters
    if isinstance(store, ShardedParameters):
        units = store.units.values()
        wholes = [bucket.whole for unit in units for bucket in unit.buckets]
        return sum(whole.nbytes for whole in wholes if whole is not None)
    return sum(flat.untyped_storage().nbytes() for flat in store.memory())


@case
def held_after_each_use(stage: int) -> dict[str, tuple[int, int]]:
    """C1, C8: whatever makes parameters whole gives the memory back at once."""
    model = models.toy()
    optimizer = sharded(model, stage)
    tokens, targets = models.batch(0)
    found: dict[str, tuple[int, int]] = {}

    def note(name: str) -> None:
        found[name] = gathered_bytes(optimizer), optimizer.memory().buffers

    note("built")
    with optimizer.full_params():
        sum(p.sum() for p in model.parameters())
    note("read")
    with optimizer.full_params(), optimizer.full_params():
        pass
    note("nested")
    model.eval()
    with torch.no_grad():
        model(tokens)
        note("no_grad")
        model.blocks[1](torch.ones(2, 17))
        note("one block")
    with torch.inference_mode():
        model(tokens)
    note("inference_mode")
    model(tokens)
    note("graph dropped")
    model.train()
    for name in ("trained", "trained after evaluation"):
        optimizer.zero_grad()
        models.loss_of(model, tokens, targets).backward()
        note(f"{name}: backward")
        optimizer.step()
        note(name)
    return found


@at_worlds
@in_stages
def test_gathered_memory_is_given_back_at_once(stage: int, at: int) -> None:
    payload = 4 * sum(p.numel() for p in models.toy().parameters())
    for found in done(at)["held_after_each_use", stage]:
        if stage == 3 and at > 1:
            assert set(found.values()) == {(0, 0)}
        else:
            assert {scratch for _, scratch in found.values()} == {0}
            assert len(set(found.values())) == 1 and found["built"][0] >= payload


def _trained_between_evaluations(stage: int | None, of: int) -> dict[str, Tensor]:
    run = Run(stage, of, build=models.toy)
    for step in range(3):
        with torch.inference_mode():
            run.model(models.batch(20 + step)[0])
        run.optimizer.zero_grad()
        run.backward(step)
        with torch.inference_mode():
            run.model(models.batch(30 + step)[0])
        run.step()
    return whole(run.model, run.optimizer)


@case
def inference_mode_between_steps(stage: int) -> dict[str, Tensor]:
    return _trained_between_evaluations(stage, world())


@at_worlds
@in_stages
def test_inference_mode_leaves_training_as_it_was(stage: int, at: int) -> None:
    """C8: nothing that was made in inference mode comes into a graph."""
    expected = _trained_between_evaluations(None, at)
    for result in done(at)["inference_mode_between_steps", stage]:
        assert apart(result, expected) == {}


# --------------------------------------------------- C3: ranks that do not gather alike


def _one_rank_gathers(stage: int) -> tuple[int, list[str]]:
    model, twin = models.toy(), models.toy()
    optimizer, plain = sharded(model, stage, lr=1e-2), sharded(twin, stage, lr=1e-2)
    calls = len(optimizer.comm_log())
    if rank() == 0:
        whole(model, optimizer)
    calls = len(optimizer.comm_log()) - calls
    for m, o in ((model, optimizer), (twin, plain)):
        step_by_hand(m, o, 0)
    return calls, differing(whole(model, optimizer), whole(twin, plain))


@pytest.mark.parametrize("stage", (1, 2), ids="stage{}".format)
def test_one_rank_may_look_at_parameters_that_every_rank_has(stage: int) -> None:
    """C3: stages 1 and 2 send nothing for it."""
    assert ranks.run(2, _one_rank_gathers, stage) == [(0, [])] * 2


def _skips_the_gather(model: nn.Module, optimizer: Any) -> None:
    if rank() == 0:
        whole(model, optimizer)
    step_by_hand(model, optimizer, 0)


def _gathers_once_more(model: nn.Module, optimizer: Any) -> None:
    for _ in range(1 + rank()):
        whole(model, optimizer)
    models.loss_of(model, *models.batch(0)).backward()
    optimizer.step()


def _error_of(mismatch: Callable[[nn.Module, Any], None]) -> str:
    model = models.toy()
    group = dist.new_group(timeout=timedelta(seconds=3))
    optimizer = sharded(model, 3, process_group=group)
    with pytest.raises(RuntimeError) as error:
        mismatch(model, optimizer)
    return str(error.value)


@pytest.mark.parametrize(
    "mismatch",
    [_skips_the_gather, _gathers_once_more],
    ids=lambda f: f.__name__.strip("_"),
)
def test_ranks_that_do_not_gather_alike_are_told_so(
    mismatch: Callable[[nn.Module, Any], None],
) -> None:
    """C3: not a hang, and no rank takes another buffer for the one that it waits
    for."""
    for message in ranks.run(2, _error_of, mismatch):
        assert "did not complete: another rank never took part in it" in message
        assert "all_gather of" in message or "reduce_scatter of" in message


# --------------------------------------------------- C4: the body of full_params raises


def _failing_body(
    stage: int, failing: Callable[[int], bool], *, enter: bool = True
) -> dict[str, Any]:
    model = models.toy().bfloat16()
    optimizer = sharded(model, stage, lr=1e-2)
    step_by_hand(model, optimizer, 0)
    before = everything(model, optimizer)
    error: BaseException | None = None
    if enter:
        try:
            with optimizer.full_params():
                model.head.bias.fill_(3.0)
                model.blocks[1].up.weight.mul_(2.0)
                if failing(rank()):
                    raise KeyError("by the user")
        except (KeyError, RuntimeError) as raised:
            error = raised
    after = everything(model, optimizer)
    step_by_hand(model, optimizer, 1)
    return {
        "error": f"{type(error).__name__}: {error}",
        "changed": differing(after, before),
        "scratch": optimizer.memory().buffers,
        "next": everything(model, optimizer),
    }


FAILING: dict[str, Callable[[int], bool]] = {
    "all ranks": lambda r: True,
    "rank 0": lambda r: r == 0,
    "the last rank": lambda r: r == world() - 1,
}
EDITED = [
    "blocks.1.up.weight",
    "blocks.1.up.weight/master",
    "head.bias",
    "head.bias/master",
]


@case
def failing_bodies(stage: int) -> dict[str, dict[str, Any]]:
    return {who: _failing_body(stage, failing) for who, failing in FAILING.items()}


@case
def never_entered(stage: int) -> dict[str, Any]:
    return _failing_body(stage, lambda r: False, enter=False)


@case
def edited_without_a_failure(stage: int) -> dict[str, Any]:
    return _failing_body(stage, lambda r: False)


@at_worlds
@in_stages
@pytest.mark.parametrize("who", FAILING)
def test_a_body_of_full_params_that_raises(who: str, stage: int, at: int) -> None:
    """C4: the exception comes through; parameters are what they were on every rank,
    also where the body went well.

    Stages 1 and 2 gather nothing: the user's code has edited the model itself, and the
    edits stand on every rank.
    """
    sharded_parameters = stage == 3 and at > 1
    twin = "never_entered" if sharded_parameters else "edited_without_a_failure"
    for r, (results, expected) in enumerate(
        zip(done(at)["failing_bodies", stage], done(at)[twin, stage], strict=True)
    ):
        result = results[who]
        raised = {"all ranks": True, "rank 0": r == 0, "the last rank": r == at - 1}[
            who
        ]
        if raised:
            assert result["error"] == "KeyError: 'by the user'"
        elif sharded_parameters:
            assert (
                result["error"].startswith("RuntimeError")
                and "full_params" in result["error"]
            )
        assert result["changed"] == ([] if sharded_parameters else EDITED)
        assert result["scratch"] == 0
        assert differing(result["next"], expected["next"]) == []


@case
def data_replaced_inside(stage: int) -> str:
    """`p.data = ...` instead of a copy: the flat buffer does not learn of it."""
    model = models.toy()
    optimizer = sharded(model, stage, model.named_parameters())
    with pytest.raises(RuntimeError) as error:
        with optimizer.full_params():
            model.head.weight.data = torch.ones_like(model.head.weight)
        step_by_hand(model, optimizer, 0)
    return str(error.value)


@at_worlds
@in_stages
def test_data_replaced_inside_full_params_is_refused_by_name(
    stage: int, at: int
) -> None:
    """C7, D33: never a write that is lost in silence."""
    for message in done(at)["data_replaced_inside", stage]:
        assert "head.weight" in message


# -------------------------------------------------------------- C7: a resized embedding


def _resized(stage: int | None, of: int, *, tied: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = models.Toy(blocks=2, tied=tied)
    make: Any = functools.partial(torch.optim.AdamW, lr=1e-2)
    if stage is not None:
        make = functools.partial(sharded, model, stage, lr=1e-2)
    optimizer = make(model.parameters() if stage is None else None)
    train_shares(model, optimizer, range(2), of)
    with gathered(optimizer):
        larger = nn.Embedding(45, 17)
        with torch.no_grad():
            larger.weight.copy_(torch.linspace(-1, 1, 45 * 17).view(45, 17))
            larger.weight[: models.VOCABULARY] = model.embedding.weight
        model.embedding = larger
        if tied:
            model.head.weight, model.head.out_features = larger.weight, 45
    optimizer = make(model.parameters() if stage is None else None)
    # Up to the new rows.
    model.register_forward_pre_hook(lambda module, args: (args[0] + 8,))
    train_shares(model, optimizer, range(2, 4), of)
    return {"params": whole(model, optimizer), "state": state_of(model, optimizer)}


@case
def resized(stage: int) -> list[dict[str, Any]]:
    return [_resized(stage, world(), tied=tied) for tied in (False, True)]


@at_worlds
@in_stages
@pytest.mark.parametrize("tied", (False, True), ids=["untied", "tied"])
def test_a_resized_embedding_is_trained_by_a_new_optimizer(
    tied: bool, stage: int, at: int
) -> None:
    """C7: which takes the parameters over."""
    expected = _resized(None, at, tied=tied)
    for results in done(at)["resized", stage]:
        result = results[tied]
        assert (
            result["params"]["embedding.weight"].shape
            == result["state"]["embedding.weight/exp_avg"].shape
            == (45, 17)
        )
        assert apart(result["params"], expected["params"]) == {}


# --------------------------------------------- C14, C15, D1, D2: the model's state dict


class Buffered(nn.Module):
    """Buffers of several kinds, a weight in two places, a module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 17)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False] * 8 + [True]))
        self.register_buffer("scale", torch.full((17,), 0.5), persistent=False)
        self.register_buffer("nothing", None)
        self.blocks = nn.ModuleList(models.Block() for _ in range(2))
        self.shared = self.blocks[0].norm
        self.temperatures = nn.ParameterList([torch.tensor(1.5), torch.ones(3)])
        self.head = nn.Linear(17, models.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        x = self.embedding(tokens) * self.mask * self.scale
        for block in self.blocks:
            x = block(x)
        return (
            self.head(self.shared(x)) * self.temperatures[0]
            + self.temperatures[1].mean()
        )


def buffered(seed: int) -> Buffered:
    torch.manual_seed(seed)
    return Buffered()


def described(state: dict[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    """Return keys in order, dtypes, shapes."""
    return [(key, value.dtype, value.shape) for key, value in state.items()]


@case
def saved_and_loaded(stage: int) -> dict[str, Any]:
    model = buffered(0)
    optimizer = sharded(model, stage, lr=1e-2)
    train_shares(model, optimizer, range(2), world())
    with optimizer.full_params():
        saved = {key: value.clone() for key, value in model.state_dict().items()}
    plain, other = buffered(1), buffered(2)
    plain.load_state_dict(saved, strict=True)
    theirs = sharded(other, stage, lr=1e-2)
    with theirs.full_params():
        other.load_state_dict(saved, strict=True)
    tokens, _ = models.batch(9)
    with torch.no_grad():
        outputs = [m(tokens) for m in (model, plain, other)]
    return {
        "described": described(saved),
        "buffers": {
            key: value for key, value in saved.items() if key in ("count", "mask")
        },
        "outputs equal": [torch.equal(output, outputs[0]) for output in outputs],
        "differing": differing(whole(other, theirs), whole(model, optimizer)),
    }


@at_worlds
@in_stages
def test_the_state_dict_is_that_of_a_plain_model(stage: int, at: int) -> None:
    """C14, C15, D1: keys and their order, dtypes and shapes; it loads strictly into a
    plain model and a sharded one."""
    for result in done(at)["saved_and_loaded", stage]:
        assert result["described"] == described(buffered(0).state_dict())
        assert result["buffers"]["count"] == 2
        assert torch.equal(result["buffers"]["mask"], buffered(0).mask)
        assert result["outputs equal"] == [True] * 3
        assert result["differing"] == []


def _exported(stage: int, folder: Path) -> dict[str, Tensor]:
    import safetensors.torch

    model = buffered(0)
    optimizer = sharded(model, stage, lr=1e-2)
    train_shares(model, optimizer, range(2), world())
    with optimizer.full_params():
        if rank() == world() - 1:
            safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return whole(model, optimizer)


@at_worlds
@in_stages
def test_safetensors_exports_tied_weights(stage: int, at: int, tmp_path: Path) -> None:
    """D1, D2: stored once, and both names are there after a strict load into a plain
    model."""
    safetensors = pytest.importorskip("safetensors.torch")
    trained = ranks.run(at, _exported, stage, tmp_path)[0]
    plain = buffered(3)
    missing, unexpected = safetensors.load_model(
        plain, str(tmp_path / "model.safetensors"), strict=True
    )
    assert (set(missing), unexpected) == (set(), [])
    assert plain.head.weight is plain.embedding.weight
    assert (
        differing({n: p.detach() for n, p in plain.named_parameters()}, trained) == []
    )
    # The tied weight is in the file once: no more bytes than there are.
    payload = sum(value.nbytes for value in trained.values())
    assert (tmp_path / "model.safetensors").stat().st_size < payload + 4096


def _kept_after_full_params(stage: int) -> dict[str, Any]:
    """Use a state dict where most scripts do: after the context has ended."""
    model = buffered(0)
    optimizer = sharded(model, stage, lr=1e-2)
    train_shares(model, optimizer, range(2), world())
    with optimizer.full_params():
        saved = model.state_dict()
    file, plain = io.BytesIO(), buffered(1)
    torch.save(saved, file)
    plain.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    read = {name: saved[name].clone() for name, _ in model.named_parameters()}
    loaded = {name: p.detach() for name, p in plain.named_parameters()}
    return {
        "read": read,
        "loaded": loaded,
        "expected": whole(model, optimizer),
        "scratch": optimizer.memory().buffers,
    }


@pytest.mark.parametrize("at", (1, 2), ids="world{}".format)
@in_stages
def test_a_state_dict_outlives_full_params(stage: int, at: int) -> None:
    """D1, C1: its memory may go back only if nobody can read it any more; it was a
    crash of the process."""
    for result in ranks.run(at, _kept_after_full_params, stage):
        assert differing(result["read"], result["expected"]) == []
        assert differing(result["loaded"], result["expected"]) == []
        assert result["scratch"] == 0


# --------------------------------------- D7, D11, D13, D19, D20, D24, D27: save, resume


def half_frozen(seed: int) -> nn.Module:
    """D7: half of the parameters frozen, far from where any initialisation puts
    them."""
    model = models.toy(seed)
    for param in list(model.parameters())[::2]:
        param.requires_grad_(False)
        param.data.mul_(1.0 + seed).add_(0.25 + seed)
    return model


class Odd(nn.Module):
    """Terms of all shapes, layouts and dtypes in one unit."""

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self.units = nn.ModuleList(
            [nn.ParameterDict({f"p{i}": nn.Parameter(v) for i, v in enumerate(values)})]
        )


SHAPES = ((8, 128), (), (3,), (0, 4), (7,), (13,), (1,), (3, 65))


def odd_shapes(seed: int) -> nn.Module:
    """D19, D27, D35: a scalar, (8, 128), nothing, and sizes that neither 8 nor the
    world divides."""
    torch.manual_seed(seed)
    return Odd(*(torch.randn(shape) for shape in SHAPES))


def not_contiguous(seed: int) -> nn.Module:
    """D20: column-major, channels last, three dimensions in another order."""
    torch.manual_seed(seed)
    return Odd(
        torch.randn(6, 7).T,
        torch.randn(5, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.randn(3, 5, 7).permute(2, 0, 1),
        torch.randn(11, 3),
    )


def three_dtypes(seed: int) -> nn.Module:
    """D11: fp32, bf16 and fp16 in one unit."""
    torch.manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return Odd(
        *(torch.randn(shape).to(dtypes[i % 3]) for i, shape in enumerate(SHAPES))
    )


def nothing_in_a_dtype(seed: int) -> nn.Module:
    """D24: a bucket without an element."""
    torch.manual_seed(seed)
    return Odd(
        torch.randn(0, 4, dtype=torch.bfloat16),
        torch.randn(3),
        torch.randn(0, dtype=torch.float16),
    )


SAVED = {
    m.__name__: m
    for m in (half_frozen, odd_shapes, not_contiguous, three_dtypes, nothing_in_a_dtype)
}
of_saved = pytest.mark.parametrize("name", SAVED)
SAVED_AT = 3


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """An empty group, then two that take alternate parameters (D13, D15)."""
    params = list(model.parameters())
    return [
        {"params": []},
        {"params": params[::2], "weight_decay": 0.2},
        {"params": params[1::2], "lr": 3e-3},
    ]


def _uninterrupted(name: str) -> dict[str, Tensor]:
    model = SAVED[name](0)
    optimizer = zerokern.AdamW(grouped(model), lr=1e-2)
    for step in range(4):
        step_by_hand(model, optimizer, step)
    return everything(model, optimizer)


def _save(name: str, stage: int) -> dict[str, Any]:
    model = SAVED[name](0)
    optimizer = sharded(model, stage, grouped(model), lr=1e-2)
    for step in range(2):
        step_by_hand(model, optimizer, step)
    file = io.BytesIO()
    with optimizer.full_params():
        strides = {n: p.stride() for n, p in model.named_parameters()}
        saved_model = model.state_dict()
        torch.save(
            {"model": saved_model, "optimizer": optimizer.full_state_dict()}, file
        )
    return {
        "file": file.getvalue(),
        "strides": strides,
        "grad": [p.grad is None for p in model.parameters()],
    }


def _resume(name: str, stage: int, file: bytes) -> dict[str, Tensor]:
    saved = torch.load(io.BytesIO(file), weights_only=True)
    model = SAVED[name](7)
    optimizer = sharded(model, stage, grouped(model), lr=9.0)
    with optimizer.full_params():
        model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(2, 4):
        step_by_hand(model, optimizer, step)
    return everything(model, optimizer)


@functools.cache
def saves() -> ranks.Cases:
    """Train two steps and save."""
    return ranks.run_cases(
        SAVED_AT,
        {(n, s): functools.partial(_save, n, s) for n in SAVED for s in STAGES},
    )


@functools.cache
def resumed(at: int) -> ranks.Cases:
    """Load in new processes, which start from other values, and train two steps
    more."""
    cases = {
        (n, s): functools.partial(_resume, n, s, saves()[n, s][0]["file"])
        for n in SAVED
        for s in STAGES
    }
    return ranks.run_cases(at, cases)


@at_worlds
@in_stages
@of_saved
def test_what_was_saved_resumes_to_the_bit(name: str, stage: int, at: int) -> None:
    """D7, D11, D19, D20, D24, D27: saved in a world of 3, resumed in any, it is a run
    that was never interrupted."""
    expected = _uninterrupted(name)
    for result in resumed(at)[name, stage]:
        assert differing(result, expected) == []


@in_stages
@of_saved
def test_strides_stay_where_parameters_are_whole(name: str, stage: int) -> None:
    """D20."""
    expected = {n: p.stride() for n, p in SAVED[name](0).named_parameters()}
    assert [result["strides"] for result in saves()[name, stage]] == [
        expected
    ] * SAVED_AT


@in_stages
def test_frozen_parameters_have_no_gradient(stage: int) -> None:
    expected = [not p.requires_grad for p in half_frozen(0).parameters()]
    for result in saves()["half_frozen", stage]:
        assert [
            is_none or not frozen
            for is_none, frozen in zip(result["grad"], expected, strict=True)
        ] == [True] * len(expected)


@of_saved
def test_an_uninterrupted_run_is_torchs(name: str) -> None:
    """What the others are compared with: values and moments in the order of the
    parameter's own indices.

    torch trains 16-bit parameters without masters, so it gets fp32 copies: ours are
    their rounding.
    """
    model = SAVED[name](0)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    for param in model.parameters():
        param.data = param.data.float()
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2)
    for step in range(4):
        step_by_hand(model, optimizer, step)
    expected = everything(model, optimizer)
    found = _uninterrupted(name)
    for n, dtype in dtypes.items():
        if dtype != torch.float32 and f"{n}/master" in found:
            assert torch.equal(found[n], found[f"{n}/master"].to(dtype))
            found[n] = found.pop(f"{n}/master")
    assert apart(found, expected, 1e-6) == {}
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in expected.items()
    }


def _coarse() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Odd(*(torch.randn(shape).bfloat16() for shape in SHAPES))
    precision = zerokern.Precision(
        master="split24", moments="8bit", gradients=torch.bfloat16
    )
    optimizer = sharded(model, 3 if world() > 2 else 2, lr=1e-2, precision=precision)
    for step in range(3):
        step_by_hand(model, optimizer, step)
    return everything(model, optimizer)


@pytest.mark.parametrize("at", (2, 3), ids="world{}".format)
def test_sizes_that_blocks_do_not_divide_are_quantised_alike_in_any_world(
    at: int,
) -> None:
    """D35: numel 1, 3, 7, 13 and 195 in blocks of 64."""
    expected = _coarse()
    for result in ranks.run(at, _coarse):
        assert differing(result, expected) == []


# ----------------------------------------------- D10: gradient memory of frozen weights


class Adapted(nn.Module):
    """A frozen matrix of 4096 elements, and 40 trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 64) / 8, requires_grad=False)
        self.adapter = nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + nn.functional.pad(self.adapter, (0, 24))


UNITS = 5


class AdaptedModel(nn.Module):
    """Units that are 99 % frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Adapted() for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


@case
def mostly_frozen(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AdaptedModel()
    optimizer = sharded(model, stage)
    optimizer.coordinator.transport.peak_bytes = 0
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        during = optimizer.memory().gradients
        optimizer.step()
    return {
        "during": during,
        "memory": optimizer.memory(),
        "peak": optimizer.coordinator.transport.peak_bytes,
        "none": [unit.matrix.grad is None for unit in model.units],
    }


@at_worlds
@in_stages
def test_frozen_weights_cost_no_gradient_memory(stage: int, at: int) -> None:
    """D10: nor moments, nor scratch memory in backward. A slot of 40 elements is 64,
    and a shard at least 64."""
    slots = -(-UNITS // at) * at  # units, padded to a multiple of the world
    elements = {
        1: 64 * slots,
        2: 64 * slots // at,
        3: 64 * UNITS if at > 1 else 64 * slots,
    }[stage]
    frozen = UNITS * 64 * 64 * 4
    for result in done(at)["mostly_frozen", stage]:
        assert result["memory"].gradients == result["during"] == 4 * elements
        assert result["memory"].moments == 2 * 4 * (
            elements // at if stage == 1 else elements
        )
        assert result["peak"] < (frozen if stage == 3 else frozen // 20)
        assert result["none"] == [True] * UNITS


# -------------------------------------------- D14, D15, D16, D18: groups and schedulers


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The first is empty (D15), the second stands still (D14)."""
    params = list(model.parameters())
    return [
        {"params": [], "lr": 0.5},
        {"params": params[::2], "lr": 0.0, "weight_decay": 0.3},
        {"params": params[1::2], "lr": 2e-2},
    ]


Scheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULERS: dict[str, Scheduler] = {
    "a factor for each group": lambda o: lr_scheduler.LambdaLR(
        o, [lambda s, i=i: 1.0 / (i + s) for i in (1, 2, 3)]
    ),
    "one factor for all": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "a largest rate for each": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[0.5, 1e-2, 4e-2], total_steps=12
    ),
}


def _scheduled(stage: int | None, of: int, name: str) -> dict[str, Any]:
    run = Run(
        stage, of, build=functools.partial(models.toy, blocks=1), groups=three_groups
    )
    start = whole(run.model, run.optimizer)
    scheduler = SCHEDULERS[name](run.optimizer)
    rates, same = [], []
    for step in range(5):
        run.optimizer.zero_grad()
        run.backward(step)
        run.step()
        scheduler.step()
        if step in (1, 3):
            saved = copy.deepcopy(
                (
                    run.optimizer.state_dict
                    if run.torch
                    else run.optimizer.full_state_dict
                )()
            )
            schedule = copy.deepcopy(scheduler.state_dict())
            if step == 3:  # as after a resume: a new scheduler on the same optimizer
                scheduler = SCHEDULERS[name](run.optimizer)
            run.optimizer.load_state_dict(saved)
            scheduler.load_state_dict(schedule)
        rates.append([group["lr"] for group in run.optimizer.param_groups])
        same.append(run.optimizer.param_groups is scheduler.optimizer.param_groups)
    result = whole(run.model, run.optimizer)
    return {
        "params": result,
        "rates": rates,
        "same": same,
        "moved": differing(result, start),
    }


@case
def scheduled(stage: int) -> dict[str, Any]:
    return {name: _scheduled(stage, world(), name) for name in SCHEDULERS}


@at_worlds
@in_stages
@pytest.mark.parametrize("name", SCHEDULERS)
def test_groups_keep_index_rate_and_identity_under_a_scheduler(
    name: str, stage: int, at: int
) -> None:
    """D14, D15, D16, D18: before and after loading; rates are applied, ratios kept,
    rate 0 moves nothing."""
    expected = _scheduled(None, at, name)
    still = [n for n, _ in models.toy(blocks=1).named_parameters()][::2]
    for results in done(at)["scheduled", stage]:
        result = results[name]
        assert result["rates"] == expected["rates"]
        assert result["same"] == [True] * 5
        assert apart(result["params"], expected["params"]) == {}
        if not name.startswith("a largest"):
            assert not set(result["moved"]) & set(still)
        assert set(result["moved"]) >= {
            n for n, _ in models.toy(blocks=1).named_parameters()
        } - set(still)


# ----------------------------------------------- D22: tensor parallelism, not there yet


def _refusal_of_dtensors(stage: int, frozen: bool) -> tuple[str, int]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = models.toy(blocks=1)
    weight = DTensor.from_local(
        model.head.weight.detach().clone(), mesh, [Replicate()], run_check=False
    )
    model.head.weight = nn.Parameter(weight, requires_grad=not frozen)
    places = [p.data_ptr() for n, p in model.named_parameters() if n != "head.weight"]
    params = [
        p for n, p in model.named_parameters() if n != "head.weight" or not frozen
    ]
    with pytest.raises(ValueError) as error:
        zerokern.AdamW(params, stage=stage, model=model if stage == 3 else None)
    return str(error.value), places == [
        p.data_ptr() for n, p in model.named_parameters() if n != "head.weight"
    ]


@pytest.mark.parametrize(
    ("stage", "frozen"), [(1, False), (2, False), (3, False), (3, True)]
)
def test_tensor_parallel_parameters_are_refused_by_name(
    stage: int, frozen: bool
) -> None:
    """D22, E2, E3: also frozen ones, which stage 3 shards with the rest; nothing was
    changed."""
    for message, untouched in ranks.run(2, _refusal_of_dtensors, stage, frozen):
        assert "DTensor" in message and "tensor parallelism" in message
        assert untouched


# ----------------------------------------- D28: groups in another order on another rank


class Alike(nn.Module):
    """Parameters that only their names and values tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(6))


def _of_a_set(model: nn.Module) -> list[Any]:
    return list(model.layers.parameters())


def _of_a_named_set(model: nn.Module) -> list[Any]:
    return list(model.named_parameters())


def _groups_of_a_set(model: nn.Module) -> list[Any]:
    return [{"params": [layer.weight]} for layer in model.layers]


def _groups_of_sets(model: nn.Module) -> list[Any]:
    params = list(model.parameters())
    if rank() == 1:
        params = params[::-1]
    return [{"params": params[:3], "lr": 1e-2}, {"params": params[3:], "lr": 1e-3}]


PASSED = {
    f.__name__.strip("_"): f
    for f in (_of_a_set, _of_a_named_set, _groups_of_a_set, _groups_of_sets)
}


@case
def disordered(stage: int) -> dict[str, tuple[str, bool]]:
    found = {}
    for name, groups_of in PASSED.items():
        torch.manual_seed(0)
        model = Alike()
        groups = groups_of(model)
        # As the hash seed of another process has it.
        if rank() == 1 and name != "groups_of_sets":
            groups = [groups[i] for i in (3, 0, 5, 1, 4, 2)]
        before = [p.detach().clone() for p in model.parameters()]
        try:
            sharded(model, stage, groups)
        except ValueError as error:
            untouched = all(map(torch.equal, before, model.parameters()))
            found[name] = str(error), untouched
        else:
            found[name] = "", False
    return found


@pytest.mark.parametrize("at", (2, 3), ids="world{}".format)
@in_stages
@pytest.mark.parametrize("name", PASSED)
def test_parameters_in_another_order_on_another_rank_are_refused(
    name: str, stage: int, at: int
) -> None:
    """D28: groups made of a set. All ranks get the error; nobody trains one weight as
    if it were another."""
    for results in done(at)["disordered", stage]:
        message, untouched = results[name]
        assert "Rank 1" in message
        assert untouched


# ----------------------------------------------------------- D33: the model moves later


def _cast(model: nn.Module) -> None:
    model.bfloat16()


def _replaced(model: nn.Module) -> None:
    model.head.weight.data = torch.zeros(model.head.weight.shape)


def _cast_and_back(model: nn.Module) -> None:
    model.double().float()


MOVES = {f.__name__.strip("_"): f for f in (_cast, _replaced, _cast_and_back)}


@case
def moved(stage: int) -> dict[str, str]:
    found = {}
    for name, move in MOVES.items():
        model = models.toy()
        optimizer = sharded(model, stage, model.named_parameters())
        with pytest.raises(RuntimeError) as error:
            move(model)
            set_integer_gradients(model, 0)
            optimizer.step()
        found[name] = str(error.value)
    return found


@at_worlds
@in_stages
@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_moves_away_from_its_optimizer_is_told_so(
    move: str, stage: int, at: int
) -> None:
    """D33: before the update, on all ranks, never a loss that stands still."""
    for results in done(at)["moved", stage]:
        assert "parameter" in results[move]
        assert (
            "full_params" in results[move] or "build a new optimizer" in results[move]
        )


def test_integer_gradients_have_one_mean_in_every_world() -> None:
    """What makes these tests exact."""
    for of in WORLDS:
        mean = sum(integer_gradient((5, 7), 3, 1, r, of) for r in range(of)) / of
        assert torch.equal(mean, integer_gradient((5, 7), 3, 1, 0, 1))
