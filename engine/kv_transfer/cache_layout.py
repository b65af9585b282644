"""Layout of the KV cache, and whether it can be exported. All processes derive the same result.

Only plain attention over one block table is supported. Any other cache is refused with a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, UniformTypeKVCacheSpecs

DRAFT_MODEL: Final = "draft_model"
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class UnsupportedCache(Exception):
    """The model's prompt KV cannot be exported; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Layout of a KV cache from which prompts can be exported.

    `group` is the index of the KV cache group, `layers` are names in layer order, `num_kv_heads`
    counts the heads of all ranks.
    """

    group: int
    layers: tuple[str, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    num_ranks: int

    def num_bytes(self, num_tokens: int) -> int:
        values = 2 * len(self.layers) * self.num_kv_heads * num_tokens * self.head_dim
        return values * self.dtype.itemsize

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


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """The layout of the model's KV cache. Raises UnsupportedCache if it cannot be exported."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("pipeline", "decode_context", "prefill_context"):
        if getattr(parallel, f"{name}_parallel_size") > 1:
            raise UnsupportedCache(f"{name.replace('_', ' ')} parallel")
    group, layers = _target_layers(kv_cache_config, model.get_total_num_hidden_layers())
    specs = [_spec(kv_cache_config.kv_cache_groups[group].kv_cache_spec, name) for name in layers]
    for name, spec in zip(layers, specs, strict=True):
        _check_plain_attention(name, spec, model.dtype)
        if spec != specs[0]:
            raise UnsupportedCache(f"{name} and {layers[0]} have different specs")
    layout = CacheLayout(
        group=group,
        layers=layers,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=specs[0].head_size,
        dtype=specs[0].dtype,
        block_size=specs[0].block_size,
        num_ranks=parallel.tensor_parallel_size,
    )
    if specs[0].num_kv_heads != len(layout.heads_to_write(0)):
        raise UnsupportedCache(f"{specs[0].num_kv_heads} KV heads on a rank")
    return layout


def _target_layers(kv_cache_config: Any, num_layers: int) -> tuple[int, tuple[str, ...]]:
    """KV cache group and layer names of the model, without the layers of a draft model."""
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
    groups = {group for group, _ in found.values()}
    if len(groups) != 1:
        raise UnsupportedCache("layers in several KV cache groups")
    return groups.pop(), tuple(found[index][1] for index in range(num_layers))


def _spec(spec: Any, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _check_plain_attention(name: str, spec: Any, dtype: torch.dtype) -> None:
    """Raise UnsupportedCache unless a layer has plain full attention in the model's dtype."""
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedCache(f"{name} has a {type(spec).__name__}")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise UnsupportedCache(f"{name} has sliding-window attention")
    if spec.non_causal:
        raise UnsupportedCache(f"{name} has non-causal attention")
    if spec.kv_quant_mode != KVQuantMode.NONE or spec.dtype != dtype or dtype not in DTYPES:
        raise UnsupportedCache(f"{name} stores {spec.dtype}, the model's dtype is {dtype}")
    packed = (spec.num_head_slots, spec.state_content_bytes, spec.page_size_padded)
    if packed != (None, None, None) or spec.tokens_per_state != 1:
        raise UnsupportedCache(f"{name} has a special page layout")
    if spec.head_size != spec.head_size_v:
        raise UnsupportedCache(f"{name} has keys and values of different sizes")
