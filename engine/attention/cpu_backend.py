"""Subclass of vLLM's CPU attention backend: KV of shared prefixes is read once per step.

It replaces vLLM's CPU_ATTN and extends its classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.v1.attention.backend import AttentionLayer, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from engine.attention import cpu_calibration, crossover
from engine.attention.base_backend import (
    GroupedAttentionImpl,
    GroupedMetadata,
    GroupingMetadataBuilder,
)
from engine.attention.counters import COUNTERS
from engine.attention.crossover import Crossover
from engine.attention.register import FEATURE, settings
from engine.runtime.process_environment import cache_directory
from engine.types.feature_stats import AttentionFallbackReason
from kernels.shared_prefix_attention import cpu


class SharedPrefixBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Replacement for vLLM's CPU_ATTN backend."""

    @staticmethod
    def get_impl_cls() -> type["SharedPrefixImpl"]:
        return SharedPrefixImpl

    @staticmethod
    def get_builder_cls() -> type["SharedPrefixBuilder"]:
        return SharedPrefixBuilder


@dataclass(kw_only=True)
class SharedPrefixMetadata(GroupedMetadata, CPUAttentionMetadata):  # type: ignore[misc]
    """Attention metadata of a step with grouped rows, and the CPU kernel's arguments for them."""

    decode_step: cpu.DecodeStep

    def attend(
        self,
        impl: Any,
        layer: AttentionLayer,
        *,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self.decode_step.layer(
            query=query, cache=kv_cache, scale=impl.scale, out=out, sinks=impl.sinks
        )


class SharedPrefixBuilder(GroupingMetadataBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Attention metadata builder on CPUs that groups the rows of each step by shared prefix."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The runner then orders rows with few query tokens before those with many.
        self._init_reorder_batch_threshold(cpu.MAX_QUERY_TOKENS)
        self._init_grouper()

    @FEATURE.guarded_with_default(None)
    def _init_grouper(self) -> None:
        unsupported = self.prepare_layers()
        is_measured = settings().shared_prefix == "auto" and unsupported is None
        self.grouper = self.make_grouper(
            unsupported=unsupported,
            layer_bytes_per_token=2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize,
            max_query_tokens=cpu.MAX_QUERY_TOKENS,
            crossover=self._crossover() if is_measured else None,
        )

    def _crossover(self) -> Crossover:
        geometry = cpu_calibration.LayerGeometry(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            isa=self.isa,
        )
        return crossover.crossover(
            cache_directory("attention"),
            geometry.cache_key() | {"kernel": cpu.version(), "vllm": vllm_version},
            lambda: cpu_calibration.measure_trials(geometry),
        )

    def group(self, metadata: CPUAttentionMetadata, common: CommonAttentionMetadata) -> Any:
        if metadata.causal is not True:
            COUNTERS.record_skipped("not_causal")
            return metadata
        assert self.grouper is not None, "the feature is enabled, so the grouper exists"
        grouping = self.grouper.group_rows(
            metadata.block_table.numpy(),
            metadata.seq_lens.numpy(),
            metadata.query_start_loc.numpy(),
        )
        if grouping is None:
            return metadata
        rows = grouping.num_rows
        decode_step = cpu.DecodeStep(
            grouping.plan,
            block_table=metadata.block_table[:rows],
            seq_lens=metadata.seq_lens[:rows],
            query_start_loc=metadata.query_start_loc[: rows + 1],
        )
        return SharedPrefixMetadata(
            **vars(metadata),
            num_grouped_tokens=grouping.num_tokens,
            max_grouped_len=grouping.max_len,
            tail=self.tail(common, grouping, common.num_reqs),
            decode_step=decode_step,
        )


class SharedPrefixImpl(GroupedAttentionImpl, CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention layer that runs rows with shared prefixes in the compiled CPU kernel."""

    @property
    def window(self) -> int | None:
        return None if self.sliding_window == -1 else self.sliding_window

    def unsupported_reason(self, builder: SharedPrefixBuilder) -> AttentionFallbackReason | None:
        if self.is_fp8_kv_cache:
            return "kv_cache_dtype"
        reason = cpu.unsupported_reason(
            dtype=builder.dtype,
            kv_cache_dtype=builder.dtype,
            layout=builder.isa,
            head_size=self.head_size,
            block_size=builder.block_size,
            causal=self.attn_type == AttentionType.DECODER,
            soft_cap=bool(self.logits_soft_cap),
            alibi=self.alibi_slopes is not None,
        )
        return None if reason is None else reason.value
