"""Methods added to vLLM's EngineCore: ping, prefix cache reset, pool check.

They run in EngineCore's busy loop, between two steps. Exceptions are returned to the caller and do
no harm. Results are sent as msgpack.
"""

import itertools
import os
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypedDict

from engine import features
from engine.feature_base import FeatureCounts, Ping
from engine.held_outputs.hooks import coppice_flush_outputs
from engine.kv_lifetime.core import version_hooks
from engine.kv_lifetime.keep_option import keep_option

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class PrefixCacheReset(TypedDict):
    num_hashes: int
    num_kept_tokens: int
    num_running_requests: int
    connector: bool


class PoolState(TypedDict):
    """Counts of blocks, references and requests in the block pool, by which leaks are detected.

    When idle, `num_references` is 0 and `num_free_blocks` equals `num_blocks`.
    """

    num_hashes: int
    num_hashed_blocks: int
    num_references: int
    num_free_blocks: int
    num_blocks: int
    num_requests: int
    num_tables: int


class WorkerCounters:
    """Counters of all ranks, read without waiting for a step that is in progress.

    A call of workers in other processes returns after the replies to all earlier calls. With
    asynchronous scheduling these include steps in progress, so that the next step would not be
    scheduled while one runs. So the reply is taken once a step's result has been waited for, and
    until then `read` returns the counters of the previous call. While no step is in progress it
    waits, as the calling heartbeat must notice a worker that hangs.
    """

    def __init__(self) -> None:
        self._requested: Future[list[Any]] | None = None
        self._latest: list[Any] | None = None

    def read(self, executor: Any, *, in_progress: bool) -> list[Any]:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        must_wait = not (in_progress and isinstance(executor, MultiprocExecutor))
        if must_wait or self._latest is None:
            self._requested = None
            self._latest = executor.collective_rpc("coppice_counters")
            return self._latest
        if self._requested is None or self._requested.done():
            if self._requested is not None:
                self._latest = self._requested.result()
            self._requested = executor.collective_rpc("coppice_counters", non_block=True)
        return self._latest


def coppice_ping(self: "EngineCore") -> Ping:
    num_running, num_waiting = self.scheduler.get_request_counts()
    pool = self.scheduler.kv_cache_manager.block_pool
    counters: WorkerCounters = self.__dict__.setdefault("coppice_counters", WorkerCounters())
    ranks = counters.read(self.model_executor, in_progress=bool(self.batch_queue))
    return Ping(
        pid=os.getpid(),
        num_running=num_running,
        num_waiting=num_waiting,
        num_free_blocks=pool.get_num_free_blocks(),
        num_blocks=_num_usable_blocks(pool),
        features=_feature_counts(features.core_counts(self), ranks),
    )


def coppice_reset_prefix_cache(self: "EngineCore", keep_chains: bool = False) -> PrefixCacheReset:
    """Prevent prefix cache hits on blocks computed, even in part, before this call.

    Call it while paused, after the weights changed and before their version is set. Running
    requests keep their blocks, and no reference count changes. Waiting requests need no handling,
    because they look up their hashes when they are scheduled. The connector is reset too, by its
    `reset_cache`. With `keep_chains`, blocks of requests that keep their KV remain in the cache.
    """
    assert self.is_scheduler_paused(), (
        "the prefix cache is reset between two weights versions, while paused"
    )
    kept = version_hooks.kept_blocks(self)
    kept.before_update(map(_progress, self.scheduler.requests.values()))
    num_running_requests = _stop_caching_running(self.scheduler, keep_chains=keep_chains)
    blocks = kept.blocks_to_keep(keep=keep_chains)
    features.on_prefix_cache_reset(self, blocks)
    _reset_encoder_cache(self)
    num_hashes = _clear_block_hashes(self.scheduler.kv_cache_manager.block_pool, blocks)
    return PrefixCacheReset(
        num_hashes=num_hashes,
        num_kept_tokens=kept.snapshot()["num_kept_tokens"],
        num_running_requests=num_running_requests,
        connector=self.scheduler.reset_connector_cache(),
    )


def _reset_encoder_cache(core: "EngineCore") -> None:
    """Drop the embeddings of images, which the earlier weights computed.

    The same as `EngineCore.reset_encoder_cache`, without its warning: running requests compute the
    embeddings that they still need again.
    """
    core.scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()


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

    features.install_in_core()
    methods = (
        coppice_ping,
        coppice_reset_prefix_cache,
        coppice_check_pool,
        coppice_flush_outputs,
    )
    for method in itertools.chain(methods, features.core_methods()):
        setattr(EngineCore, method.__name__, method)


def _feature_counts(core: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, FeatureCounts]:
    names = core.keys() | ranks[0].keys()
    return {
        name: FeatureCounts(
            core=core.get(name), ranks=[rank[name] for rank in ranks if name in rank]
        )
        for name in names
    }


def _num_usable_blocks(pool: Any) -> int:
    return int(pool.num_gpu_blocks) - 1  # the null block is never allocated


def _progress(request: Any) -> tuple[str, int, bool]:
    """Id and number of computed tokens of a request; true if it has lost KV that it had."""
    is_preempted = request.num_computed_tokens == 0 and request.num_output_tokens > 0
    return request.request_id, request.num_computed_tokens, is_preempted


def _clear_block_hashes(pool: Any, kept: set[int]) -> int:
    """Clear the hashes of all blocks but the kept ones, even while blocks are in use.

    The pool's `reset_prefix_cache` clears all, but fails while blocks are in use. The pool supports
    blocks without a hash: they are freed to the front of the queue, evicted without an event, and
    may get a hash again.
    """
    num_hashes = len(pool.cached_block_hash_to_block)
    if kept:
        for block in pool.blocks:
            if block.block_id not in kept:
                pool._emit_block_removed_events(pool._remove_cached_block_hashes(block))
        return num_hashes - len(pool.cached_block_hash_to_block)
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


def _stop_caching_running(scheduler: Any, *, keep_chains: bool) -> int:
    """Stop running requests from adding blocks to the prefix cache.

    They would add the blocks that they fill from now on under hashes of the tokens alone. Once the
    start of such a prompt is prefilled again, a longer prompt could match blocks that mix weights
    versions. A count of cached blocks larger than any length prevents this. vLLM's other readers
    of the count only test that there is one, or that it has grown; `_cache_partial_tail_block`,
    which does not read it, is patched in `engine.kv_lifetime.core.version_hooks`. A preempted
    request loses the count, is prefilled again under the new weights, and adds its blocks again.

    A request that has not filled a block yet has no count, so running requests are added by id.
    With `keep_chains`, requests that keep their KV go on: only their chain matches their blocks.
    """
    running = {request.request_id for request in scheduler.running}
    chains = {
        request.request_id
        for request in scheduler.requests.values()
        if keep_chains and keep_option(request) is not None
    }
    for single in scheduler.kv_cache_manager.coordinator.single_type_managers:
        counted = (running | single.num_cached_block.keys()) - chains
        single.num_cached_block.update(dict.fromkeys(counted, version_hooks.ALL_BLOCKS_CACHED))
    return len(running)
