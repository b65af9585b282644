"""Methods that EngineCore gains, for `engine_core.call_utility_async(name)`.

They run in EngineCore's own loop, between two steps. What they raise goes back to the caller and
harms nothing. Answers travel as msgpack.
"""

import os
from typing import TYPE_CHECKING, Any, Final, TypedDict

from engine.attention import counters as attention
from engine.cudagraphs.counters import Snapshot as CudaGraphSnapshot
from engine.drafter.core import rpc as drafter
from engine.drafter.counters import Snapshot as DrafterSnapshot
from engine.launch.environment import graph_plan
from engine.speculation import counters as speculation

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

ALL_BLOCKS_CACHED: Final = 1 << 60


class Ping(TypedDict):
    pid: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    shared_prefix: list[attention.Snapshot]
    speculation: list[speculation.Snapshot]
    graphs: list[CudaGraphSnapshot | None]
    drafter: DrafterSnapshot | None


class PrefixCacheReset(TypedDict):
    num_hashes: int
    num_running_requests: int
    connector: bool


class PoolState(TypedDict):
    """Of an idle engine `num_references` is 0 and `num_free_blocks` equals `num_blocks`."""

    num_hashes: int
    num_hashed_blocks: int
    num_references: int
    num_free_blocks: int
    num_blocks: int
    num_requests: int
    num_tables: int


def coppice_ping(self: "EngineCore") -> Ping:
    num_running, num_waiting = self.scheduler.get_request_counts()
    pool = self.scheduler.kv_cache_manager.block_pool
    counted = self.model_executor.collective_rpc("coppice_counters")
    return Ping(
        pid=os.getpid(),
        num_running=num_running,
        num_waiting=num_waiting,
        num_free_blocks=pool.get_num_free_blocks(),
        num_blocks=_num_usable_blocks(pool),
        shared_prefix=[rank["shared_prefix"] for rank in counted],
        speculation=[rank["speculation"] for rank in counted],
        graphs=self.model_executor.collective_rpc("coppice_graph_counters") if graph_plan() else [],
        drafter=drafter.counted(self),
    )


def coppice_reset_prefix_cache(self: "EngineCore") -> PrefixCacheReset:
    """From now on no request hits a block that was computed before, or partly before, this call.

    To be called while paused, after the weights changed. Running requests keep their blocks: no
    reference count is touched. Waiting requests need nothing: they look their hashes up when they
    are scheduled. The connector starts afresh too, with its own `reset_cache`.
    """
    assert self.is_scheduler_paused(), "prefixes are forgotten between two versions, while paused"
    num_running_requests = _stop_caching_running(self.scheduler)
    num_hashes = _clear_block_hashes(self.scheduler.kv_cache_manager.block_pool)
    return PrefixCacheReset(
        num_hashes=num_hashes,
        num_running_requests=num_running_requests,
        connector=self.scheduler.reset_connector_cache(),
    )


def coppice_check_pool(self: "EngineCore") -> PoolState:
    manager = self.scheduler.kv_cache_manager
    pool = manager.block_pool
    return PoolState(
        num_hashes=len(pool.cached_block_hash_to_block),
        num_hashed_blocks=sum(block.block_hash is not None for block in pool.blocks),
        num_references=sum(block.ref_cnt for block in pool.blocks if not block.is_null),
        num_free_blocks=pool.get_num_free_blocks(),
        num_blocks=_num_usable_blocks(pool),
        num_requests=len(self.scheduler.requests),
        num_tables=sum(
            len(single.req_to_blocks) + len(single.num_cached_block)
            for single in manager.coordinator.single_type_managers
        ),
    )


def install() -> None:
    from vllm.v1.engine.core import EngineCore

    methods = (coppice_ping, coppice_reset_prefix_cache, coppice_check_pool)
    for method in (*methods, *drafter.METHODS):
        setattr(EngineCore, method.__name__, method)


def _num_usable_blocks(pool: Any) -> int:
    return int(pool.num_gpu_blocks) - 1  # the null block is never handed out


def _clear_block_hashes(pool: Any) -> int:
    """As the pool's `reset_prefix_cache`, which refuses while blocks are in use, does it.

    A block without a hash is one the pool already knows: it is freed to the front of the queue,
    evicted without a trace, and may be given a hash again.
    """
    num_hashes = len(pool.cached_block_hash_to_block)
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    if pool.metrics_collector:
        pool.metrics_collector.reset()
    if pool.enable_kv_cache_events:
        from vllm.distributed.kv_events import AllBlocksCleared

        pool.kv_event_queue.append(AllBlocksCleared())
    return num_hashes


def _stop_caching_running(scheduler: Any) -> int:
    """Running requests publish no block any more.

    They would publish the blocks they fill from now on under the hashes of their tokens alone.
    Once the head of such a chain is recomputed, a longer prompt would walk from it into blocks that
    mix versions. A count of published blocks that is ahead of any length stops that; nothing else
    reads the count. A request that is preempted loses it, computes everything anew under the new
    weights, and publishes again.

    A request that has not filled a block yet has no count, so the counts alone do not name them.
    """
    running = {request.request_id for request in scheduler.running}
    for single in scheduler.kv_cache_manager.coordinator.single_type_managers:
        counted = running | single.num_cached_block.keys()
        single.num_cached_block.update(dict.fromkeys(counted, ALL_BLOCKS_CACHED))
    return len(running)
