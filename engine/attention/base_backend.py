"""Device-independent base classes of the shared-prefix attention backends.

A backend's classes inherit from the classes here and then from vLLM's for the device, which are
reached by `super()`: the KV cache, its layout and its writes stay vLLM's. Rows that share nothing
are part of the same kernel call. Prefill rows, and steps and layers that the kernel does not
support, use vLLM's attention. So does everything after the first failure here.
"""

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from engine.attention.counters import COUNTERS
from engine.attention.crossover import Crossover
from engine.attention.grouping import StepGrouper, StepGrouping
from engine.attention.register import FEATURE, settings
from engine.types.feature_stats import AttentionFallbackReason

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class GroupedMetadata(ABC):
    """Attention metadata of a step whose first tokens run in the shared-prefix kernel.

    `num_grouped_tokens` is the number of these tokens, `max_grouped_len` the length of the longest
    of their rows. `tail` is vLLM's own metadata of the other rows, None if there are none.
    Subclasses also extend vLLM's metadata of the device.
    """

    num_grouped_tokens: int
    max_grouped_len: int
    tail: Any

    @abstractmethod
    def attend(
        self,
        impl: Any,
        layer: AttentionLayer,
        *,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Run the shared-prefix kernel of one layer for the grouped tokens."""


class GroupingMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Attention metadata builder that groups the rows of each step by shared prefix."""

    grouper: StepGrouper | None = None
    """None if its construction failed; shared-prefix attention is then disabled."""
    windows: Sequence[int | None] = ()
    """Sliding windows of the layers that the kernel supports."""

    def make_grouper(
        self,
        *,
        unsupported: AttentionFallbackReason | None,
        layer_bytes_per_token: int,
        max_query_tokens: int,
        crossover: Crossover | None = None,
        counts_rows: bool = False,
    ) -> StepGrouper:
        return StepGrouper(
            mode=settings().shared_prefix,
            block_size=self.block_size,
            bytes_per_token=layer_bytes_per_token * len(self.windows),
            max_query_tokens=max_query_tokens,
            counts=COUNTERS,
            unsupported=unsupported,
            crossover=crossover,
            counts_rows=counts_rows,
            window=max((window or sys.maxsize for window in self.windows), default=None),
        )

    def prepare_layers(self) -> AttentionFallbackReason | None:
        """Enable the kernel in each supported layer; returns a reason if no layer is supported."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        reasons = [layer.impl.prepare(self) for layer in layers.values()]
        self.windows = [
            layer.impl.window
            for layer, reason in zip(layers.values(), reasons, strict=True)
            if reason is None
        ]
        if "not_built" in reasons:
            logger.warning("shared-prefix attention kernel not built; using stock attention")
        return None if None in reasons else next(iter(reasons), "failed")

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self.grouped_or_stock(metadata, common_attn_metadata)

    def _stock_after_failure(self, metadata: Any, common: CommonAttentionMetadata) -> Any:
        COUNTERS.record_skipped("failed")
        return metadata

    @FEATURE.guarded(_stock_after_failure)
    def grouped_or_stock(self, metadata: Any, common: CommonAttentionMetadata) -> Any:
        """Grouped metadata of a step, or vLLM's `metadata` if the step uses vLLM's attention."""
        return self.group(metadata, common)

    @abstractmethod
    def group(self, metadata: Any, common: CommonAttentionMetadata) -> Any:
        """Grouped metadata of a step, or vLLM's `metadata` if grouping does not pay."""

    def tail(self, common: CommonAttentionMetadata, grouping: StepGrouping, num_rows: int) -> Any:
        """vLLM's metadata of the rows after the grouped ones, None if all rows are grouped.

        `num_rows` is the number of rows in the step.
        """
        if grouping.num_rows == num_rows:
            return None
        return super().build(0, _ungrouped_rows(common, grouping))


def _ungrouped_rows(
    common: CommonAttentionMetadata, grouping: StepGrouping
) -> CommonAttentionMetadata:
    """Metadata of only the rows after the grouped ones, as if they were a separate step."""
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


class GroupedAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """Attention layer that runs tokens of grouped rows in the shared-prefix kernel."""

    _is_supported = False

    @property
    def window(self) -> int | None:
        """Sliding window, in tokens. The kernel is used while all grouped rows fit into it."""
        return None

    def prepare(self, builder: Any) -> AttentionFallbackReason | None:
        """Enable the kernel for this layer, or return the reason why it uses vLLM's attention.

        Called by the metadata builder of the layer's group, which knows the KV cache.
        """
        reason = self.unsupported_reason(builder)
        self._is_supported = reason is None
        return reason

    @abstractmethod
    def unsupported_reason(self, builder: Any) -> AttentionFallbackReason | None:
        """Reason why the kernel does not support this layer; None if it does."""

    def _supports(self, step: GroupedMetadata) -> bool:
        return self._is_supported and (self.window is None or step.max_grouped_len <= self.window)

    def _stock_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    @FEATURE.guarded(_stock_forward)
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
        **named_scales: torch.Tensor | None,
    ) -> Any:
        stock, step = super().forward, attn_metadata
        if not (isinstance(step, GroupedMetadata) and self._supports(step)):
            stock(layer, query, key, value, kv_cache, step, output, *scales, **named_scales)
            return output
        if step.tail is not None:
            tokens = slice(step.num_grouped_tokens, attn_metadata.num_actual_tokens)
            stock(layer, query[tokens], key, value, kv_cache, step.tail, output[tokens])
        step.attend(self, layer, query=query, kv_cache=kv_cache, out=output)
        return output
