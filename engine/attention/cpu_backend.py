"""vLLM's CPU attention with shared prefixes read once per step where supported and faster.

It replaces CPU_ATTN and extends its classes: the KV cache, its layout and its writes stay vLLM's.
Rows that share nothing are part of the same kernel call. Prefill rows, and steps and layers that
the kernel does not support, use stock attention. So does everything after the first failure here.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionLayer, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from engine.attention import cpu_calibration, crossover_cache
from engine.attention.counters import COUNTERS
from engine.attention.crossover import Crossover
from engine.attention.grouping import StepGrouper, StepGrouping
from engine.attention.register import settings
from engine.attention.unshared_metadata import unshared_tail
from engine.runtime.guard import feature
from engine.stats import AttentionFallbackReason
from kernels.shared_prefix_attention import cpu

logger = logging.getLogger(__name__)

FEATURE = feature("shared-prefix attention")


class SharedPrefixBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Replacement for vLLM's CPU_ATTN backend."""

    @staticmethod
    def get_impl_cls() -> type["SharedPrefixImpl"]:
        return SharedPrefixImpl

    @staticmethod
    def get_builder_cls() -> type["SharedPrefixBuilder"]:
        return SharedPrefixBuilder


@dataclass(kw_only=True)
class SharedPrefixMetadata(CPUAttentionMetadata):  # type: ignore[misc]
    """Stock metadata of the step, its shared part, and stock metadata of the other rows."""

    grouping: StepGrouping
    decode_step: cpu.DecodeStep
    tail: CPUAttentionMetadata | None


class SharedPrefixBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Metadata builder that groups the rows of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The runner then orders rows with few query tokens before those with many.
        self._init_reorder_batch_threshold(cpu.MAX_QUERY_TOKENS)
        self.grouper: StepGrouper | None = self._make_grouper()

    def _no_grouper(self) -> StepGrouper | None:
        return None

    @FEATURE.guarded(_no_grouper)
    def _make_grouper(self) -> StepGrouper | None:
        mode, unsupported = settings().shared_prefix, self._unsupported()
        num_bytes = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return StepGrouper(
            mode=mode,
            block_size=self.block_size,
            bytes_per_token=num_bytes * len(self.layer_names),
            max_query_tokens=cpu.MAX_QUERY_TOKENS,
            counts=COUNTERS,
            unsupported=unsupported,
            crossover=self._crossover() if mode == "auto" and unsupported is None else None,
        )

    def _unsupported(self) -> AttentionFallbackReason | None:
        """The reason why no layer of the group is supported, or None if any layer is."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        reasons = [
            layer.impl.prepare(self.dtype, self.isa, self.block_size) for layer in layers.values()
        ]
        if "not_built" in reasons:
            logger.warning("the shared-prefix kernel was not built: vLLM's own attention serves")
        return None if None in reasons else next(iter(reasons), "failed")

    def _crossover(self) -> Crossover:
        geometry = cpu_calibration.LayerGeometry(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            isa=self.isa,
        )
        return crossover_cache.crossover(
            settings().cache_directory,
            geometry.cache_key() | {"kernel": cpu.version(), "vllm": vllm_version},
            lambda: cpu_calibration.measure_trials(geometry),
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self._with_grouping(metadata, common_attn_metadata)

    def _failed(
        self, metadata: CPUAttentionMetadata, common: CommonAttentionMetadata
    ) -> CPUAttentionMetadata:
        COUNTERS.skipped("failed")
        return metadata

    @FEATURE.guarded(_failed)
    def _with_grouping(
        self, metadata: CPUAttentionMetadata, common: CommonAttentionMetadata
    ) -> CPUAttentionMetadata:
        if metadata.causal is not True:
            COUNTERS.skipped("not_causal")
            return metadata
        assert self.grouper is not None, "the feature is on, so its sharer was made"
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
        tail = super().build(0, unshared_tail(common, grouping)) if rows < common.num_reqs else None
        return SharedPrefixMetadata(
            **vars(metadata), grouping=grouping, decode_step=decode_step, tail=tail
        )


class SharedPrefixImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention layer that runs grouped rows in the shared-prefix kernel."""

    _supported = False

    def prepare(
        self, dtype: torch.dtype, isa: str, block_size: int
    ) -> AttentionFallbackReason | None:
        """Enable the kernel for this layer, or return the reason why it stays with stock attention.

        Called by the builder, which knows the KV cache.
        """
        reason = self._unsupported(dtype, isa, block_size)
        self._supported = reason is None
        return reason

    def _unsupported(
        self, dtype: torch.dtype, isa: str, block_size: int
    ) -> AttentionFallbackReason | None:
        if self.is_fp8_kv_cache:
            return "kv_cache_dtype"
        reason = cpu.unsupported_reason(
            dtype=dtype,
            kv_cache_dtype=dtype,
            layout=isa,
            head_size=self.head_size,
            block_size=block_size,
            causal=self.attn_type == AttentionType.DECODER,
            sliding_window=self.sliding_window != -1,
            soft_cap=bool(self.logits_soft_cap),
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
        )
        return None if reason is None else reason.value

    @FEATURE.guarded(CPUAttentionBackendImpl.forward)
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
        **named_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        stock, step = super().forward, attn_metadata
        if not (self._supported and isinstance(step, SharedPrefixMetadata)):
            stock(layer, query, key, value, kv_cache, step, output, *scales, **named_scales)
            return output
        if step.tail is not None:
            tail_tokens = slice(step.grouping.num_tokens, step.num_actual_tokens)
            stock(layer, query[tail_tokens], key, value, kv_cache, step.tail, output[tail_tokens])
        step.decode_step.layer(query=query, cache=kv_cache, scale=self.scale, out=output)
        return output
