"""Attention metadata of the rows that stock attention computes, after the grouped rows."""

from vllm.v1.attention.backend import CommonAttentionMetadata

from engine.attention.grouping import StepGrouping


def unshared_tail(
    common: CommonAttentionMetadata, grouping: StepGrouping
) -> CommonAttentionMetadata:
    """Metadata of the remaining rows as a step of their own."""
    rows, tokens = grouping.num_rows, grouping.num_tokens
    lens = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=common.query_start_loc[rows:] - tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[rows:] - tokens,
        seq_lens=common.seq_lens[rows:],
        seq_lens_cpu_upper_bound=None if lens is None else lens[rows:],
        num_reqs=common.num_reqs - rows,
        num_actual_tokens=common.num_actual_tokens - tokens,
        block_table_tensor=common.block_table_tensor[rows:],
        slot_mapping=common.slot_mapping[tokens:],
    )
