"""State in torch's layout: to and from torch, to any world and stage, bits kept,
nothing but plain values."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import (
    STAGES,
    apart,
    differing,
    quiet_state_dict,
    rank,
    set_integer_gradients,
    sharded,
    state_of,
    whole,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zerokern

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
State = dict[str, Any]
in_stages = pytest.mark.parametrize("stage", STAGES, ids="stage{}".format)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def trained(optimizer: Any, model: nn.Module, steps: range = range(3)) -> None:
    """Train on integer gradients, whose sums are exact in any world."""
    for step in steps:
        optimizer.zero_grad()
        set_integer_gradients(model, step)
        optimizer.step()


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return parameters and state."""
    return whole(model, optimizer) | state_of(model, optimizer)


def interleaved(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that take alternate parameters."""
    params = list(model.parameters())
    return [
        {"params": params[::2], "weight_decay": 0.2},
        {"params": params[1::2], "lr": 3e-3},
    ]


# ------------------------------------------------------------- a world of one and torch


@pytest.mark.parametrize(
    "groups",
    [nn.Module.parameters, interleaved],
    ids=["one group", "interleaved groups"],
)
def test_torch_loads_ours_and_goes_on(groups: Any) -> None:
    """D13: groups that take alternate parameters do not swap states."""
    model = models.toy()
    ours = zerokern.AdamW(groups(model), lr=1e-2)
    trained(ours, model)
    other = copy.deepcopy(model)
    theirs = torch.optim.AdamW(groups(other), lr=5.0)
    # Torch keeps the tensors that it is given.
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    trained(ours, model, range(3, 5))
    trained(theirs, other, range(3, 5))
    assert apart(everything(model, ours), everything(other, theirs)) == {}


@pytest.mark.parametrize(
    "groups",
    [nn.Module.parameters, interleaved],
    ids=["one group", "interleaved groups"],
)
def test_ours_loads_torch_and_goes_on(groups: Any) -> None:
    model = models.toy()
    theirs = torch.optim.AdamW(groups(model), lr=1e-2)
    trained(theirs, model)
    other = copy.deepcopy(model)
    ours = zerokern.AdamW(groups(other), lr=5.0)
    ours.load_state_dict(theirs.state_dict())
    trained(theirs, model, range(3, 5))
    trained(ours, other, range(3, 5))
    assert apart(everything(other, ours), everything(model, theirs)) == {}


def test_a_round_trip_through_torch_keeps_every_bit() -> None:
    model = models.toy()
    ours = zerokern.AdamW(model.parameters())
    trained(ours, model)
    before = state_of(model, ours)
    theirs = torch.optim.AdamW(copy.deepcopy(model).parameters())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert differing(state_of(model, ours), before) == []


def test_the_layout_is_that_of_torch() -> None:
    """Keys, shapes, dtypes and groups, but for options torch does not know."""
    model = models.toy()
    ours, theirs = (
        zerokern.AdamW(model.parameters()),
        torch.optim.AdamW(copy.deepcopy(model).parameters()),
    )
    trained(ours, model)
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    theirs.step()
    mine, its = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == its.keys()
    assert mine["state"].keys() == its["state"].keys()
    for key, entry in its["state"].items():
        assert {n: (v.shape, v.dtype) for n, v in mine["state"][key].items()} == {
            n: (v.shape, v.dtype) for n, v in entry.items()
        }
    assert mine["param_groups"][0]["params"] == its["param_groups"][0]["params"]
    assert mine["param_groups"][0].keys() == its["param_groups"][0].keys()


@in_dtypes
def test_state_exists_before_the_first_step(dtype: str) -> None:
    """Fact 5: an empty state makes checkpoint libraries take a step of their own."""
    model = models.toy().to(DTYPES[dtype])
    optimizer = zerokern.AdamW(model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
    assert optimizer.state_dict()["state"].keys() == set(
        range(len(list(model.parameters())))
    )
    assert all(entry["step"] == 0 for entry in optimizer.state_dict()["state"].values())


def test_a_state_without_steps_loads() -> None:
    """F13: what torch saves before its first step is an empty state; our next step is
    the first."""
    model = models.toy()
    ours = zerokern.AdamW(model.parameters())
    trained(ours, model)
    empty = torch.optim.AdamW(copy.deepcopy(model).parameters()).state_dict()
    ours.load_state_dict(empty)
    assert all(not value.any() for value in state_of(model, ours).values())


@in_dtypes
def test_loading_its_own_state_is_a_no_op(dtype: str) -> None:
    """G32: what accelerate does at once, before and after steps."""
    model, twin = models.toy().to(DTYPES[dtype]), models.toy().to(DTYPES[dtype])
    optimizer, untouched = (
        zerokern.AdamW(model.parameters(), lr=1e-2),
        zerokern.AdamW(twin.parameters(), lr=1e-2),
    )
    for steps in (range(2), range(2, 4)):
        optimizer.load_state_dict(optimizer.state_dict())
        trained(optimizer, model, steps)
        trained(untouched, twin, steps)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert differing(everything(model, optimizer), everything(twin, untouched)) == []


def test_moments_of_a_bf16_model_keep_their_precision() -> None:
    """Fact 6: torch's own loader would round them to bf16."""
    model = models.toy().bfloat16()
    optimizer = zerokern.AdamW(model.parameters())
    trained(optimizer, model)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh_model = models.toy().bfloat16()
    fresh_model.load_state_dict(model.state_dict())
    fresh = zerokern.AdamW(fresh_model.parameters())
    fresh.load_state_dict(saved)
    state = state_of(fresh_model, fresh)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert differing(state, state_of(model, optimizer)) == []


def test_a_state_without_masters_makes_them_of_the_parameters() -> None:
    """A checkpoint of torch's AdamW of a bf16 model: its moments are bf16, and there is
    no master."""
    model = models.toy().bfloat16()
    theirs = torch.optim.AdamW(model.parameters())
    trained(theirs, model)
    other = copy.deepcopy(model)
    ours = zerokern.AdamW(other.parameters())
    ours.load_state_dict(theirs.state_dict())
    state = state_of(other, ours)
    for name, param in model.named_parameters():
        assert torch.equal(state[f"{name}/master"], param.float())
        assert torch.equal(
            state[f"{name}/exp_avg"], theirs.state[param]["exp_avg"].float()
        )


def test_loading_copies() -> None:
    """G23: the state that was loaded and ours share no memory."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    trained(optimizer, model)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    before = state_of(model, optimizer)
    for entry in saved["state"].values():
        entry["exp_avg"].fill_(7.0)
    assert differing(state_of(model, optimizer), before) == []


def test_loaded_parameters_reach_the_masters() -> None:
    """A checkpoint is loaded into the model while the optimizer exists: the next step
    starts from it."""
    source = models.toy(seed=1).bfloat16()
    model = models.toy().bfloat16()
    optimizer = zerokern.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model.load_state_dict(source.state_dict())
    trained(optimizer, model, range(1))
    assert differing(whole(model, optimizer), dict(source.named_parameters())) == []


def test_one_parameter_edited_in_place_keeps_the_low_bits_of_the_others() -> None:
    model = models.toy().bfloat16()
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-3)
    trained(optimizer, model)
    before = state_of(model, optimizer)
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.0
    trained(optimizer, model, range(3, 4))
    after = state_of(model, optimizer)
    masters = {k: v for k, v in before.items() if k.endswith("/master")}
    assert differing({k: after[k] for k in masters}, masters) == ["head.bias/master"]
    assert torch.equal(
        after["head.bias/master"], torch.full_like(after["head.bias/master"], 3.0)
    )


# ---------------------------------------------------------------------- loading: rules


def loadable() -> tuple[nn.Module, Any]:
    """Return a trained optimizer."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters(), lr=1e-2)
    trained(optimizer, model)
    return model, optimizer


def _other_shape(saved: State) -> None:
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].t().contiguous()


def _other_shape_of_second_moment(saved: State) -> None:
    saved["state"][3]["exp_avg_sq"] = torch.zeros(3)


def _one_parameter_less(saved: State) -> None:
    saved["param_groups"][0]["params"].pop()


def _one_group_more(saved: State) -> None:
    saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))


def _of_sgd(saved: State) -> None:
    for entry in saved["state"].values():
        entry.clear()
        entry["momentum_buffer"] = torch.zeros(1)


def _moment_missing(saved: State) -> None:
    del saved["state"][2]["exp_avg_sq"]


def _shard(saved: State) -> None:
    for entry in saved["state"].values():
        entry["range"] = (0, 3)


WRONG = [
    _other_shape,
    _other_shape_of_second_moment,
    _one_parameter_less,
    _one_group_more,
    _of_sgd,
    _moment_missing,
    _shard,
]


@pytest.mark.parametrize("spoil", WRONG, ids=lambda f: f.__name__.strip("_"))
def test_the_state_of_another_model_is_refused_and_nothing_changes(
    spoil: Callable[[State], None],
) -> None:
    model, optimizer = loadable()
    saved = copy.deepcopy(optimizer.state_dict())
    trained(optimizer, model, range(3, 4))
    before, groups = (
        everything(model, optimizer),
        copy.deepcopy(optimizer.state_dict()["param_groups"]),
    )
    saved["param_groups"][0]["lr"] = 77.0
    spoil(saved)
    with pytest.raises(ValueError, match=r"state"):
        optimizer.load_state_dict(saved)
    assert differing(everything(model, optimizer), before) == []
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(
    "saved",
    [{}, {"state": {}}, {"param_groups": []}],
    ids=["empty", "no groups", "no state"],
)
def test_what_is_no_state_dict_is_refused(saved: State) -> None:
    _, optimizer = loadable()
    with pytest.raises((ValueError, KeyError)):
        optimizer.load_state_dict(saved)


def test_options_come_from_the_state_and_groups_keep_their_identity() -> None:
    """D16: the scheduler's list of groups stays the optimizer's."""
    model, optimizer = loadable()
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(lr=0.25, betas=(0.5, 0.6))
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups is scheduler.optimizer.param_groups
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["betas"]) == (0.25, (0.5, 0.6))
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_a_scheduler_goes_on_after_loading() -> None:
    """D16, D18."""
    results = []
    for optimizer_class in (zerokern.AdamW, torch.optim.AdamW):
        model = models.toy()
        optimizer = optimizer_class(interleaved(model), lr=1e-2)
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.1, 0.2], total_steps=10
        )
        for steps in (range(2), range(2, 4)):
            for step in steps:
                trained(optimizer, model, range(step, step + 1))
                scheduler.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        results.append(
            [(group["lr"], group["betas"]) for group in optimizer.param_groups]
        )
    assert results[0] == results[1]


def test_a_frozen_parameter_of_a_later_run_loses_its_state_only() -> None:
    """G15: trained then, frozen now."""
    model, optimizer = loadable()
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    other.embedding.weight.requires_grad_(False)
    fresh = zerokern.AdamW(other.parameters())
    fresh.load_state_dict(saved)
    expected = {
        k: v
        for k, v in state_of(model, optimizer).items()
        if not k.startswith("embedding")
    }
    assert differing(state_of(other, fresh), expected) == []


def test_hooks_around_state_dict_run() -> None:
    """The contract of torch: pre and post, saving and loading; a hook may replace the
    state."""
    _, optimizer = loadable()
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda o, s: (
            {k: v for k, v in s.items() if k != "extra"}
            | {"seen": seen.append("load pre")}
        )
    )
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["save pre", "load pre", "load post"]


# ---------------------------------------------------------------------- over the ranks

SAVED_AT = 3


def save(stage: int, dtype: torch.dtype) -> State:
    """Train three steps and save; then take one more, to compare with."""
    model = models.toy().to(dtype)
    optimizer = sharded(
        model, stage, interleaved(model), lr=1e-2, buckets=zerokern.Buckets(bytes=5000)
    )
    trained(optimizer, model)
    full = optimizer.full_state_dict()
    only_one = optimizer.full_state_dict(to=1)
    params = whole(model, optimizer)
    before = everything(model, optimizer)
    sharded_form = copy.deepcopy(quiet_state_dict(optimizer))
    trained(optimizer, model, range(3, 4))
    after = everything(model, optimizer)
    optimizer.load_state_dict(sharded_form)
    back = state_of(model, optimizer)
    optimizer.load_state_dict(quiet_state_dict(optimizer))
    no_op = differing(state_of(model, optimizer), back)
    return {
        "full": full,
        "only_one": only_one,
        "params": params,
        "before": before,
        "next": after,
        "no_op": no_op,
        "sharded": sharded_form,
        "back": back,
        "live": [
            {k: v.numel() for k, v in entry.items() if k == "exp_avg"}
            for entry in optimizer.state.values()
        ],
    }


def resume(saved: State, stage: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load into a fresh model and optimizer, and take the next step."""
    model = models.toy(seed=5).to(dtype)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(saved["params"][name])
    optimizer = sharded(
        model, stage, interleaved(model), lr=9.0, buckets=zerokern.Buckets(bytes=3000)
    )
    optimizer.load_state_dict(saved["full"])
    trained(optimizer, model, range(3, 4))
    return everything(model, optimizer)


@functools.cache
def saves() -> ranks.Cases:
    """Save in every stage and precision, in a world of 3."""
    return ranks.run_cases(
        SAVED_AT,
        {(s, d): functools.partial(save, s, DTYPES[d]) for s in STAGES for d in DTYPES},
    )


@functools.cache
def resumed(at: int) -> ranks.Cases:
    """Resume what every stage saved, in every stage, in a world of `at`."""
    return ranks.run_cases(
        at,
        {
            (old, new, d): functools.partial(resume, saves()[old, d][0], new, DTYPES[d])
            for old in STAGES
            for new in STAGES
            for d in DTYPES
        },
    )


@pytest.mark.parametrize("at", (1, 2, 4), ids="to world{}".format)
@pytest.mark.parametrize("old", STAGES, ids="from stage{}".format)
@pytest.mark.parametrize("new", STAGES, ids="to stage{}".format)
@in_dtypes
def test_a_full_state_resumes_anywhere_bit_for_bit(
    at: int, old: int, new: int, dtype: str
) -> None:
    """G1, G2, G8, G31: other world, other stage, other buckets; masters and moments
    keep every bit."""
    for result in resumed(at)[old, new, dtype]:
        assert differing(result, saves()[old, dtype][0]["next"]) == []


@in_stages
def test_torch_resumes_a_full_state(stage: int) -> None:
    saved = saves()[stage, "fp32"][0]
    model = models.toy()
    model.load_state_dict(saved["params"])
    optimizer = torch.optim.AdamW(interleaved(model), lr=9.0)
    optimizer.load_state_dict(saved["full"])
    trained(optimizer, model, range(3, 4))
    assert apart(everything(model, optimizer), saved["next"]) == {}


@in_stages
@in_dtypes
def test_loading_its_own_shards_is_a_no_op(stage: int, dtype: str) -> None:
    """G32, in a world of 3."""
    assert [result["no_op"] for result in saves()[stage, dtype]] == [[]] * SAVED_AT


@in_stages
@in_dtypes
def test_shards_load_where_they_were_saved(stage: int, dtype: str) -> None:
    for result in saves()[stage, dtype]:
        kept = {name: value for name, value in result["before"].items() if "/" in name}
        assert differing(result["back"], kept) == []


@in_stages
def test_every_rank_gets_the_same_full_state(stage: int) -> None:
    first, *others = (
        {f"{i}/{n}": v for i, e in r["full"]["state"].items() for n, v in e.items()}
        for r in saves()[stage, "bf16"]
    )
    assert [differing(other, first) for other in others] == [[], []]


@in_stages
def test_one_rank_may_get_it_alone(stage: int) -> None:
    assert [bool(result["only_one"]) for result in saves()[stage, "fp32"]] == [
        False,
        True,
        False,
    ]


@in_stages
def test_the_sharded_form_is_labelled_and_divided(stage: int) -> None:
    """G13: never mistaken for the whole; D25: 8 bytes for each element of a shard."""
    held = [0] * 200
    for result in saves()[stage, "fp32"]:
        for index, entry in result["sharded"]["state"].items():
            start, end = entry["range"]
            assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == (end - start,)
            held[index] += end - start
    sizes = [p.numel() for group in interleaved(models.toy()) for p in group["params"]]
    assert held[: len(sizes)] == sizes


@in_stages
def test_a_shard_is_refused_at_another_world(stage: int) -> None:
    sharded_form = saves()[stage, "fp32"][1]["sharded"]
    model = models.toy()
    optimizer = zerokern.AdamW(interleaved(model))
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match=r"full_state_dict"):
        optimizer.load_state_dict(sharded_form)
    assert differing(state_of(model, optimizer), before) == []


@in_stages
def test_a_sharded_state_dict_warns_once(stage: int) -> None:
    """Fact 3: it must not communicate, and one rank's copy would silently lose the
    rest."""

    def case() -> list[str]:
        model = models.toy()
        optimizer = sharded(model, stage)
        calls = len(optimizer.comm_log())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if rank() == 0:  # as a trainer does: on the saving rank only
                optimizer.state_dict()
                optimizer.state_dict()
        assert len(optimizer.comm_log()) == calls
        return [str(warning.message) for warning in caught]

    first, second = ranks.run(2, case)
    assert len(first) == 1 and "full_state_dict" in first[0]
    assert second == []


@in_stages
def test_consolidated_state_lasts_until_the_next_step(stage: int) -> None:
    """Fact 4: the name that Lightning and Fabric call."""

    def case() -> tuple[bool, bool, int]:
        model = models.toy()
        optimizer = sharded(model, stage)
        trained(optimizer, model)
        full = optimizer.full_state_dict()
        optimizer.consolidate_state_dict(to=1)
        kept = quiet_state_dict(optimizer)
        is_full = kept["state"].keys() == full["state"].keys() and all(
            (
                torch.equal(kept["state"][i][n], v)
                if kept["state"][i][n].shape == v.shape
                else False
            )
            for i, e in full["state"].items()
            for n, v in e.items()
        )
        trained(optimizer, model, range(3, 4))
        stale = "range" not in quiet_state_dict(optimizer)["state"][0]
        return is_full, stale, rank()

    assert ranks.run(2, case) == [(False, False, 0), (True, False, 1)]


@in_stages
def test_a_wrong_state_is_refused_on_every_rank(stage: int) -> None:
    def case() -> list[str]:
        model = models.toy()
        optimizer = sharded(model, stage)
        trained(optimizer, model)
        before = everything(model, optimizer)
        full = optimizer.full_state_dict()
        full["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(ValueError, match="another model"):
            optimizer.load_state_dict(full)
        return differing(everything(model, optimizer), before)

    assert ranks.run(2, case) == [[], []]


# ---------------------------------------------------------------------- plain values


def leaves(value: Any) -> list[Any]:
    """Return the values in a nest of dicts and lists."""
    if isinstance(value, dict):
        return [
            leaf for item in [*value.keys(), *value.values()] for leaf in leaves(item)
        ]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@in_stages
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_only_plain_values(stage: int, form: str) -> None:
    """L6, fact 12."""
    for leaf in leaves(saves()[stage, "bf16"][0][form]):
        assert leaf is None or type(leaf) in (Tensor, int, float, bool, str)


@in_stages
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_torch_saves_and_loads_it_with_weights_only(stage: int, form: str) -> None:
    saved = saves()[stage, "bf16"][0][form]
    file = io.BytesIO()
    torch.save(saved, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert loaded["param_groups"] == saved["param_groups"]
    assert loaded["state"].keys() == saved["state"].keys()


def test_a_saved_state_holds_no_more_than_it_says() -> None:
    """G5: a view of a flat buffer would save the whole buffer with every parameter."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    trained(optimizer, model)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    payload = 8 * sum(p.numel() for p in model.parameters())
    assert len(file.getvalue()) < 1.2 * payload + 500 * len(optimizer.state) * 3


def test_every_value_of_a_full_state_is_its_own_memory_on_the_host() -> None:
    full = saves()[2, "bf16"][0]["full"]
    for entry in full["state"].values():
        for value in entry.values():
            assert value.device.type == "cpu"
            assert (
                value.untyped_storage().nbytes() == value.numel() * value.element_size()
            )
