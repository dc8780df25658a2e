"""What users of ZeRO-style systems reported as broken: where the whole kind of each
fault is tested here, or why it cannot occur. Sources are public issues and pull
requests; a fault read from source or measured says so.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


class Report:
    """One report and its tests."""

    def __init__(self, source: str, *places: str) -> None:
        self.source, self.places = source, places


CANNOT = "cannot apply: "
COUNTS = {"A": 14, "B": 22, "C": 10, "D": 27, "E": 13, "F": 11, "I": 4, "J": 8, "L": 5}
REPORTS = {
    "A1": Report(
        "DeepSpeed#5545",
        "test_faults_overlap::test_a_bad_wire_changes_no_bit",
        "test_faults_overlap::test_a_bad_wire_trains_like_torch",
        "test_faults_overlap::test_the_harness_sees_faults",
    ),
    "A2": Report(
        "DeepSpeed PR#7965",
        "test_faults_overlap::test_a_bad_wire_changes_no_bit",
        "test_faults_overlap::test_a_bad_wire_trains_like_torch",
        "test_faults_overlap::test_the_harness_sees_faults",
    ),
    "A3": Report(
        "DeepSpeed#7188",
        "test_faults_overlap::test_every_norm_is_that_of_the_reference",
        "test_faults_overlap::test_a_bad_wire_changes_no_bit",
    ),
    "A4": Report(
        "DeepSpeed#8061",
        "test_faults_overlap::test_a_reduction_waits_for_who_makes_the_gradient",
    ),
    "A6": Report(
        "gpt-neox#1004",
        "test_faults_overlap::test_overlap_changes_no_volume",
        "test_volume_memory::test_clipping_and_overlap_change_no_volume",
        "test_parity::test_stages_buckets_and_overlap_agree_bit_for_bit",
    ),
    "A7": Report(
        "DeepSpeed#6351",
        "test_faults_overlap::test_bucket_size_changes_no_bit",
        "test_faults_overlap::test_bucket_sizes_differ",
    ),
    "A8": Report(
        "DeepSpeed PR#8539",
        "test_faults_overlap::test_a_handle_waits_for_all_of_its_own_collective",
    ),
    "A9": Report(
        "pytorch PR#180665",
        "cannot apply: There are no hybrid shards and no offload: a mesh of two"
        " dimensions is refused by name, so no copy to the host can start before a"
        " second reduction.",
    ),
    "A10": Report(
        "pytorch#140044, PR#180889",
        "cannot apply: There is no second reduction over a replicate group; that every"
        " buffer outlives its handle is what"
        " test_faults_overlap::test_a_bad_wire_changes_no_bit asserts for the"
        " reductions there are.",
    ),
    "A11": Report(
        "Megatron-LM#3670, PR#3693",
        "test_faults_overlap::test_what_is_sent_has_passed_the_users_hooks",
    ),
    "A12": Report(
        "Megatron-LM PR#6187",
        "test_faults_overlap::test_the_harness_sees_faults",
        "test_faults_overlap::test_a_bad_wire_changes_no_bit",
    ),
    "A14": Report(
        "Megatron-LM PR#4562, PR#4563",
        "test_faults_overlap::test_a_bad_wire_trains_like_torch",
        "test_faults_overlap::test_a_bad_wire_changes_no_bit",
    ),
    "A16": Report(
        "fairscale#780",
        "test_faults_overlap::test_a_bad_wire_changes_no_bit",
        "test_faults_overlap::test_a_bad_wire_trains_like_torch",
    ),
    "A17": Report(
        "Megatron-LM#827, DeepSpeed#7804",
        "test_faults_overlap::test_a_reduction_is_on_its_way_while_the_next_block_computes",
        "test_faults_overlap::test_without_overlap_reductions_come_after_backward",
        "test_faults_overlap::test_a_gather_is_on_its_way_while_the_unit_before_it_computes",
        "test_faults_overlap::test_without_overlap_a_unit_is_gathered_when_it_is_needed",
        "test_faults_overlap::test_a_bucket_is_updated_while_the_one_before_it_is_gathered",
        "test_faults_overlap::test_an_iteration_takes_less_than_its_parts",
    ),
    "B1": Report(
        "DeepSpeed#8224",
        "test_faults_graphs::test_both_uses_count_in_bf16",
        "test_gradients::test_agrees_with_torch",
    ),
    "B3": Report(
        "DeepSpeed#7998",
        "test_faults_graphs::test_trains_like_torch",
        "test_faults_graphs::test_ranks_may_run_blocks_in_any_order",
        "test_faults_graphs::test_ranks_that_part_are_told_of_which_collective",
        "test_faults_graphs::test_ranks_that_part_are_told_once",
        "test_faults_graphs::test_ranks_that_differ_in_stage_3_get_the_right_result_or_an_error",
    ),
    "B4": Report(
        "DeepSpeed#7170",
        "test_faults_graphs::test_trains_like_torch",
        "test_faults_graphs::test_the_unit_that_was_skipped_is_named",
        "test_faults_graphs::test_ranks_that_part_are_told_of_which_collective",
    ),
    "B6": Report(
        "torch 2.13 FSDP2 [measured]",
        "test_gradients::test_agrees_with_torch",
        "test_gradients::test_ranks_log_the_same_collectives",
    ),
    "B7": Report(
        "pytorch#69031, PR#124193",
        "test_gradients::test_agrees_with_torch",
    ),
    "B8": Report(
        "pytorch#79171, #97030",
        "test_faults_graphs::test_trains_like_torch",
        "test_faults_graphs::test_ranks_issue_the_same_collectives",
    ),
    "B9": Report(
        "pytorch PR#187732",
        "test_gradients::test_agrees_with_torch",
        "test_faults_overlap::test_a_bad_wire_trains_like_torch",
    ),
    "B11": Report(
        "pytorch#109385",
        "test_faults_graphs::test_trains_like_torch",
        "test_faults_graphs::test_a_method_that_was_not_registered_is_named",
    ),
    "B12": Report(
        "pytorch#156535",
        "test_gradients::test_agrees_with_torch",
    ),
    "B13": Report(
        "pytorch#153354, PR#171779, #187437",
        "test_faults_graphs::test_trains_like_torch",
    ),
    "B15": Report(
        "transformers#47254, DeepSpeed PR#8130",
        "test_faults_graphs::test_trains_like_torch",
    ),
    "B17": Report(
        "DeepSpeed#3068, #5648, #3724, PR#3884",
        "test_faults_graphs::test_trains_like_torch",
        "test_faults_graphs::test_ranks_issue_the_same_collectives",
    ),
    "B18": Report(
        "DeepSpeed PR#4966, #4094",
        "test_faults_graphs::test_trains_like_torch",
        "test_faults_graphs::test_a_wrong_guess_costs_gathers_only",
        "test_faults_overlap::test_a_bad_wire_changes_no_bit",
    ),
    "B19": Report(
        "DeepSpeed#7844",
        "test_faults_graphs::test_the_smallest_script_does_not_hang",
    ),
    "B20": Report(
        "trl#835",
        "test_faults_graphs::test_trains_like_torch",
    ),
    "B21": Report(
        "pytorch-lightning#13498",
        "test_faults_graphs::test_ranks_that_part_are_told_of_which_collective",
        "test_faults_graphs::test_ranks_that_part_are_told_once",
    ),
    "B22": Report(
        "torchtitan#1618",
        "test_faults_graphs::test_ranks_that_part_are_told_of_which_collective",
        "test_faults_graphs::test_ranks_that_part_are_told_once",
    ),
    "B24": Report(
        "pytorch#82203",
        "test_faults_graphs::test_trains_like_torch",
    ),
    "B25": Report(
        "pytorch PR#175406",
        "test_faults_graphs::test_recomputation_gathers_nothing_again",
        "test_gradients::test_stage3_gathers_each_unit_twice_per_step",
    ),
    "B26": Report(
        "lingbot-vla PR#50",
        "test_gradients::test_checkpointing_adds_no_gathers",
    ),
    "B27": Report(
        "Megatron-LM PR#2218",
        "test_faults_graphs::test_the_order_of_sets_does_not_matter",
        "test_gradients::test_ranks_log_the_same_collectives",
    ),
    "B29": Report(
        "torch 2.13 fsdp/_fully_shard/_fully_shard.py reset_iter_state",
        "test_faults_graphs::test_training_goes_on_after_an_exception",
        "test_faults_graphs::test_an_exception_leaves_no_memory_behind",
        "test_faults_graphs::test_a_step_after_an_exception_is_like_any_other",
        "test_faults_graphs::test_an_exception_on_one_rank_is_not_hidden",
        "test_faults_graphs::test_training_goes_on_after_an_exception_in_any_way",
    ),
    "C1": Report(
        "DeepSpeed PR#1220, PR#1223, PR#2665",
        "test_faults_parameters::test_gathered_memory_is_given_back_at_once",
        "test_gradients::test_leaves_no_scratch_memory",
        "test_volume_memory::test_scratch_memory_returns_to_zero",
    ),
    "C3": Report(
        "DeepSpeed#6492",
        "test_faults_parameters::test_ranks_that_do_not_gather_alike_are_told_so",
        "test_faults_parameters::test_one_rank_may_look_at_parameters_that_every_rank_has",
    ),
    "C4": Report(
        "DeepSpeed source partition_parameters.py exit path",
        "test_faults_parameters::test_a_body_of_full_params_that_raises",
        "test_faults_parameters::test_data_replaced_inside_full_params_is_refused_by_name",
        "test_bad_input::test_edits_are_dropped_when_the_body_raises",
        "test_bad_input::test_edits_inside_full_params_are_kept_in_stages_1_and_2",
    ),
    "C6": Report(
        "ColossalAI#544",
        "cannot apply: There is no context that a model is built in: a model on a"
        " device runs its own initialisation before the optimizer exists"
        " (test_contract::test_ranks_start_from_the_values_of_rank_0), and a model on"
        " the meta device is given its values by init=, which belongs to the engine's"
        " author.",
    ),
    "C7": Report(
        "transformers#25241, PR#16093, PR#32214",
        "test_faults_parameters::test_a_resized_embedding_is_trained_by_a_new_optimizer",
        "test_faults_parameters::test_data_replaced_inside_full_params_is_refused_by_name",
    ),
    "C8": Report(
        "pytorch#149029, #154655, #131965; fairscale#878; torch 2.13 [measured]",
        "test_faults_parameters::test_gathered_memory_is_given_back_at_once",
        "test_faults_parameters::test_inference_mode_leaves_training_as_it_was",
        "test_gradients::test_leaves_no_scratch_memory",
    ),
    "C11": Report(
        "accelerate PR#3154",
        "cannot apply: Left to the engine's author: ties under init= of a model on the"
        " meta device.",
    ),
    "C12": Report(
        "DeepSpeed#3570",
        "cannot apply: Left to the engine's author: the named error of a sharded"
        " parameter that is read outside of its unit's forward, and"
        " register_forward_method; nothing is sharded before an optimizer is attached.",
    ),
    "C14": Report(
        "axolotl#3446",
        "test_faults_parameters::test_the_state_dict_is_that_of_a_plain_model",
        "test_odd_models::test_module_buffers_are_untouched",
    ),
    "C15": Report(
        "pytorch#117446",
        "test_faults_parameters::test_the_state_dict_is_that_of_a_plain_model",
        "test_bad_input::test_state_dict_of_a_sharded_model_is_refused_outside_of_full_params",
    ),
    "D1": Report(
        "DeepSpeed#1896, #3824",
        "test_faults_parameters::test_the_state_dict_is_that_of_a_plain_model",
        "test_faults_parameters::test_safetensors_exports_tied_weights",
        "test_faults_parameters::test_a_state_dict_outlives_full_params",
    ),
    "D2": Report(
        "DeepSpeed PR#8376",
        "test_faults_parameters::test_safetensors_exports_tied_weights",
    ),
    "D4": Report(
        "accelerate#3870, PR#4171",
        "test_odd_models::test_trains_like_torch",
        "test_odd_models::test_shapes_dtypes_and_objects_stay",
    ),
    "D6": Report(
        "Megatron-LM#656",
        "test_odd_models::test_trains_like_torch",
        "test_odd_models::test_shapes_dtypes_and_objects_stay",
    ),
    "D7": Report(
        "DeepSpeed#3090, #5439, #6771",
        "test_faults_parameters::test_what_was_saved_resumes_to_the_bit",
        "test_odd_models::test_frozen_parameters_keep_their_bits",
        "test_faults_parameters::test_frozen_parameters_have_no_gradient",
    ),
    "D8": Report(
        "mmengine PR#1441",
        "test_odd_models::test_parameters_can_be_passed_as_to_torch",
        "test_faults_parameters::test_groups_keep_index_rate_and_identity_under_a_scheduler",
    ),
    "D10": Report(
        "litgpt#1417",
        "test_faults_parameters::test_frozen_weights_cost_no_gradient_memory",
    ),
    "D11": Report(
        "accelerate#1620, trl PR#6343; torch 2.13 [measured]",
        "test_faults_parameters::test_what_was_saved_resumes_to_the_bit",
        "test_faults_parameters::test_an_uninterrupted_run_is_torchs",
        "test_odd_models::test_trains_like_torch",
    ),
    "D12": Report(
        "pytorch#76382, #101343; fairscale#697; verl PR#7215",
        "test_odd_models::test_parameters_can_be_passed_as_to_torch",
        "test_gradients::test_agrees_with_torch",
    ),
    "D13": Report(
        "pytorch PR#54736, fairscale#380",
        "test_state_dict::test_a_full_state_resumes_anywhere_bit_for_bit",
        "test_state_dict::test_torch_loads_ours_and_goes_on",
        "test_faults_parameters::test_what_was_saved_resumes_to_the_bit",
    ),
    "D14": Report(
        "ms-swift#2723",
        "test_faults_parameters::test_groups_keep_index_rate_and_identity_under_a_scheduler",
        "test_parity::test_learning_rate_zero_keeps_a_group_still",
    ),
    "D15": Report(
        "DeepSpeedExamples PR#756",
        "test_faults_parameters::test_groups_keep_index_rate_and_identity_under_a_scheduler",
    ),
    "D16": Report(
        "gpt-neox#1029, dp-transformers#43, ignite#545",
        "test_faults_parameters::test_groups_keep_index_rate_and_identity_under_a_scheduler",
        "test_state_dict::test_options_come_from_the_state_and_groups_keep_their_identity",
        "test_faults_trainers::test_accelerate_prepares_our_optimizer_and_schedule",
    ),
    "D18": Report(
        "DeepSpeed#7713",
        "test_faults_parameters::test_groups_keep_index_rate_and_identity_under_a_scheduler",
        "test_state_dict::test_a_scheduler_goes_on_after_loading",
    ),
    "D19": Report(
        "pytorch#130810, PR#132934; torch 2.13 [measured: FSDP2 rejects scalars]",
        "test_faults_parameters::test_what_was_saved_resumes_to_the_bit",
        "test_faults_parameters::test_an_uninterrupted_run_is_torchs",
        "test_odd_models::test_state_has_the_shapes_of_torch",
        "test_faults_norm::test_gradients_of_odd_parameters_can_be_read",
    ),
    "D20": Report(
        "torchtitan PR#1180, pytorch PR#137000; torch 2.13 [measured]",
        "test_faults_parameters::test_what_was_saved_resumes_to_the_bit",
        "test_faults_parameters::test_an_uninterrupted_run_is_torchs",
        "test_faults_parameters::test_strides_stay_where_parameters_are_whole",
        "test_odd_models::test_dense_strides_stay",
    ),
    "D22": Report(
        "torchtitan PR#4593",
        "cannot apply: Cannot apply: tensor parallelism is not there, and DTensors are"
        " refused by name "
        "(test_faults_parameters::test_tensor_parallel_parameters_are_refused_by_name).",
    ),
    "D23": Report(
        "TransformerEngine#3207, #3202",
        "test_odd_models::test_trains_like_torch",
    ),
    "D24": Report(
        "NeMo Automodel PR#2997; ISEEKYAN/Megatron-LM PR#100",
        "test_odd_models::test_trains_like_torch",
        "test_faults_parameters::test_what_was_saved_resumes_to_the_bit",
        "test_faults_parameters::test_an_uninterrupted_run_is_torchs",
    ),
    "D25": Report(
        "TransformerEngine#2424",
        "test_volume_memory::test_bytes_of_each_role",
        "test_state_dict::test_the_sharded_form_is_labelled_and_divided",
    ),
    "D27": Report(
        "flashoptim#6",
        "test_faults_parameters::test_what_was_saved_resumes_to_the_bit",
    ),
    "D28": Report(
        "Megatron-LM#1515, PR#6616",
        "test_faults_parameters::test_parameters_in_another_order_on_another_rank_are_refused",
        "test_bad_input::test_ranks_that_disagree_get_one_error_on_all",
    ),
    "D30": Report(
        "Megatron-LM#5790",
        "test_contract::test_custom_attributes_of_parameters_stay",
        "test_odd_models::test_shapes_dtypes_and_objects_stay",
    ),
    "D31": Report(
        "pytorch PR#46750 (review)",
        "test_layout::test_equal_sizes_are_laid_out_in_one_way",
    ),
    "D32": Report(
        "Megatron-LM#3793 and megatron_fsdp/param_and_grad_buffer.py (sorted() result"
        " unused)",
        "test_layout::test_padding_is_bounded_by_the_number_of_slots_for_any_sizes",
        "test_layout::test_padding_of_a_gpt_is_under_one_percent",
    ),
    "D33": Report(
        "accelerate#3256",
        "test_faults_parameters::test_a_model_that_moves_away_from_its_optimizer_is_told_so",
        "test_odd_models::test_trains_like_torch",
        "test_bad_input::test_a_parameter_that_was_moved_away",
    ),
    "D35": Report(
        "DeepSpeed#3864, PR#4317",
        "test_faults_parameters::test_sizes_that_blocks_do_not_divide_are_quantised_alike_in_any_world",
        "test_recipes::test_neither_world_nor_stage_nor_bucket_changes_a_bit",
    ),
    "E1": Report(
        "DeepSpeed#8475, #8469; Automodel#3816",
        "test_faults_norm::test_each_optimizer_has_the_norm_over_its_own_group",
    ),
    "E2": Report(
        "DeepSpeed PR#5411",
        "cannot apply: Cannot apply: tensor-parallel parameters are refused by name "
        "(test_faults_parameters::test_tensor_parallel_parameters_are_refused_by_name).",
    ),
    "E3": Report(
        "ROCm TransformerEngine PR#715, NeMo RL PR#3788",
        "cannot apply: Cannot apply: tensor-parallel parameters are refused by name "
        "(test_faults_parameters::test_tensor_parallel_parameters_are_refused_by_name).",
    ),
    "E5": Report(
        "pytorch#170862, PR#126457; miles_diffusion PR#35",
        "test_faults_norm::test_the_norm_is_one_global_number_on_every_rank",
        "test_gradients::test_agrees_with_torch",
    ),
    "E6": Report(
        "pytorch#180346, torchtune#2420",
        "test_faults_norm::test_each_optimizer_has_the_norm_over_its_own_group",
        "test_groups::test_each_group_trains_by_itself",
        "test_faults_parameters::test_tensor_parallel_parameters_are_refused_by_name",
    ),
    "E8": Report(
        "DeepSpeed#7220",
        "test_faults_norm::test_the_norm_before_clipping_is_returned_and_the_one_after_is_applied",
        "test_contract::test_grad_norm_and_skipped_steps_are_tensors_on_the_device",
    ),
    "E9": Report(
        "DeepSpeed#6480",
        "test_faults_norm::test_torchs_clipping_is_right_or_refused_by_name",
        "test_gradients::test_agrees_with_torch",
    ),
    "E11": Report(
        "pytorch#148532, torchtune#1977",
        "cannot apply: Cannot apply: there is no offload.",
    ),
    "E12": Report(
        "ColossalAI source zero/low_level/low_level_optim.py",
        "test_faults_norm::test_a_total_norm_over_several_groups_is_a_root_of_squares",
    ),
    "E13": Report(
        "DeepSpeed#8415",
        "test_faults_norm::test_a_bad_gradient_on_any_rank_skips_the_step_on_all",
        "test_gradients::test_a_skipped_step_is_counted_on_every_rank",
    ),
    "E15": Report(
        "DeepSpeed#697; Chinese-LLaMA-Alpaca#534",
        "test_faults_norm::test_a_loss_scale_recovers_after_overflows",
        "test_faults_norm::test_a_loss_scale_has_a_floor",
    ),
    "E17": Report(
        "Megatron-LM PR#5331",
        "test_faults_norm::test_a_bad_gradient_on_any_rank_skips_the_step_on_all",
        "test_amp::test_scaled_training_is_torchs",
        "test_faults_trainers::test_a_schedule_can_wait_for_skipped_steps",
    ),
    "E18": Report(
        "GradScaler path, accelerate optimizer.py",
        "test_faults_norm::test_torchs_scaler_that_unscales_is_refused_by_name",
        "test_amp::test_torchs_scaler_is_refused_where_it_cannot_see",
        "test_faults_norm::test_a_bad_gradient_on_any_rank_skips_the_step_on_all",
    ),
    "F1": Report(
        "open-instruct PR#1498",
        "test_gradients::test_agrees_with_torch",
    ),
    "F3": Report(
        "DeepSpeed PR#5154, #4083, #3693",
        "test_faults_norm::test_accumulation_in_every_format_is_the_sum",
        "test_parity::test_they_agree_with_bf16_clipping_and_accumulation_too",
    ),
    "F4": Report(
        "DeepSpeed#1800, #2352, #2768",
        "test_faults_norm::test_small_gradients_of_many_micro_batches_are_not_lost",
        "test_parity::test_fp32_wire_keeps_small_bf16_gradients",
    ),
    "F5": Report(
        "pytorch#73784, #98494, PR#100180",
        "cannot apply: Cannot apply: there is no offload; accumulation without it is"
        " F1, F7 and F8.",
    ),
    "F6": Report(
        "accelerate PR#3762, cosmos-framework#161",
        "test_volume_memory::test_no_sync_reduces_once",
        "test_volume_memory::test_stage1_reduces_once_however_many_backwards",
        "test_volume_memory::test_stage2_reduces_every_backward",
        "test_volume_memory::test_stage3_gathers_and_reduces_every_backward",
    ),
    "F7": Report(
        "DeepSpeed#6793, accelerate#3481, LlamaFactory#6194, transformers PR#35157",
        "test_gradients::test_agrees_with_torch",
    ),
    "F8": Report(
        "ColossalAI#247",
        "test_gradients::test_agrees_with_torch",
    ),
    "F10": Report(
        "ColossalAI#5792, DeepSpeed#2329",
        "test_faults_norm::test_a_whole_gradient_is_torchs",
        "test_faults_norm::test_the_parts_of_a_gradient_are_the_whole",
        "test_faults_norm::test_gradients_of_odd_parameters_can_be_read",
        "test_faults_norm::test_the_gradient_of_a_stranger_is_refused",
    ),
    "F11": Report(
        "accelerate#3877, #1970",
        "test_faults_norm::test_the_number_of_micro_batches_changes_nothing",
    ),
    "F13": Report(
        "Megatron-LM PR#5976",
        "test_faults_norm::test_a_state_that_was_asked_for_leaves_the_first_step_the_first",
        "test_state_dict::test_state_exists_before_the_first_step",
        "test_state_dict::test_a_state_without_steps_loads",
    ),
    "F15": Report(
        "zero_grad(set_to_none=...), Megatron-FSDP README note",
        "test_gradients::test_agrees_with_torch",
    ),
    "I1": Report(
        "pytorch#161153",
        "test_faults_compile::test_compiled_units_train_as_uncompiled_ones_bit_for_bit",
    ),
    "I3": Report(
        "pytorch#138813",
        "test_faults_compile::test_nothing_is_compiled_after_the_warm_up",
        "test_faults_compile::test_all_units_share_one_graph",
    ),
    "I4": Report(
        "pytorch PR#181924",
        "test_faults_compile::test_compiled_units_train_as_uncompiled_ones_bit_for_bit",
        "test_faults_compile::test_one_graph_around_the_hooks_of_sharded_units_is_refused_by_name",
    ),
    "I5": Report(
        "compiled optimizer step",
        "test_faults_compile::test_a_compiled_step_follows_the_learning_rate",
    ),
    "J1": Report(
        "measured",
        "test_faults_overlap::test_no_trap_of_gloo_is_stepped_into",
    ),
    "J2": Report(
        "measured",
        "test_faults_overlap::test_no_trap_of_gloo_is_stepped_into",
        "test_odd_models::test_trains_like_torch",
    ),
    "J3": Report(
        "measured",
        "cannot apply: Nothing quantised is sent: Precision.wire takes fp32, bf16 and"
        " fp16 only and refuses other dtypes by name.",
    ),
    "J5": Report(
        "measured",
        "test_faults_overlap::test_no_trap_of_gloo_is_stepped_into",
    ),
    "J6": Report(
        "measured",
        "test_faults_overlap::test_bucket_size_changes_no_bit",
    ),
    "J7": Report(
        "measured",
        "test_faults_overlap::test_nothing_is_deprecated",
    ),
    "J8": Report(
        "n = 1",
        "test_faults_overlap::test_a_world_of_one_is_plain_adamw",
        "test_volume_memory::test_a_world_of_one_sends_nothing",
    ),
    "J9": Report(
        "measured",
        "cannot apply: A rule for measuring, not for code: tests of volume read bytes"
        " from comm_log(), never times.",
    ),
    "L1": Report(
        "torch optim/lr_scheduler.py type check",
        "test_contract::test_it_is_a_torch_optimizer",
        "test_contract::test_schedulers_move_the_rate_as_for_torch",
        "test_contract::test_groups_have_the_keys_of_torch",
        "test_gradients::test_agrees_with_torch",
        "test_faults_parameters::test_groups_keep_index_rate_and_identity_under_a_scheduler",
    ),
    "L2": Report(
        "pytorch-lightning pytorch/plugins/precision/amp.py, strategies/strategy.py",
        "test_faults_trainers::test_closures_work_as_in_torch",
        "test_faults_trainers::test_our_scaler_takes_the_closure_that_is_none",
        "test_faults_trainers::test_accelerate_trains_saves_and_resumes_in_a_world_of_one",
        "test_amp::test_misuse_is_named",
    ),
    "L4": Report(
        "accelerate scheduler.py",
        "test_faults_trainers::test_a_schedule_can_wait_for_skipped_steps",
        "test_faults_trainers::test_accelerate_knows_of_a_skipped_step",
        "test_faults_trainers::test_accelerate_prepares_our_optimizer_and_schedule",
    ),
    "L5": Report(
        "torch amp/grad_scaler.py (_step_supports_amp_scaling)",
        "test_faults_trainers::test_torchs_scaler_unscales_once",
        "test_faults_trainers::test_our_scaler_takes_the_closure_that_is_none",
        "test_amp::test_scaled_training_is_torchs",
        "test_amp::test_the_order_of_unscale_and_clip_does_not_matter",
        "test_faults_norm::test_torchs_scaler_that_unscales_is_refused_by_name",
    ),
    "L6": Report(
        "DeepSpeed pickled loss_scaler object in state",
        "test_faults_trainers::test_a_state_is_tensors_and_plain_values",
        "test_state_dict::test_only_plain_values",
        "test_state_dict::test_torch_saves_and_loads_it_with_weights_only",
    ),
}


def test_every_report_has_its_test() -> None:
    for row, report in REPORTS.items():
        assert report.source and report.places
        for place in report.places:
            if place.startswith(CANNOT):
                assert len(place) > len(CANNOT) + 20, row
                continue
            module, name = place.split("::")
            name = name.partition("[")[0]
            assert re.search(
                rf"^def {name}\(", (TESTS / f"{module}.py").read_text(), re.MULTILINE
            ), (row, place)


def test_no_report_is_left_out() -> None:
    """Rows are numbered with gaps, by group: overlap, hooks, contexts, parameters,
    norms, accumulation, compiling, gloo, trainers."""
    counts = {
        group: sum(row.startswith(group) for row in REPORTS) for group in "ABCDEFIJL"
    }
    assert counts == COUNTS
