"""Layout of vLLM's KV cache per group of layers, and refusal of unsupported caches.

All workers derive the same result. EngineCore may see layers of one KV cache group that have
different shapes as if they had the same: it relies only on groups, block sizes and windows.

Only the keys and values of plain attention are supported, over all tokens or in a sliding window.
Any other cache is refused with a reason. Layers that share a block table, a shape and a window are
one `CacheLayout`, whose KV is one region of an exported prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from engine.types.kv import ExportSlot, first_stored_token

DRAFT_MODEL: Final = "draft_model"
REGION_ALIGNMENT: Final = 64
"""Alignment of the regions of an exported prompt, in bytes."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class UnsupportedCache(Exception):
    """The model's prompt KV cannot be exported; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Layout of the KV cache of layers that are exported together.

    `group` is the index of the KV cache group, `layers` are names in layer order, `num_kv_heads`
    counts the heads of all ranks. Layers with a sliding `window` store only its tokens.
    """

    group: int
    layers: tuple[str, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    num_ranks: int
    window: int | None = None

    def num_bytes(self, num_tokens: int) -> int:
        values = 2 * len(self.layers) * self.num_kv_heads * num_tokens * self.head_dim
        return values * self.dtype.itemsize

    def first_token(self, num_tokens: int) -> int:
        """First stored token of a prompt of which `num_tokens` tokens are exported."""
        return first_stored_token(num_tokens, self.window, self.block_size)

    def heads_to_write(self, rank: int) -> range:
        """KV heads that a rank exports. Replicated heads are exported by their first rank."""
        held = self.local_heads(rank)
        return held if rank % self._replicas == 0 else held[:0]

    def local_heads(self, rank: int) -> range:
        num_heads = max(1, self.num_kv_heads // self.num_ranks)
        first = rank // self._replicas * num_heads
        return range(first, first + num_heads)

    @property
    def _replicas(self) -> int:
        return max(1, self.num_ranks // self.num_kv_heads)

    def kernel_blocks(self, block_ids: Sequence[int], kernel_block: int) -> list[int]:
        """Convert the scheduler's block ids to the attention kernel's block ids.

        Some GPU kernels split the scheduler's blocks into smaller, adjacent ones.
        """
        split = self.block_size // kernel_block
        return [block * split + part for block in block_ids for part in range(split)]


def split_slot(layouts: Sequence[CacheLayout], slot: ExportSlot) -> Iterator[ExportSlot]:
    """The part of a slot that receives the KV of each layout."""
    offset = slot.offset
    for layout in layouts:
        num_tokens = slot.num_tokens - layout.first_token(slot.num_tokens)
        yield replace(slot, offset=offset, num_tokens=num_tokens)
        offset += layout.num_bytes(num_tokens)


def cache_layouts(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheLayout, ...]:
    """The layouts of the model's KV cache, in the order of their first layers.

    Raises UnsupportedCache if it cannot be exported.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("pipeline", "decode_context", "prefill_context"):
        if getattr(parallel, f"{name}_parallel_size") > 1:
            raise UnsupportedCache(f"{name.replace('_', ' ')} parallel")
    found: dict[tuple[int, Any], list[str]] = {}
    for group, name in _target_layers(kv_cache_config, model.get_total_num_hidden_layers()):
        spec = _spec(kv_cache_config.kv_cache_groups[group].kv_cache_spec, name)
        _check_plain_attention(name, spec, model.dtype)
        found.setdefault((group, spec), []).append(name)
    num_ranks = parallel.tensor_parallel_size
    heads = {spec.num_kv_heads for _, spec in found}
    if len(heads) > 1 and num_ranks > 1:
        raise UnsupportedCache("layers have different numbers of KV heads, on several ranks")
    layouts = tuple(
        CacheLayout(
            group=group,
            layers=tuple(names),
            num_kv_heads=model.get_total_num_kv_heads() if num_ranks > 1 else spec.num_kv_heads,
            head_dim=spec.head_size,
            dtype=spec.dtype,
            block_size=spec.block_size,
            num_ranks=num_ranks,
            window=_window(spec),
        )
        for (group, spec), names in found.items()
    )
    _check_layouts(layouts, heads)
    return layouts


def _check_layouts(layouts: Sequence[CacheLayout], heads: set[int]) -> None:
    for layout in layouts:
        if layout.num_ranks > 1 and heads != {len(layout.heads_to_write(0))}:
            raise UnsupportedCache(f"{heads.pop()} KV heads on a rank")
        if len(layouts) > 1 and layout.head_dim * layout.dtype.itemsize % REGION_ALIGNMENT:
            raise UnsupportedCache(f"{layout.layers[0]} has heads of size {layout.head_dim}")


def _target_layers(kv_cache_config: Any, num_layers: int) -> list[tuple[int, str]]:
    """KV cache group and name of each of the model's layers, without those of a draft model."""
    found: dict[int, tuple[int, str]] = {}
    for group, members in enumerate(kv_cache_config.kv_cache_groups):
        for name in members.layer_names:
            if name.startswith(DRAFT_MODEL):
                continue
            index = extract_layer_index(name)
            if index in found:
                raise UnsupportedCache(f"layer {index} has two caches")
            if index < num_layers:
                found[index] = (group, name)
    if sorted(found) != list(range(num_layers)):
        raise UnsupportedCache(f"{len(found)} of {num_layers} layers have a cache")
    return [found[index] for index in range(num_layers)]


def _spec(spec: Any, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _window(spec: Any) -> int | None:
    """Sliding window whose earlier tokens vLLM frees; None if it keeps all tokens.

    If its hybrid KV cache manager is disabled, it keeps all tokens of layers with a window, and
    layers without one may have the same spec.
    """
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def _check_plain_attention(name: str, spec: Any, dtype: torch.dtype) -> None:
    """Raise UnsupportedCache unless a layer stores keys and values in the model's dtype."""
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise UnsupportedCache(f"{name} has a {type(spec).__name__}")
    if getattr(spec, "attention_chunk_size", None) is not None:
        raise UnsupportedCache(f"{name} has chunked attention")
    if (window := _window(spec)) is not None and window < 2:
        raise UnsupportedCache(f"{name} has a window of {window} tokens")
    if getattr(spec, "non_causal", False):
        raise UnsupportedCache(f"{name} has non-causal attention")
    if spec.kv_quant_mode != KVQuantMode.NONE or spec.dtype != dtype or dtype not in DTYPES:
        raise UnsupportedCache(f"{name} stores {spec.dtype}, the model's dtype is {dtype}")
    packed = (spec.num_head_slots, spec.state_content_bytes, spec.page_size_padded)
    if packed != (None, None, None) or spec.tokens_per_state != 1:
        raise UnsupportedCache(f"{name} has a special page layout")
    if spec.head_size != spec.head_size_v:
        raise UnsupportedCache(f"{name} has keys and values of different sizes")
