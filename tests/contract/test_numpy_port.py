"""The tests of the other files, over a port that has no kernel at all: what the defaults of the driver do (clause B6)."""

from __future__ import annotations

import pytest

from forebay.specs import Backend
from forebay.specs.suite import (
    test_decode,
    test_decode_bits,
    test_decode_inputs,
    test_decode_sizes,
    test_door_rows,
    test_doors,
    test_invalid_blocks,
    test_layouts,
    test_merging,
    test_row_operations,
    test_shadows,
    test_staging,
    test_wrapped_memory,
    test_write_loc,
)

SHARED = (
    test_decode.test_a_3d_query_is_one_query,
    test_decode.test_a_window_counts_the_current_token,
    test_decode.test_any_group_of_query_heads,
    test_decode.test_any_layout,
    test_decode.test_every_parameter,
    test_decode.test_layers_are_apart,
    test_decode.test_several_queries,
    test_decode.test_the_output_has_the_dtype_of_q,
    test_decode.test_what_lies_behind_the_visible_range_never_leaks,
    test_decode_bits.test_a_query_among_several_equals_the_query_alone,
    test_decode_bits.test_only_the_switch_selects_gather,
    test_decode_inputs.test_a_query_of_the_wrong_shape_is_refused,
    test_decode_inputs.test_a_ragged_page_list_is_refused,
    test_decode_inputs.test_a_wrong_argument_is_refused,
    test_decode_inputs.test_any_row_and_column_stride_of_a_table,
    test_decode_inputs.test_any_table_width,
    test_decode_inputs.test_int32_and_host_int64_tables_are_taken,
    test_decode_inputs.test_other_host_types_are_refused_by_name,
    test_decode_inputs.test_page_lists_of_different_lengths_are_rows_of_a_table,
    test_decode_sizes.test_many_heads_share_one_latent_row,
    test_decode_sizes.test_many_queries_of_many_heads,
    test_door_rows.test_a_door_rounds_rows_to_the_pools_dtype,
    test_door_rows.test_a_wrong_location_is_refused_at_every_door,
    test_door_rows.test_nan_and_inf_survive_the_door,
    test_door_rows.test_no_rows_are_a_legal_call,
    test_door_rows.test_wrong_rows_and_layers_are_refused,
    test_doors.test_a_copy_drops_a_row_once,
    test_doors.test_a_copy_reads_before_it_writes_and_moves_bits,
    test_doors.test_a_pad_writes_nothing_and_never_wraps,
    test_doors.test_an_id_outside_the_pool_raises_on_the_host_and_is_counted_on_the_device,
    test_doors.test_any_device_ids_do_what_the_rule_says,
    test_doors.test_duplicate_slots_of_one_host_known_call_are_refused,
    test_doors.test_every_layer_counts_what_it_drops,
    test_doors.test_rows_of_one_call_in_one_block_land_whole_in_any_order,
    test_doors.test_sink_ids_are_dropped_and_counted,
    test_invalid_blocks.test_an_empty_row_is_zero_whatever_the_maximum,
    test_invalid_blocks.test_an_invalid_block_is_zero_rows_that_take_part,
    test_invalid_blocks.test_an_overhanging_table_entry_is_never_read,
    test_invalid_blocks.test_invalid_blocks_anywhere_meet_the_oracle,
    test_invalid_blocks.test_many_missing_rows_under_every_parameter,
    test_invalid_blocks.test_nothing_but_empty_rows,
    test_invalid_blocks.test_visible_beyond_the_table_known_to_the_device_only,
    test_layouts.test_a_row_lands_where_its_layout_says,
    test_layouts.test_every_layout_answers_alike,
    test_merging.test_any_number_of_parts_is_merged,
    test_merging.test_empty_parts_weigh_nothing_whatever_they_hold,
    test_merging.test_merged_parts_keep_their_dtype,
    test_merging.test_parts_of_a_sequence_merge_to_the_whole,
    test_merging.test_parts_that_do_not_belong_together_are_refused,
    test_merging.test_the_lse_is_a_natural_logarithm,
    test_row_operations.test_a_bitcast_keeps_every_bit,
    test_row_operations.test_a_cutoff_is_the_largest_whose_mass_is_reached,
    test_row_operations.test_a_lone_row_has_the_bits_it_has_among_others,
    test_row_operations.test_additions_reach_their_columns_and_no_others,
    test_row_operations.test_draws_are_a_published_hash_of_seed_position_and_token,
    test_row_operations.test_integer_sums_wrap,
    test_row_operations.test_the_k_largest_come_in_falling_order_the_first_of_equals_first,
    test_row_operations.test_the_kth_largest_counts_equals_one_by_one,
    test_row_operations.test_the_penalty_reaches_the_columns_of_the_bitmap,
    test_row_operations.test_variates_are_gumbels_of_the_hash,
    test_shadows.test_old_rows_of_a_recycled_slot_are_never_read,
    test_staging.test_any_view_is_staged_bit_for_bit,
    test_staging.test_latent_kv_is_staged_without_v,
    test_staging.test_many_blocks_are_staged_whole,
    test_staging.test_special_bits_survive_staging,
    test_wrapped_memory.test_foreign_memory_that_is_not_claimed_is_refused_by_name,
    test_write_loc.test_a_table_entry_that_is_no_block_is_counted_at_every_offset,
    test_write_loc.test_only_the_first_table_len_columns_are_blocks,
    test_write_loc.test_positions_and_a_table_are_lowered_to_slots,
    test_write_loc.test_unmarked_ids_are_refused_at_every_door,
)
globals().update(
    {test.__name__: test for test in SHARED}
)  # pytest collects them here a second time, over this file's backend


@pytest.fixture(scope="module")
def backend(port: Backend) -> Backend:
    """The port without a kernel, in place of the backend of the other files."""
    return port
