"""State of sharded runs: whole or in shards, resumed in any world and stage, in plain
values."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import warnings
from typing import Any

import models
import pytest
import ranks
import torch
from marks import in_stages
from oracle import (
    STAGES,
    apart,
    differing,
    quiet_state_dict,
    rank,
    sharded,
    state_of,
    whole,
)
from torch import Tensor
from training import everything, interleaved, train_by_hand

import zerokern
from zerokern import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
State = dict[str, Any]
in_dtypes = pytest.mark.parametrize("dtype", DTYPES)


# ------------------------------------------------------------------- whole or in shards

SAVED_AT = 3


def save(stage: int, dtype: torch.dtype) -> State:
    """Train three steps and save; then take one more, to compare with."""
    model = models.toy().to(dtype)
    buckets = zerokern.Buckets(bytes=5000)
    groups = interleaved(model)
    optimizer = sharded(model, stage, groups, lr=1e-2, buckets=buckets)
    train_by_hand(model, optimizer)
    full = optimizer.full_state_dict()
    only_one = optimizer.full_state_dict(to=1)
    params = whole(model, optimizer)
    before = everything(model, optimizer)
    sharded_form = copy.deepcopy(quiet_state_dict(optimizer))
    train_by_hand(model, optimizer, range(3, 4))
    after = everything(model, optimizer)
    optimizer.load_state_dict(sharded_form)
    back = state_of(model, optimizer)
    optimizer.load_state_dict(quiet_state_dict(optimizer))
    no_op = differing(state_of(model, optimizer), back)
    train_by_hand(model, optimizer, range(3, 4))
    return {
        "full": full,
        "only_one": only_one,
        "params": params,
        "before": before,
        "next": after,
        "no_op": no_op,
        "sharded": sharded_form,
        "back": back,
        "again": everything(model, optimizer),
    }


def resume(saved: State, stage: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load into a fresh model and optimizer, and take the next step."""
    model = models.toy(seed=5).to(dtype)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(saved["params"][name])
    buckets = zerokern.Buckets(bytes=3000)
    groups = interleaved(model)
    optimizer = sharded(model, stage, groups, lr=9.0, buckets=buckets)
    optimizer.load_state_dict(saved["full"])
    train_by_hand(model, optimizer, range(3, 4))
    return everything(model, optimizer)


@functools.cache
def saves() -> ranks.Cases:
    """Save in every stage and precision, in a world of 3."""
    cases = {}
    for stage, dtype in itertools.product(STAGES, DTYPES):
        cases[stage, dtype] = functools.partial(save, stage, DTYPES[dtype])
    return ranks.run_cases(SAVED_AT, cases)


@functools.cache
def resumed(at: int) -> ranks.Cases:
    """Resume what every stage saved, in every stage, in a world of `at`."""
    cases = {}
    for old, new, dtype in itertools.product(STAGES, STAGES, DTYPES):
        saved = saves()[old, dtype][0]
        case = functools.partial(resume, saved, new, DTYPES[dtype])
        cases[old, new, dtype] = case
    return ranks.run_cases(at, cases)


@pytest.mark.parametrize("at", (1, 2, 4), ids="to world{}".format)
@pytest.mark.parametrize("old", STAGES, ids="from stage{}".format)
@pytest.mark.parametrize("new", STAGES, ids="to stage{}".format)
@in_dtypes
def test_a_full_state_resumes_anywhere_bit_for_bit(
    at: int, old: int, new: int, dtype: str
) -> None:
    """Other world, other stage, other buckets; masters and moments keep every bit."""
    expected = saves()[old, dtype][0]["next"]
    for result in resumed(at)[old, new, dtype]:
        assert differing(result, expected) == []


@in_stages
def test_torch_resumes_a_full_state(stage: int) -> None:
    saved = saves()[stage, "fp32"][0]
    model = models.toy()
    model.load_state_dict(saved["params"])
    optimizer = torch.optim.AdamW(interleaved(model), lr=9.0)
    optimizer.load_state_dict(saved["full"])
    train_by_hand(model, optimizer, range(3, 4))
    assert apart(everything(model, optimizer), saved["next"]) == {}


@in_stages
@in_dtypes
def test_loading_its_own_shards_is_a_no_op(stage: int, dtype: str) -> None:
    for result in saves()[stage, dtype]:
        assert result["no_op"] == []


@in_stages
@in_dtypes
def test_shards_load_where_they_were_saved(stage: int, dtype: str) -> None:
    for result in saves()[stage, dtype]:
        kept = {name: value for name, value in result["before"].items() if "/" in name}
        assert differing(result["back"], kept) == []


@in_stages
def test_the_next_step_starts_from_loaded_masters(stage: int) -> None:
    """They are the weights of 16-bit parameters, though nobody has loaded these."""
    for result in saves()[stage, "bf16"]:
        assert differing(result["again"], result["next"]) == []


def flat(saved: State) -> dict[str, Tensor]:
    """Return the values of a state, as "index/name"."""
    values = {}
    for index, entry in saved["state"].items():
        for name, value in entry.items():
            values[f"{index}/{name}"] = value
    return values


@in_stages
def test_every_rank_gets_the_same_full_state(stage: int) -> None:
    first, *others = (flat(result["full"]) for result in saves()[stage, "bf16"])
    for other in others:
        assert differing(other, first) == []


@in_stages
def test_one_rank_may_get_it_alone(stage: int) -> None:
    got_it = [bool(result["only_one"]) for result in saves()[stage, "fp32"]]
    assert got_it == [False, True, False]


@in_stages
def test_the_sharded_form_is_labelled_and_divided(stage: int) -> None:
    """Never mistaken for the whole; two moments for each element of a shard."""
    held = [0] * 200
    for result in saves()[stage, "fp32"]:
        for index, entry in result["sharded"]["state"].items():
            start, end = entry["range"]
            assert entry["exp_avg"].shape == (end - start,)
            assert entry["exp_avg_sq"].shape == (end - start,)
            held[index] += end - start
    groups = interleaved(models.toy())
    sizes = [p.numel() for group in groups for p in group["params"]]
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
    """It must not communicate, and one rank's copy would silently lose the rest."""

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
    """By the name that Lightning and Fabric call."""

    def case() -> tuple[bool, bool, int]:
        model = models.toy()
        optimizer = sharded(model, stage)
        train_by_hand(model, optimizer)
        full = optimizer.full_state_dict()["state"]
        optimizer.consolidate_state_dict(to=1)
        kept = quiet_state_dict(optimizer)["state"]
        is_full = kept.keys() == full.keys() and all(
            torch.equal(kept[index][name], value)
            for index, entry in full.items()
            for name, value in entry.items()
        )
        train_by_hand(model, optimizer, range(3, 4))
        stale = "range" not in quiet_state_dict(optimizer)["state"][0]
        return is_full, stale, rank()

    for is_full, stale, of_rank in ranks.run(2, case):
        assert is_full == (of_rank == 1)
        assert not stale


@in_stages
def test_a_wrong_state_is_refused_on_every_rank(stage: int) -> None:
    def case() -> list[str]:
        model = models.toy()
        optimizer = sharded(model, stage)
        train_by_hand(model, optimizer)
        before = everything(model, optimizer)
        full = optimizer.full_state_dict()
        full["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(ValueError, match="another model"):
            optimizer.load_state_dict(full)
        return differing(everything(model, optimizer), before)

    assert ranks.run(2, case) == [[], []]


def load_peak() -> tuple[int, int]:
    """Return the scratch memory that loading took, and the largest shard, in bytes of
    fp32."""
    model = models.gpt().bfloat16()
    precision = Precision(master="split32", moments="8bit")
    optimizer = sharded(model, 1, precision=precision)
    saved = optimizer.full_state_dict()
    scratch = optimizer.coordinator.transport
    scratch.peak_bytes = scratch.live_bytes
    optimizer.load_state_dict(saved)
    shards = [bucket.layout.shard_numel for bucket in optimizer.coordinator.trainable]
    return scratch.peak_bytes, 4 * max(shards)


def test_loading_takes_one_shard_of_memory() -> None:
    for peak, shard in ranks.run(2, load_peak):
        assert 0 < peak <= shard


# ------------------------------------------------------------------------- plain values


def leaves(value: Any) -> list[Any]:
    """Return the values in a nest of dicts and lists."""
    if isinstance(value, dict):
        items = [*value.keys(), *value.values()]
        return [leaf for item in items for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@in_stages
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_only_plain_values(stage: int, form: str) -> None:
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
    """A view of a flat buffer would save the whole buffer with every parameter."""
    model = models.toy()
    optimizer = zerokern.AdamW(model.parameters())
    train_by_hand(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    payload = 8 * sum(p.numel() for p in model.parameters())
    assert len(file.getvalue()) < 1.2 * payload + 500 * len(optimizer.state) * 3


def test_every_value_of_a_full_state_is_its_own_memory_on_the_host() -> None:
    full = saves()[2, "bf16"][0]["full"]
    for entry in full["state"].values():
        for value in entry.values():
            assert value.device.type == "cpu"
            assert value.untyped_storage().nbytes() == value.nbytes
