"""Patches of vLLM's KV cache and scheduler in EngineCore that record weights versions of KV."""

import functools
from typing import TYPE_CHECKING, Any, Final

from engine.kv_lifetime.core.kept_blocks import KeptBlocks, Snapshot
from engine.kv_lifetime.keep_option import KV_VERSIONS, keep_option

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

ALL_BLOCKS_CACHED: Final = 1 << 60
"""Count of cached blocks of a running request that must not add blocks to the prefix cache."""


def kept_blocks(core: Any) -> KeptBlocks:
    """The versions of the KV of an EngineCore's requests and chains."""
    kept: KeptBlocks = core.scheduler.kv_cache_manager.block_pool.coppice_kept_blocks
    return kept


@functools.cache
def install() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
    from vllm.v1.engine.core import EngineCore

    BlockPool.__init__ = _with_kept_blocks(BlockPool.__init__)
    KVCacheManager.get_computed_blocks = _within_lag(KVCacheManager.get_computed_blocks)
    KVCacheCoordinator.allocate_new_computed_blocks = _counting(
        KVCacheCoordinator.allocate_new_computed_blocks
    )
    for manager in (FullAttentionManager, MambaManager):
        manager._cache_partial_tail_block = _unless_stopped(manager._cache_partial_tail_block)
    BlockPool.cache_full_blocks = _recording(BlockPool.cache_full_blocks)
    BlockPool._remove_cached_block_hashes = _removing(BlockPool._remove_cached_block_hashes)
    BlockPool.reset_prefix_cache = _resetting(BlockPool.reset_prefix_cache)
    Scheduler._free_blocks = _ending(Scheduler._free_blocks)
    EngineCore.set_weight_version = _announced(EngineCore.set_weight_version)
    EngineCore._attach_weight_version = _with_reports(EngineCore._attach_weight_version)


def coppice_can_keep_kv(self: "EngineCore") -> bool:
    """True if blocks of the model's KV cache can be kept across weights updates.

    They can if all KV cache groups consist of blocks that hold the KV of their positions alone.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    groups = self.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    return all(isinstance(group.kv_cache_spec, AttentionSpec) for group in groups)


def counted(core: Any) -> Snapshot:
    return kept_blocks(core).snapshot()


def _with_kept_blocks(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        self.coppice_kept_blocks = KeptBlocks(self)

    return init


def _within_lag(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def get_computed_blocks(self: Any, request: Any) -> tuple[Any, int, int]:
        kept: KeptBlocks = self.block_pool.coppice_kept_blocks
        while True:  # every further lookup has fewer blocks to find
            blocks, num_tokens, boundary = upstream(self, request)
            if not kept.drop_too_old(request, blocks.blocks):
                kept.on_lookup(request, blocks.blocks, num_tokens)
                return blocks, num_tokens, boundary

    return get_computed_blocks


def _counting(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def allocate_new_computed_blocks(self: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
        upstream(self, request_id, *args, **kwargs)
        self.block_pool.coppice_kept_blocks.on_allocated(request_id)

    return allocate_new_computed_blocks


def _unless_stopped(upstream: Any) -> Any:
    """Patch that caches the part of a block at a prompt's end only if its request may cache blocks.

    vLLM does so whatever the count of cached blocks is. A chain caches whole blocks only, because
    versions are recorded per block.
    """

    @functools.wraps(upstream)
    def cache_partial_tail_block(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        num_cached_blocks = self.num_cached_block.get(request.request_id)
        if num_cached_blocks == ALL_BLOCKS_CACHED or keep_option(request) is not None:
            return None
        return upstream(self, request, *args, **kwargs)

    return cache_partial_tail_block


def _removing(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def remove_cached_block_hashes(self: Any, block: Any) -> list[Any]:
        removed: list[Any] = upstream(self, block)
        self.coppice_kept_blocks.on_removed(block)
        return removed

    return remove_cached_block_hashes


def _resetting(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def reset_prefix_cache(self: Any) -> bool:
        is_reset: bool = upstream(self)
        if is_reset:
            self.coppice_kept_blocks.on_reset()
        return is_reset

    return reset_prefix_cache


def _recording(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def cache_full_blocks(
        self: Any,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        upstream(
            self, request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kwargs
        )
        new = blocks[num_cached_blocks:num_full_blocks]
        self.coppice_kept_blocks.on_cached(request, new, num_cached_blocks, block_size)

    return cache_full_blocks


def _ending(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def free_blocks(self: Any, request: Any) -> None:
        upstream(self, request)
        self.kv_cache_manager.block_pool.coppice_kept_blocks.on_finished(request.request_id)

    return free_blocks


def _announced(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def set_weight_version(self: Any, weight_version: str) -> None:
        upstream(self, weight_version)
        kept_blocks(self).set_version(weight_version)

    return set_weight_version


def _with_reports(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def attach_weight_version(self: Any, outputs: dict[int, Any]) -> None:
        upstream(self, outputs)
        kept = kept_blocks(self)
        if kept.reports:
            for output in (output for each in outputs.values() for output in each.outputs):
                if (report := kept.reports.pop(output.request_id, None)) is not None:
                    given = output.kv_transfer_params or {}
                    output.kv_transfer_params = given | {KV_VERSIONS: report}
            for request_id in kept.reports.keys() - self.scheduler.requests.keys():
                del kept.reports[request_id]

    return attach_weight_version
