"""Subclass of vLLM's FlashAttention backend: KV of shared prefixes is read once per step.

It replaces vLLM's FLASH_ATTN and extends its classes. A step that `cuda_steps` has planned runs
FlashAttention twice per layer, over the shared nodes and over the rows' suffixes, outside CUDA
graphs. All other steps, captured graphs and draft models use vLLM's attention unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionLayer, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils
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
from engine.attention.register import FEATURE
from engine.types.feature_stats import AttentionFallbackReason
from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.sharing_plan import Int32s, SharingPlan

MAX_QUERY_TOKENS = 64
"""Longer rows are bound by computation, so that reading their prefix once gains nothing."""


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
    """Attention metadata of a step with shared prefixes, and the inputs of its two passes.

    `node_schedule` and `suffix_schedule` are FlashAttention 3's scheduler metadata of either pass.
    """

    lists: cuda.StepLists
    suffixes: cuda.SuffixTable
    node_schedule: torch.Tensor | None
    suffix_schedule: torch.Tensor | None

    def attend(
        self,
        impl: Any,
        layer: AttentionLayer,
        *,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        keys, values = (
            impl.cache_view(half)
            for half in torch.split(kv_cache.transpose(1, 2), impl.head_size, dim=-1)
        )
        flash = partial(
            fa_utils.flash_attn_varlen_func,
            k=keys,
            v=values,
            softmax_scale=impl.scale,
            softcap=impl.logits_soft_cap,
            fa_version=impl.vllm_flash_attn_version,
        )
        tokens = self.num_grouped_tokens
        cuda.attend(
            flash,
            self.lists,
            self.suffixes,
            query=query[:tokens],
            query_starts=self.query_start_loc,
            max_query_len=self.max_query_len,
            out=out[:tokens],
            node_options=impl.pass_options(layer, self.node_schedule, len(self.lists.node_tokens)),
            suffix_options=impl.pass_options(layer, self.suffix_schedule, len(self.suffixes.lens)),
        )


class SharedPrefixBuilder(GroupingMetadataBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Attention metadata builder that adds the inputs of both passes to a planned step.

    `plan` is called before vLLM selects the step's CUDA graph, `build` after it.
    """

    # The work of a step belongs to one block table.
    supports_update_block_table = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned: tuple[StepGrouping, Int32s] | None = None
        self._lists: tuple[SharingPlan, Int32s, cuda.StepLists] | None = None
        self._init_grouper()

    @FEATURE.guarded_with_default(None)
    def _init_grouper(self) -> None:
        unsupported = self._unsupported_engine() or self.prepare_layers()
        self.grouper = self.make_grouper(
            unsupported=unsupported,
            layer_bytes_per_token=2
            * self.num_heads_kv
            * self.headdim
            * self.kv_cache_dtype.itemsize,
            max_query_tokens=MAX_QUERY_TOKENS,
            counts_rows=True,
        )

    def _unsupported_engine(self) -> AttentionFallbackReason | None:
        """Reason why no step of this engine can share prefixes."""
        parallel = self.vllm_config.parallel_config
        if not self.vllm_config.use_v2_model_runner:
            return "model_runner"
        if self.dcp_world_size > 1 or parallel.use_ubatching:
            return "parallelism"
        return "batch_invariant" if envs.VLLM_BATCH_INVARIANT else None

    def plan(self, table: Int32s, seq_lens: Int32s, query_starts: Int32s) -> bool:
        """Group the rows of the next step; returns whether any share a prefix.

        The arrays are [rows, columns], [rows] and [rows + 1], on the host. The lengths are upper
        bounds if drafts may yet be rejected. That lengthens no shared prefix, because the blocks
        that rows share were computed in earlier steps.
        """
        if self.grouper is None:
            return False
        grouping = self.grouper.group_rows(table, seq_lens, query_starts)
        self._planned = None if grouping is None else (grouping, query_starts)
        return grouping is not None

    def cancel_plan(self) -> None:
        """Use vLLM's attention in the next step."""
        self._planned = None

    def _is_planned(self, common: CommonAttentionMetadata) -> bool:
        """Return whether these rows were planned: not those of a draft model or a dummy."""
        return (
            self._planned is not None
            and common.req_idx is not None
            and np.array_equal(common.query_start_loc_cpu.numpy(), self._planned[1])
        )

    def group(self, metadata: FlashAttentionMetadata, common: CommonAttentionMetadata) -> Any:
        if self._planned is None or not self._is_planned(common):
            return metadata
        (grouping, query_starts), self._planned = self._planned, None
        if not _is_plain(metadata):
            return metadata
        plan = grouping.plan
        lists = self._step_lists(plan, query_starts)
        lens = common.seq_lens_cpu_upper_bound.numpy()[: common.num_reqs]
        suffixes = cuda.SuffixTable.of(
            lists,
            block_table=common.block_table_tensor,
            seq_lens=common.seq_lens,
            max_len=int((lens - lists.host_suffix_starts).max()),
            block_size=self.block_size,
        )
        fields = vars(metadata) | {"max_num_splits": 0}
        return SharedPrefixMetadata(
            **fields,
            num_grouped_tokens=common.num_actual_tokens,
            max_grouped_len=grouping.max_len,
            tail=None,
            lists=lists,
            suffixes=suffixes,
            node_schedule=self._schedule(
                lists.node_query_starts,
                lists.max_node_query_len,
                lists.node_tokens,
                lists.max_node_tokens,
                causal=False,
            ),
            suffix_schedule=self._schedule(
                metadata.query_start_loc,
                metadata.max_query_len,
                suffixes.lens,
                suffixes.max_len,
                causal=True,
            ),
        )

    def _step_lists(self, plan: SharingPlan, query_starts: Int32s) -> cuda.StepLists:
        last = self._lists
        if last is None or last[0] is not plan or not np.array_equal(last[1], query_starts):
            last = plan, query_starts, cuda.StepLists.of(plan, query_starts, self.device)
            self._lists = last
        return last[2]

    def _schedule(
        self,
        query_starts: torch.Tensor,
        max_query_len: int,
        lens: torch.Tensor,
        max_len: int,
        *,
        causal: bool,
    ) -> torch.Tensor | None:
        """FlashAttention 3's scheduler metadata of one pass; None for other versions."""
        return self._get_scheduler_metadata(  # type: ignore[no-any-return]
            aot_schedule=self.aot_schedule,
            batch_size=len(lens),
            cu_query_lens=query_starts,
            max_query_len=max_query_len,
            seqlens=lens,
            max_seq_len=max_len,
            causal=causal,
            max_num_splits=0,
        )


def _is_plain(metadata: FlashAttentionMetadata) -> bool:
    """Return whether all query tokens attend causally to all earlier tokens of their row."""
    return (
        metadata.causal is True
        and metadata.mm_prefix_query_range_tensor is None
        and metadata.rswa_prefix_lens is None
    )


class SharedPrefixImpl(GroupedAttentionImpl, FlashAttentionImpl):  # type: ignore[misc]
    """Attention layer that runs FlashAttention twice in steps with shared prefixes."""

    def unsupported_reason(self, builder: SharedPrefixBuilder) -> AttentionFallbackReason | None:
        reasons: dict[AttentionFallbackReason, bool] = {
            "head_size": self.fa4_hd256,
            "not_causal": self.attn_type != AttentionType.DECODER,
            "sliding_window": self.sliding_window != (-1, -1),
            "alibi": self.alibi_slopes is not None,
            "sinks": self.sinks is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def cache_view(self, half: torch.Tensor) -> torch.Tensor:
        """Keys or values of the KV cache as FlashAttention reads them."""
        half = canonicalize_singleton_dim_strides(half)
        if is_quantized_kv_cache(self.kv_cache_dtype):
            return half.view(current_platform.fp8_dtype())
        return half

    def pass_options(
        self, layer: Any, schedule: torch.Tensor | None, num_sequences: int
    ) -> Mapping[str, Any]:
        """Arguments of one FlashAttention call that depend on its number of sequences."""
        shape = num_sequences, self.num_kv_heads
        return {
            "scheduler_metadata": schedule,
            "num_splits": 0,
            "q_descale": layer._q_scale.expand(shape) if self.supports_quant_query_input else None,
            "k_descale": layer._k_scale.expand(shape),
            "v_descale": layer._v_scale.expand(shape),
        }
