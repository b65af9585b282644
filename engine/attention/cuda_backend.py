"""GPU attention backend: FlashAttention, with shared prefixes read once by Triton kernels.

It replaces vLLM's FLASH_ATTN and extends its classes. A step's work list is written to buffers at
fixed addresses, so a captured CUDA graph reads the list of the step it is replayed for. Therefore a
step of decode rows only, which graphs are captured for, always runs the kernel, if need be with
nothing shared. In other steps prefill rows use FlashAttention.

This has not been run on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from engine.attention.base_backend import (
    GroupedAttentionImpl,
    GroupedMetadata,
    GroupingMetadataBuilder,
)
from engine.attention.grouping import StepGrouping
from engine.attention.host_block_tables import FEATURE, host_table
from engine.feature_stats import AttentionFallbackReason
from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.gpu_work_list import WorkList, WorkShape
from kernels.shared_prefix_attention.sharing_plan import SharingPlan


class SharedPrefixBackend(FlashAttentionBackend):  # type: ignore[misc]
    """Replacement for vLLM's FLASH_ATTN backend."""

    @staticmethod
    def get_impl_cls() -> type["SharedPrefixImpl"]:
        return SharedPrefixImpl

    @staticmethod
    def get_builder_cls() -> type["SharedPrefixBuilder"]:
        return SharedPrefixBuilder


@dataclass(kw_only=True)
class SharedPrefixMetadata(GroupedMetadata, FlashAttentionMetadata):  # type: ignore[misc]
    """Attention metadata of a step with grouped rows, and the work list of the Triton kernels."""

    work: WorkList

    def attend(
        self, *, query: torch.Tensor, kv_cache: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        keys, values = torch.split(kv_cache.transpose(1, 2), query.shape[-1], dim=-1)
        cuda.decode(
            self.work,
            query=query,
            key_cache=keys,
            value_cache=values,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            scale=scale,
            out=out,
        )


class SharedPrefixBuilder(GroupingMetadataBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Attention metadata builder that fills the Triton kernels' work list in each step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Decode rows, including those with drafts, are ordered before all others.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._max_query_tokens = self.reorder_batch_threshold
        self._capturing = False
        self._work: WorkList | None = None
        self._init_grouper()

    @FEATURE.guarded_with_default(None)
    def _init_grouper(self) -> None:
        unsupported = self.prepare_layers()
        if unsupported is None:
            self._work = WorkList(self._work_shape(), self.device)
        self.grouper = self.make_grouper(
            unsupported=unsupported,
            layer_bytes_per_token=2
            * self.num_heads_kv
            * self.headdim
            * self.kv_cache_dtype.itemsize,
            max_query_tokens=self._max_query_tokens,
        )

    def _work_shape(self) -> WorkShape:
        scheduler = self.vllm_config.scheduler_config
        blocks_per_row = -(-self.model_config.max_model_len // self.block_size)
        return WorkShape(
            num_heads=self.num_heads_q,
            num_kv_heads=self.num_heads_kv,
            head_size=self.headdim,
            block_size=self.block_size,
            max_rows=scheduler.max_num_seqs,
            max_query_tokens=self._max_query_tokens,
            max_node_blocks=scheduler.max_num_seqs * blocks_per_row // 2,
            num_processors=torch.cuda.get_device_properties(self.device).multi_processor_count,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """Build metadata without shared prefixes, as captured rows are dummies without blocks."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def on_failed_step(self, common: CommonAttentionMetadata) -> None:
        """Fill the work list, which CUDA graphs captured before the failure still read."""
        if self._work is not None and common.max_query_len <= self._max_query_tokens:
            _fill(self._work, nothing_shared(common.num_reqs), _lens(common, common.num_reqs))

    def group(self, metadata: FlashAttentionMetadata, common: CommonAttentionMetadata) -> Any:
        # Rows that pad the batch to a captured graph have no queries; they come last.
        num_reqs = int(np.count_nonzero(np.diff(common.query_start_loc_cpu.numpy())))
        grouping = None if self._capturing else self._group_rows(common, num_reqs)
        work = self._work
        if work is None or metadata.causal is not True:
            return metadata
        if grouping is None:
            if common.max_query_len > self._max_query_tokens:
                return metadata
            plan, num_tokens = nothing_shared(num_reqs), common.num_actual_tokens
            grouping = StepGrouping(plan=plan, num_rows=num_reqs, num_tokens=num_tokens)
        tail = self.tail(common, grouping, num_reqs)
        if not _fill(work, grouping.plan, _lens(common, grouping.num_rows)):
            _fill(work, nothing_shared(grouping.num_rows), _lens(common, grouping.num_rows))
        return SharedPrefixMetadata(
            **vars(metadata), num_grouped_tokens=grouping.num_tokens, tail=tail, work=work
        )

    def _group_rows(self, common: CommonAttentionMetadata, num_reqs: int) -> StepGrouping | None:
        assert self.grouper is not None, "the feature is enabled, so the grouper exists"
        table = host_table(common.block_table_tensor, common.req_idx, num_reqs)
        assert table is not None, "the runner's block table was not recorded"
        starts = common.query_start_loc_cpu.numpy()[: num_reqs + 1]
        return self.grouper.group_rows(table, _lens(common, num_reqs), starts)


def _lens(common: CommonAttentionMetadata, num_rows: int) -> Any:
    """Upper bounds of a step's sequence lengths; the exact lengths are only on the device.

    The bounds are exact for prefill rows. The blocks that a decode row shares were computed in
    earlier steps, so counting drafts that may yet be rejected makes no shared prefix longer.
    """
    return common.seq_lens_cpu_upper_bound.numpy()[:num_rows]


def _fill(work: WorkList, plan: SharingPlan, lens: Any) -> bool:
    return work.fill(plan, (lens - plan.suffix_starts).astype(np.int32))


def nothing_shared(num_rows: int) -> SharingPlan:
    """Sharing plan of `num_rows` rows without shared prefixes."""
    none, offset = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return SharingPlan(
        node_blocks=none,
        node_block_offsets=offset,
        node_tokens=none,
        node_rows=none,
        node_row_offsets=offset,
        suffix_starts=np.zeros(num_rows, np.int32),
    )


class SharedPrefixImpl(GroupedAttentionImpl, FlashAttentionImpl):  # type: ignore[misc]
    """Attention layer that runs rows with shared prefixes in the Triton kernels."""

    def unsupported_reason(self, builder: SharedPrefixBuilder) -> AttentionFallbackReason | None:
        reasons: dict[AttentionFallbackReason, bool] = {
            "kv_cache_dtype": builder.kv_cache_dtype not in cuda.DTYPES,
            "head_size": self.head_size not in cuda.HEAD_SIZES,
            "not_causal": self.attn_type != AttentionType.DECODER,
            "sliding_window": self.sliding_window != (-1, -1),
            "soft_cap": bool(self.logits_soft_cap),
            "alibi": self.alibi_slopes is not None,
            "sinks": self.sinks is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)
