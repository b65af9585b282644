"""Patch of vLLM's KV cache manager: steps that stay in a request's blocks cost two comparisons.

A decoding request needs a new block in one of 16 steps, with blocks of 16 tokens, and has filled
one in one of 16. vLLM 0.32.0 goes through its coordinator and the manager of each KV cache group in
every step, to find that there is nothing to do: `KVCacheManager.allocate_slots` in `schedule`, and,
with asynchronous scheduling, `cache_blocks` in `update_from_output`. Both depend only on lengths if
the cache is one group of full attention, in which no block is ever given back before the end. Then
they are compared first, and vLLM's methods are called if there is something to do.
"""

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


def attach(manager: Any) -> None:
    """Give a KVCacheManager the short paths that its cache permits."""
    _skip_empty_blocks(manager.empty_kv_cache_blocks)
    group = _only_group(manager)
    if group is not None:
        manager.allocate_slots = _allocating(manager, group)
        manager.cache_blocks = _caching(manager, group)


def _only_group(manager: Any) -> Any:
    """The manager of the only KV cache group if that is of full attention, else None.

    Subclasses have other rules. Hashes of parts of blocks exist with several groups only.
    """
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    if type(manager.coordinator) is not UnitaryKVCacheCoordinator:
        return None
    [group] = manager.coordinator.single_type_managers
    return group if type(group) is FullAttentionManager else None


def _allocating(manager: Any, group: Any) -> Method:
    """`allocate_slots`, which returns at once if no block is missing and none has become full.

    For a running request, `schedule` gives `num_lookahead_tokens` alone, for others more.
    """
    from vllm.v1.request import RequestStatus

    upstream = manager.allocate_slots
    nothing, running = manager.empty_kv_cache_blocks, RequestStatus.RUNNING
    blocks_of, num_cached_of = group.req_to_blocks.get, group.num_cached_block.get
    block_size = group.block_size

    @functools.wraps(upstream)
    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **named: Any) -> Any:
        lookahead = named.get("num_lookahead_tokens")
        is_alone = lookahead is not None and len(named) == 1 and not args
        if is_alone and num_new_tokens > 0 and request.status is running:
            name, end = request.request_id, request.num_computed_tokens + num_new_tokens
            num_full = min(end, request.num_tokens) // block_size
            num_slots = len(blocks_of(name, ())) * block_size
            if end + lookahead <= num_slots and num_full <= num_cached_of(name, 0):
                return nothing
        return upstream(request, num_new_tokens, *args, **named)

    return allocate_slots


def _caching(manager: Any, group: Any) -> Method:
    """`cache_blocks`, which returns at once if no block has become full."""
    upstream, block_size = manager.cache_blocks, group.block_size
    num_cached_of = group.num_cached_block.get

    @functools.wraps(upstream)
    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // block_size > num_cached_of(request.request_id, 0):
            upstream(request, num_computed_tokens)

    return cache_blocks


def _skip_empty_blocks(empty: Any) -> None:
    """Make the KVCacheBlocks without blocks say so, instead of looking in each group."""
    upstream = empty.get_block_ids

    @functools.wraps(upstream)
    def get_block_ids(allow_none: bool = False, **named: Any) -> Any:
        return None if allow_none else upstream(**named)

    empty.get_block_ids = get_block_ids


@functools.cache
def install() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    upstream = KVCacheManager.__init__

    @functools.wraps(upstream)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        attach(self)

    KVCacheManager.__init__ = init
