"""FlashAttention on a GPU with shared prefixes read once per step by the Triton kernels.

It replaces FLASH_ATTN and extends its classes. A step's work list is written to buffers at fixed
addresses, so a captured CUDA graph reads the list of the step it is replayed for. Therefore a step
of decode rows only, which graphs are captured for, always runs the kernel, if need be with nothing
shared. In other steps prefill rows use FlashAttention.

This has not been run on a GPU.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from engine.attention.block_tables import FEATURE, host_table
from engine.attention.counters import COUNTERS
from engine.attention.grouping import StepGrouper, StepGrouping
from engine.attention.register import settings
from engine.attention.unshared_metadata import unshared_tail
from engine.stats import AttentionFallbackReason
from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.plan import SharingPlan
from kernels.shared_prefix_attention.work_list import WorkList, WorkShape


class SharedPrefixBackend(FlashAttentionBackend):  # type: ignore[misc]
    """Replacement for vLLM's FLASH_ATTN backend."""

    @staticmethod
    def get_impl_cls() -> type["SharedPrefixImpl"]:
        return SharedPrefixImpl

    @staticmethod
    def get_builder_cls() -> type["SharedPrefixBuilder"]:
        return SharedPrefixBuilder


@dataclass(kw_only=True)
class SharedPrefixMetadata(FlashAttentionMetadata):  # type: ignore[misc]
    """Stock metadata of the step, the kernel's work list, and stock metadata of the rest."""

    work: WorkList
    num_tokens: int
    tail: FlashAttentionMetadata | None


class SharedPrefixBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Metadata builder that fills the kernel's work list in each step."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Decode rows, including those with drafts, are ordered before all others.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._max_query_tokens = self.reorder_batch_threshold
        self._capturing = False
        self._work: WorkList | None = None
        self._grouper: StepGrouper | None = self._make_grouper()

    def _no_grouper(self) -> StepGrouper | None:
        return None

    @FEATURE.guarded(_no_grouper)
    def _make_grouper(self) -> StepGrouper | None:
        unsupported = self._unsupported()
        if unsupported is None:
            self._work = WorkList(self._work_shape(), self.device)
        num_bytes = 2 * self.num_heads_kv * self.headdim * self.kv_cache_dtype.itemsize
        return StepGrouper(
            mode=settings().shared_prefix,
            block_size=self.block_size,
            bytes_per_token=num_bytes * len(self.layer_names),
            max_query_tokens=self._max_query_tokens,
            counts=COUNTERS,
            unsupported=unsupported,
        )

    def _unsupported(self) -> AttentionFallbackReason | None:
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        reasons = [layer.impl.prepare(self.kv_cache_dtype) for layer in layers.values()]
        return None if None in reasons else next(iter(reasons), "failed")

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
        """Build metadata with nothing shared: rows of a capture are dummies without blocks."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self._with_grouping(metadata, common_attn_metadata, self._work)

    def _without_grouping(
        self,
        metadata: FlashAttentionMetadata,
        common: CommonAttentionMetadata,
        work: WorkList | None,
    ) -> FlashAttentionMetadata:
        """Stock metadata after a failure.

        Graphs captured before still read the work list, so it is filled.
        """
        COUNTERS.skipped("failed")
        if work is not None and common.max_query_len <= self._max_query_tokens:
            _fill(work, nothing_shared(common.num_reqs), _lens(common, common.num_reqs))
        return metadata

    @FEATURE.guarded(_without_grouping)
    def _with_grouping(
        self,
        metadata: FlashAttentionMetadata,
        common: CommonAttentionMetadata,
        work: WorkList | None,
    ) -> FlashAttentionMetadata:
        # Rows that pad the batch to a captured graph have no queries; they come last.
        num_reqs = int(np.count_nonzero(np.diff(common.query_start_loc_cpu.numpy())))
        grouping = None if self._capturing else self._share(common, num_reqs)
        if work is None or metadata.causal is not True:
            return metadata
        if grouping is None:
            if common.max_query_len > self._max_query_tokens:
                return metadata
            plan, num_tokens = nothing_shared(num_reqs), common.num_actual_tokens
            grouping = StepGrouping(plan=plan, num_rows=num_reqs, num_tokens=num_tokens)
        tail = None
        if grouping.num_rows < num_reqs:
            tail = super().build(0, unshared_tail(common, grouping))
        if not _fill(work, grouping.plan, _lens(common, grouping.num_rows)):
            _fill(work, nothing_shared(grouping.num_rows), _lens(common, grouping.num_rows))
        return SharedPrefixMetadata(
            **vars(metadata), work=work, num_tokens=grouping.num_tokens, tail=tail
        )

    def _share(self, common: CommonAttentionMetadata, num_reqs: int) -> StepGrouping | None:
        assert self._grouper is not None, "the feature is on, so its sharer was made"
        table = host_table(common.block_table_tensor, common.req_idx, num_reqs)
        assert table is not None, "the runner's block table has not been noted"
        starts = common.query_start_loc_cpu.numpy()[: num_reqs + 1]
        return self._grouper.group_rows(table, _lens(common, num_reqs), starts)


def _lens(common: CommonAttentionMetadata, num_rows: int) -> Any:
    """Upper bounds of the sequence lengths; the exact ones are only on the device.

    They are exact for prefill rows. The blocks that a decode row shares were computed in earlier
    steps, so counting drafts that may yet be rejected makes no shared prefix longer.
    """
    return common.seq_lens_cpu_upper_bound.numpy()[:num_rows]


def _fill(work: WorkList, plan: SharingPlan, lens: Any) -> bool:
    return work.fill(plan, (lens - plan.suffix_starts).astype(np.int32))


def nothing_shared(num_rows: int) -> SharingPlan:
    """A plan for rows without shared prefixes."""
    none, offset = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return SharingPlan(
        node_blocks=none,
        node_block_offsets=offset,
        node_tokens=none,
        node_rows=none,
        node_row_offsets=offset,
        suffix_starts=np.zeros(num_rows, np.int32),
    )


class SharedPrefixImpl(FlashAttentionImpl):  # type: ignore[misc]
    """Attention layer that runs grouped rows in the shared-prefix kernel."""

    _supported = False

    def prepare(self, kv_cache_dtype: torch.dtype) -> AttentionFallbackReason | None:
        """Enable the kernel for this layer, or return the reason why it stays with stock attention.

        Called by the builder, which knows the KV cache.
        """
        reason = self._unsupported(kv_cache_dtype)
        self._supported = reason is None
        return reason

    def _unsupported(self, kv_cache_dtype: torch.dtype) -> AttentionFallbackReason | None:
        reasons: dict[AttentionFallbackReason, bool] = {
            "kv_cache_dtype": kv_cache_dtype not in cuda.DTYPES,
            "head_size": self.head_size not in cuda.HEAD_SIZES,
            "not_causal": self.attn_type != AttentionType.DECODER,
            "sliding_window": self.sliding_window != (-1, -1),
            "soft_cap": bool(self.logits_soft_cap),
            "alibi": self.alibi_slopes is not None,
            "sinks": self.sinks is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @FEATURE.guarded(FlashAttentionImpl.forward)
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
        **named_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        stock = functools.partial(super().forward, layer)
        if not (self._supported and isinstance(attn_metadata, SharedPrefixMetadata)):
            given = (query, key, value, kv_cache, attn_metadata, output)
            stock(*given, *scales, **named_scales)
            return output
        if attn_metadata.tail is not None:
            tokens = slice(attn_metadata.num_tokens, attn_metadata.num_actual_tokens)
            stock(query[tokens], key, value, kv_cache, attn_metadata.tail, output[tokens])
        keys, values = torch.split(kv_cache.transpose(1, 2), self.head_size, dim=-1)
        cuda.decode(
            attn_metadata.work,
            query=query,
            key_cache=keys,
            value_cache=values,
            block_table=attn_metadata.block_table,
            seq_lens=attn_metadata.seq_lens,
            query_start_loc=attn_metadata.query_start_loc,
            scale=self.scale,
            out=output,
        )
        return output
