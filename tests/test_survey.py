"""The survey of faults that users of other optimizers reported: where each of its rows
is tested here, or why it cannot apply. Rows that are about the whole optimizer and had
no test elsewhere have theirs below.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
from oracle import differing, set_integer_gradients, sharded, state_of, whole
from torch import nn

import zerokern
from zerokern import Precision

TESTS = Path(__file__).parent

ROWS: dict[str, str] = {
    "1": "test_large::test_an_update_reaches_every_element_beyond_2_to_the_31",
    "2": "test_large::test_an_update_reaches_every_element_beyond_2_to_the_31",
    "3": "test_large::test_an_update_reaches_every_element_beyond_2_to_the_31",
    "4": "test_large::test_a_norm_of_more_than_2_to_the_31_elements",
    "5": "test_large::test_an_update_reaches_every_element_beyond_2_to_the_31",
    "6": "test_cards::test_no_32_bit_product_reaches_an_address",
    "7": "test_kernels::test_pack_with_empty_tensors_anywhere",
    "8": "test_kernels::test_pack_with_empty_tensors_anywhere",
    "9": "test_kernels::test_pack_launches_once_for_25_000_parameters",
    "10": "test_survey::test_steps_count_where_a_rank_holds_nothing_of_a_group",
    "11": "test_launches::test_three_launches_per_bucket",
    "12": "test_kernels::test_equal_layouts_are_not_copied",
    "13": "test_kernels::test_pack_reads_strides",
    "14": "test_kernels::test_pack_reads_strides",
    "15": "test_update::test_update_at_any_address",
    "16": "test_update::test_update_at_any_address",
    "17": "test_no_host_sync::test_training_reads_nothing_on_the_host",
    "18": (
        "GPU only: nothing is freed under a launch, since buffers live as long as the"
        " optimizer"
    ),
    "19": "test_parity::test_stages_buckets_and_overlap_agree_bit_for_bit",
    "20": "test_update::test_small_numbers_survive_sixteen_bits",
    "21": "test_update::test_moments_are_those_of_fp32_gradients",
    "22": "test_formats::test_split32_of_all_numbers",
    "23": "test_update::test_updates_below_half_a_step_add_up",
    "24": "test_recipes::test_a_resumed_run_is_an_uninterrupted_one",
    "25": "test_recipes::test_a_resumed_run_is_an_uninterrupted_one",
    "26": "test_update::test_weight_decay_survives_bf16",
    "27": "test_update::test_second_moments_decay",
    "28": "test_update::test_the_first_step_is_unbiased",
    "29": "test_update::test_small_numbers_survive_sixteen_bits",
    "30": "test_update::test_unused_elements_of_a_block_do_not_move",
    "31": "test_formats::test_code_values",
    "32": "test_update::test_adam_is_torch_in_fp64",
    "33": "test_update::test_a_thousand_steps_beside_torch",
    "34": "test_recipes::test_neither_world_nor_stage_nor_bucket_changes_a_bit",
    "35": "test_update::test_a_large_uneven_parameter_on_four_ranks",
    "36": "test_formats::test_bf16_roundings_equal_their_twins",
    "37": "test_kernels::test_casts_of_all_patterns",
    "38": "test_update::test_update_with_any_gradient",
    "39": "test_kernels::test_accumulation_loses_nothing_of_bf16_gradients",
    "40": "test_survey::test_each_parameter_counts_its_own_steps",
    "41": "test_update::test_a_shard_in_pieces_is_the_shard",
    "42": "test_update::test_the_largest_second_moment_never_falls",
    "43": "test_bad_input::test_refused_at_construction",
    "44": "test_survey::test_a_learning_rate_may_be_a_number_or_a_tensor",
    "45": "test_kernels::test_no_value_is_compiled_into_a_kernel",
    "46": "test_kernels::test_no_value_is_compiled_into_a_kernel",
    "47": "test_kernels::test_counters_and_keys_go_on_past_what_fp32_counts",
    "48": "test_gpu::test_a_captured_step_is_a_step",
    "49": "test_kernels::test_counters_and_keys_go_on_past_what_fp32_counts",
    "50": "test_amp::test_the_order_of_unscale_and_clip_does_not_matter",
    "51": "test_update::test_unscaling_is_exact",
    "52": "test_amp::test_a_power_of_two_changes_no_bit",
    "53": "test_amp::test_scaled_training_is_torchs",
    "54": "test_amp::test_the_order_of_unscale_and_clip_does_not_matter",
    "55": "test_amp::test_scaled_training_is_torchs",
    "56": "test_gradients::test_a_skipped_step_is_counted_on_every_rank",
    "57": "test_kernels::test_scalars_equal_their_twin",
    "58": (
        "test_kernels::test_reduce_of_integers_is_exact_and_finite_squares_stay_finite"
    ),
    "59": (
        "test_kernels::test_reduce_of_integers_is_exact_and_finite_squares_stay_finite"
    ),
    "60": "test_kernels::test_the_norm_is_that_of_all_ranks",
    "61": "test_amp::test_without_a_scaler_the_scale_is_one",
    "62": "test_update::test_a_huge_norm_is_clipped_in_fp32",
    "63": "test_kernels::test_reduce_in_place_at_any_address_between_guards",
    "64": "cannot apply: there is no offload of gradients to the host",
    "65": "test_update::test_gradients_of_zero_still_decay",
    "66": "test_launches::test_three_launches_per_bucket",
    "67": "GPU only: bench.gpu gives every kernel as percent of a copy in the same run",
    "68": "test_kernels::test_values_do_not_recompile",
    "69": "test_survey::test_loading_takes_one_shard_of_memory",
    "70": (
        "test_survey::test_every_rule_is_a_torch_optimizer_and_takes_frozen_parameters"
    ),
    "S1": "test_formats::test_splits_keep_what_is_not_a_number",
    "S2": "test_formats::test_bf16_stochastic_keeps_what_is_not_a_number",
    "S3": "test_update::test_small_numbers_survive_sixteen_bits",
    "S4": (
        "cannot apply: the norm is always of all parameters, since clip_grad_norm_"
        " takes no list of them"
    ),
    "S5": "test_kernels::test_pack_with_empty_tensors_anywhere",
    "S6": "test_kernels::test_pack_reads_strides",
    "S7": "test_survey::test_a_strided_parameter_on_the_cpu_is_updated_in_place",
    "S8": "test_update::test_inactive_rows_keep_their_bits_whatever_the_gradient",
    "S9": "test_update::test_eight_bit_moments_follow_gradients_of_any_size",
    "S10": "test_update::test_weight_decay_survives_bf16",
    "S11": "cannot apply: parameters on several devices are refused at construction",
    "S12": "test_state_dict::test_torch_saves_and_loads_it_with_weights_only",
    "S13": "test_survey::test_a_skipped_step_does_not_count_in_a_checkpoint",
    "S14": "test_kernels::test_scalars_equal_their_twin",
}


def test_every_row_has_its_test() -> None:
    assert list(ROWS) == [*map(str, range(1, 71)), *(f"S{i}" for i in range(1, 15))]
    for row, place in ROWS.items():
        if place.startswith(("GPU only: ", "cannot apply: ")):
            continue
        module, name = place.split("::")
        assert re.search(
            rf"^def {name}\(", (TESTS / f"{module}.py").read_text(), re.MULTILINE
        ), (row, place)


def steps_of(optimizer: Any) -> list[int]:
    """Return the step counter of every parameter, gathered."""
    return [
        int(entry["step"]) for entry in optimizer.full_state_dict()["state"].values()
    ]


def uneven(reverse: bool) -> tuple[list[int], list[int], bool]:
    """Train a model of which one rank holds no element of the second group; resume with
    the shards the other way."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (4096, 5)]
    groups = [{"params": [param]} for param in params]
    optimizer = zerokern.AdamW(groups[::-1] if reverse else groups)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    before = steps_of(optimizer)
    other = [nn.Parameter(param.detach().clone()) for param in params]
    groups = [{"params": [param]} for param in other]
    resumed = zerokern.AdamW(
        groups[::-1] if reverse else groups, buckets=zerokern.Buckets(bytes=2**16)
    )
    resumed.load_state_dict(optimizer.full_state_dict())
    for mine, its in ((params, optimizer), (other, resumed)):
        for param in mine:
            param.grad = torch.ones_like(param)
        its.step()
    return (
        before,
        steps_of(resumed),
        all(torch.equal(a, b) for a, b in zip(params, other, strict=True)),
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_count_where_a_rank_holds_nothing_of_a_group(reverse: bool) -> None:
    for before, after, same in ranks.run(2, uneven, reverse):
        assert (before, after, same) == ([3, 3], [4, 4], True)


def test_each_parameter_counts_its_own_steps() -> None:
    """One has a gradient in every step, one in every second; dtypes are mixed."""
    torch.manual_seed(0)
    always, sometimes = nn.Parameter(torch.randn(100)), nn.Parameter(torch.randn(100))
    narrow = nn.Parameter(torch.randn(100).bfloat16())
    ours = zerokern.AdamW([always, sometimes, narrow], lr=1e-2)
    twins = [nn.Parameter(p.detach().clone()) for p in (always, sometimes)]
    theirs = torch.optim.AdamW(twins, lr=1e-2)
    for step in range(6):
        for index, param in enumerate((always, sometimes, narrow)):
            param.grad = (
                torch.full_like(param, 0.1 * (step + 1))
                if index != 1 or step % 2
                else None
            )
        for twin, param in zip(twins, (always, sometimes), strict=True):
            twin.grad = None if param.grad is None else param.grad.clone()
        ours.step()
        theirs.step()
    assert steps_of(ours) == [6, 3, 6]
    for twin, param in zip(twins, (always, sometimes), strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)


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


def load_peak() -> tuple[int, int]:
    """Return the scratch memory that loading took, and the largest shard, in bytes of
    fp32."""
    model = models.gpt().bfloat16()
    optimizer = sharded(model, 1, precision=Precision(master="split32", moments="8bit"))
    saved = optimizer.full_state_dict()
    scratch = optimizer.coordinator.transport
    scratch.peak_bytes = scratch.live_bytes
    optimizer.load_state_dict(saved)
    return scratch.peak_bytes, max(
        4 * p.layout.shard_numel for p in optimizer.coordinator.trainable
    )


def test_loading_takes_one_shard_of_memory() -> None:
    for peak, shard in ranks.run(2, load_peak):
        assert 0 < peak <= shard


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


@pytest.mark.parametrize(
    "precision", [Precision(), Precision(master="split24", moments="8bit")], ids=str
)
def test_a_strided_parameter_on_the_cpu_is_updated_in_place(
    precision: Precision,
) -> None:
    dtype = torch.float32 if precision == Precision() else torch.bfloat16
    for strided in (
        torch.randn(8, 6).t(),
        torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    ):
        param = nn.Parameter(strided.to(dtype))
        flat = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
        before = param.detach().clone()
        for one in (param, flat):
            optimizer = zerokern.AdamW([one], lr=0.1, precision=precision)
            one.grad = torch.linspace(-1, 1, one.numel()).view(one.shape).to(dtype)
            optimizer.step()
        assert (param != before).any()
        # The order of elements in memory decides about random bits.
        if precision == Precision():
            assert torch.equal(param, flat)
        else:
            torch.testing.assert_close(param, flat, rtol=2**-6, atol=1e-3)


def test_a_skipped_step_does_not_count_in_a_checkpoint() -> None:
    model, twin = models.toy(), models.toy()
    ours, other = (zerokern.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    for step in range(4):
        for m, optimizer in ((model, ours), (twin, other)):
            optimizer.zero_grad()
            set_integer_gradients(m, step)
            if step == 2:
                next(m.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            optimizer.step()
        if step == 2:
            assert set(steps_of(ours)) == {2}
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert (
        differing(
            whole(model, ours) | state_of(model, ours),
            whole(twin, other) | state_of(twin, other),
        )
        == []
    )
