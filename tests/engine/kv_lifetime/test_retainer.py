"""Retained KV of sessions in vLLM's own block pool, without a model."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from engine.kv_lifetime.core import retainer as module
from engine.kv_lifetime.core.retainer import FEATURE, SessionKvRetainer

NUM_BLOCKS = 40
BLOCK = 16


@dataclass(eq=False)
class Request:
    session_id: str | None
    num_tokens: int
    blocks: list[KVCacheBlock] = field(default_factory=list)


class Cache:
    """A block pool with a retainer, and requests whose blocks are cached as vLLM caches them."""

    def __init__(self, *, max_blocks: int = 20, releases_tails: bool = True) -> None:
        self.now = 0.0
        self.pool = BlockPool(NUM_BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK)
        self.hashes = itertools.count()
        self.retainer = SessionKvRetainer(
            self.pool,
            lambda request: request.blocks,
            max_blocks=max_blocks,
            max_seconds=100.0,
            releases_tails=releases_tails,
            clock=lambda: self.now,
        )

    def start(
        self, session_id: str | None, num_blocks: int, *, cached: Sequence[KVCacheBlock] = ()
    ) -> Request:
        """A running request that has computed new blocks, after those in `cached`."""
        request = Request(session_id, (num_blocks + len(cached)) * BLOCK)
        self.pool.touch(cached)
        new = self.pool.get_new_blocks(num_blocks)
        for block in new:
            key = make_block_hash_with_group_id(str(next(self.hashes)).encode(), 0)
            self.pool._insert_block_hash(key, block, num_tokens=BLOCK)
        request.blocks = [*cached, *new]
        return request

    def end(self, request: Request) -> None:
        self.retainer.on_finished(request)
        self.pool.free_blocks(reversed(request.blocks))
        self.retainer.enforce_limits()

    def run(self, session_id: str | None, num_blocks: int, **named: Any) -> Request:
        request = self.start(session_id, num_blocks, **named)
        self.end(request)
        return request

    def flood(self, num_blocks: int) -> None:
        """A request of another caller, which needs new blocks."""
        self.pool.free_blocks(reversed(self.pool.get_new_blocks(num_blocks)))

    def num_cached(self, request: Request) -> int:
        """Number of the request's first blocks that are still cached."""
        cached = [block.block_hash is not None for block in request.blocks]
        return cached.index(False) if False in cached else len(cached)

    def check(self) -> None:
        """Compare the queue's count with the blocks that nobody uses."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == len({block.block_id for block in free})
        assert self.pool.get_num_free_blocks() == len(free)
        unused = [b for b in self.pool.blocks if not b.ref_cnt and not b.is_null]
        assert {block.block_id for block in free} == {block.block_id for block in unused}
        owned = Counter(b for path in self.retainer._paths for b in path.blocks)
        owners = self.retainer._paths_of
        assert owned == Counter({block: len(paths) for block, paths in owners.items()})
        queue = self.retainer._queue
        assert queue._retained <= owned.keys() and queue._beside.keys() <= queue._retained


def test_path_of_a_paused_session_survives_other_requests() -> None:
    cache = Cache()
    path, other = cache.run("a", 8), cache.run(None, 8)
    for _ in range(5):
        cache.flood(NUM_BLOCKS - 8)
    assert (cache.num_cached(path), cache.num_cached(other)) == (8, 0)
    cache.check()


def test_retained_blocks_are_free_blocks() -> None:
    cache = Cache()
    cache.run("a", 8)
    assert cache.retainer.num_retained_blocks == 8
    assert cache.pool.get_num_free_blocks() == NUM_BLOCKS
    assert cache.pool.get_usage() == 0
    cache.check()


def test_allocation_of_all_blocks_succeeds() -> None:
    cache = Cache()
    path = cache.run("a", 8)
    cache.flood(NUM_BLOCKS)
    assert cache.num_cached(path) == 0
    assert cache.retainer.num_released == {"allocation": 8, "returned": 0}
    cache.check()


def test_allocation_takes_the_end_of_a_path_first() -> None:
    cache = Cache()
    path = cache.run("a", 8)
    cache.flood(NUM_BLOCKS - 5)
    assert cache.num_cached(path) == 5
    cache.check()


def test_path_with_a_window_or_state_is_released_whole() -> None:
    cache = Cache(releases_tails=False)
    first, second = cache.run("a", 8), cache.run("b", 8)
    cache.flood(NUM_BLOCKS - 15)
    assert cache.retainer.num_retained_blocks == 8
    assert sorted(map(cache.num_cached, (first, second))) == [7, 8]
    cache.check()


def test_allocation_takes_the_session_that_has_been_paused_longest() -> None:
    cache = Cache()
    one, other = cache.run("one", 4), cache.run("other", 4)
    one = cache.run("one", 0, cached=one.blocks)
    cache.flood(NUM_BLOCKS - 4)
    assert (cache.num_cached(one), cache.num_cached(other)) == (4, 0)


def test_returning_session_uses_its_retained_blocks() -> None:
    cache = Cache()
    path = cache.run("a", 8)
    cache.flood(NUM_BLOCKS - 8)
    request = cache.start("a", 2, cached=path.blocks)
    assert cache.retainer.num_retained_blocks == 0
    assert cache.retainer.num_released == {"returned": 8}
    cache.end(request)
    assert cache.retainer.num_retained_blocks == 10
    cache.check()


def test_blocks_that_another_call_of_the_session_uses_are_retained_once() -> None:
    cache = Cache()
    one = cache.start("a", 4)
    two = cache.start("a", 2, cached=one.blocks)
    cache.end(one)
    cache.check()
    cache.end(two)
    assert cache.retainer.num_retained_blocks == 6
    cache.check()
    cache.flood(NUM_BLOCKS - 6)
    assert cache.num_cached(two) == 6


def test_allocation_passes_over_blocks_that_a_request_uses() -> None:
    cache = Cache()
    one = cache.run("a", 8)
    running = cache.start("a", 0, cached=one.blocks)
    cache.now += 50
    other = cache.run("b", 8)
    cache.flood(NUM_BLOCKS - 8 - 4)
    assert cache.num_cached(other) == 4
    cache.end(running)
    cache.check()
    assert cache.retainer.num_retained_blocks == 12


def test_blocks_that_sessions_share_are_retained_until_both_have_ended() -> None:
    cache = Cache()
    one = cache.run("one", 4)
    two = cache.run("two", 2, cached=one.blocks)
    cache.check()
    cache.retainer.release("two")
    assert cache.retainer.num_retained_blocks == 4
    cache.flood(NUM_BLOCKS - 4)
    assert (cache.num_cached(one), cache.num_cached(two)) == (4, 4)
    cache.retainer.release("one")
    assert cache.retainer.num_retained_blocks == 0
    cache.check()


def test_sessions_retain_at_most_the_limit() -> None:
    cache = Cache(max_blocks=10)
    paths = []
    for number in range(4):
        cache.now += 2
        paths.append(cache.run(str(number), 4))
        assert cache.retainer.num_retained_blocks <= 10
        cache.check()
    assert cache.retainer.num_released["limit"] == 6


def test_path_that_exceeds_the_limit_retains_its_start() -> None:
    cache = Cache(max_blocks=10)
    path = cache.run("a", 15)
    cache.flood(NUM_BLOCKS - 10)
    assert cache.num_cached(path) == 10


def test_path_with_a_window_that_exceeds_the_limit_is_not_retained() -> None:
    cache = Cache(max_blocks=10, releases_tails=False)
    cache.run("a", 15)
    assert cache.retainer.num_retained_blocks == 0


def test_session_with_many_paths_does_not_displace_another() -> None:
    cache = Cache(max_blocks=16)
    other = cache.run("other", 4)
    for _ in range(50):
        cache.now += 0.1
        cache.run("many", 2)
    cache.flood(NUM_BLOCKS - 12)
    assert cache.num_cached(other) == 4


def test_session_that_ends_releases_its_blocks() -> None:
    cache = Cache()
    cache.run("a", 4)
    path = cache.run("b", 4)
    cache.retainer.release("a")
    cache.retainer.release("unknown")
    assert cache.retainer.num_retained_blocks == 4
    assert cache.retainer.num_released == {"ended": 4, "returned": 0}
    cache.flood(NUM_BLOCKS - 4)
    assert cache.num_cached(path) == 4
    cache.check()


def test_blocks_are_retained_for_a_limited_time() -> None:
    cache = Cache()
    cache.run("a", 4)
    cache.now += 50
    cache.run("b", 4)
    cache.now += 50
    cache.retainer.release_expired()
    assert cache.retainer.num_retained_blocks == 4
    assert cache.retainer.num_released == {"expired": 4, "returned": 0}
    cache.check()


def test_reset_releases_all_blocks() -> None:
    cache = Cache()
    cache.run("a", 4)
    running = cache.start("a", 4)
    cache.retainer.release_all()
    assert cache.retainer.num_retained_blocks == 0
    assert cache.pool.get_num_free_blocks() == NUM_BLOCKS - 4
    cache.end(running)
    assert cache.retainer.num_retained_blocks == 4
    cache.check()


def test_blocks_that_a_reset_leaves_cached_remain_retained() -> None:
    cache = Cache()
    cache.run("a", 4)
    [path] = cache.retainer._paths
    left = set(list(path.blocks)[:3])
    cache.retainer.release_all(except_blocks=left)
    assert path.blocks.keys() == left
    assert cache.retainer.num_retained_blocks == 3
    cache.retainer.release("a")
    assert cache.retainer.num_retained_blocks == 0
    cache.check()


def test_pool_without_used_blocks_can_be_reset() -> None:
    cache = Cache()
    cache.run("a", 4)
    cache.retainer.release_all()
    assert cache.pool.reset_prefix_cache()


def test_number_of_paths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PATHS", 4)
    cache = Cache()
    for number in range(12):
        cache.run(str(number), 1)
    assert len(cache.retainer._paths) == len(cache.retainer._sessions) == 4
    cache.check()


def test_block_that_loses_its_hash_in_use_is_not_retained() -> None:
    """As when KV of a connector could not be loaded."""
    cache = Cache()
    one = cache.start("a", 4)
    two = cache.start("a", 0, cached=one.blocks)
    cache.end(one)
    cache.pool.evict_blocks({two.blocks[-1].block_id})
    cache.pool.free_blocks(reversed(two.blocks))
    cache.flood(NUM_BLOCKS)
    cache.retainer.release_all()
    cache.check()


def test_random_requests_leave_the_queue_consistent() -> None:
    """No block is lost or counted twice, and allocations fail only where vLLM's would."""
    random.seed(7)
    cache, running, ended = Cache(max_blocks=18), list[Request](), list[Request]()
    for step in range(4000):
        cache.now += random.expovariate(2.0)
        action = random.random()
        if action < 0.45:
            cached = []
            if ended and random.random() < 0.6:
                path = random.choice(ended[-8:])
                cached = path.blocks[: cache.num_cached(path)]
            need = random.randint(0, 6)
            if need + sum(not b.ref_cnt for b in cached) <= cache.pool.get_num_free_blocks():
                session = random.choice([None, "a", "b", "c", "d"])
                running.append(cache.start(session, need, cached=cached))
        elif action < 0.85 and running:
            request = running.pop(random.randrange(len(running)))
            cache.end(request)
            ended.append(request)
        elif action < 0.93:
            cache.retainer.release(random.choice("abcd"))
        elif action < 0.95:
            cache.retainer.release_all()
        if step % 20 == 0:
            cache.check()
    for request in running:
        cache.end(request)
    cache.retainer.release_all()
    cache.check()
    assert cache.pool.get_num_free_blocks() == NUM_BLOCKS
    assert FEATURE.state.on


@pytest.mark.parametrize("broken", ["_oldest", "_release_blocks", "_last_blocks"])
def test_allocation_succeeds_after_an_error_in_the_retainer(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyError(broken)

    monkeypatch.setattr(FEATURE, "state", FEATURE.state)
    cache = Cache()
    cache.run("a", 10)
    cache.run("b", 10)
    monkeypatch.setattr(module if broken == "_last_blocks" else cache.retainer, broken, fail)
    cache.flood(NUM_BLOCKS)
    assert not FEATURE.state.on
    assert cache.retainer.num_retained_blocks == 0
    assert cache.pool.get_num_free_blocks() == NUM_BLOCKS
    cache.flood(NUM_BLOCKS)
    cache.check()
