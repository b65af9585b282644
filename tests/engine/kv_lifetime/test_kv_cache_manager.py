"""Retained KV of sessions with vLLM's KV cache manager, for models with one and with two groups."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from engine.kv_lifetime.core import engine_core_methods as methods
from engine.kv_lifetime.core.retainer import FEATURE

BLOCK, NUM_BLOCKS, MAX_TOKENS, WINDOW = 16, 101, 1024, 64
SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)
GROUPS: dict[str, list[KVCacheSpec]] = {
    "full": [FULL],
    "sliding": [SLIDING],
    "hybrid": [FULL, SLIDING],
}


class Scheduler:
    """The calls of vLLM's scheduler that concern one request at a time."""

    def __init__(self, groups: list[KVCacheSpec]) -> None:
        init_none_hash(sha256)
        config = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(groups)
            ],
        )
        self.kv_cache_manager = KVCacheManager(
            config, max_model_len=MAX_TOKENS, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.ids = itertools.count()

    @property
    def pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def add_request(self, request: Request) -> None: ...

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)

    def reset_prefix_cache(self) -> bool:
        return bool(self.kv_cache_manager.reset_prefix_cache())

    def run(self, tokens: list[int], session_id: str | None = None) -> int:
        """Prefill a request and end it; returns the number of its cached tokens."""
        request = Request(
            str(next(self.ids)),
            tokens,
            SamplingParams(max_tokens=1),
            None,
            block_hasher=self.hasher,
            session_id=session_id,
        )
        self.add_request(request)
        blocks, num_cached, _ = self.kv_cache_manager.get_computed_blocks(request)
        allocated = self.kv_cache_manager.allocate_slots(
            request, len(tokens) - num_cached, num_cached, blocks
        )
        assert allocated is not None, "the request fits into an idle cache"
        request.num_computed_tokens = len(tokens)
        self._free_request(request)
        return int(num_cached)


def scheduler_of(name: str, fraction: float) -> tuple[Scheduler, Any]:
    """A scheduler, with retention unless the fraction is 0, and its EngineCore."""
    scheduler = Scheduler(GROUPS[name])
    core: Any = SimpleNamespace(scheduler=scheduler)
    if fraction:
        methods.coppice_start_session_kv_retention(core, fraction, 300.0)
    return scheduler, core


def tokens(seed: int, length: int) -> list[int]:
    return [seed * 10_000 + index for index in range(length)]


def flood(scheduler: Scheduler, length: int = 600) -> None:
    """Requests of other callers that need the whole cache several times, in turn."""
    for seed in range(10, 20):
        scheduler.run(tokens(seed, length))


@pytest.mark.parametrize("name", GROUPS)
def test_flood_evicts_a_session_only_without_retention(name: str) -> None:
    path = tokens(1, 330)
    found = {}
    for fraction in (0.0, 0.5):
        scheduler, _ = scheduler_of(name, fraction)
        assert scheduler.run(path, "a") == 0
        flood(scheduler)
        found[fraction] = scheduler.run([*path, *tokens(2, 20)], "a")
        assert scheduler.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert found == {0.0: 0, 0.5: 320}
    assert FEATURE.state.on


@pytest.mark.parametrize("name", GROUPS)
def test_request_that_needs_the_whole_cache_gets_it(name: str) -> None:
    scheduler, core = scheduler_of(name, 1.0)
    for session in range(4):
        scheduler.run(tokens(session, 200), str(session))
    length = MAX_TOKENS if len(GROUPS[name]) == 1 else MAX_TOKENS // 2
    for seed in range(10, 14):
        scheduler.run(tokens(seed, length))
    assert scheduler.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    counted = methods.counted(core)
    assert counted is not None and counted["num_sessions"] <= 4


def test_retained_blocks_are_those_that_the_next_call_finds() -> None:
    """Of a window only its last blocks are needed, and its earlier ones are not retained."""
    for name, expected in (("full", 20), ("sliding", WINDOW // BLOCK), ("hybrid", 24)):
        scheduler, core = scheduler_of(name, 0.5)
        scheduler.run(tokens(1, 330), "a")
        counted = methods.counted(core)
        assert counted is not None and counted["num_blocks"] == expected, name


def test_reset_of_the_prefix_cache_succeeds_and_releases() -> None:
    scheduler, core = scheduler_of("hybrid", 0.5)
    path = tokens(1, 330)
    scheduler.run(path, "a")
    assert scheduler.reset_prefix_cache()
    counted = methods.counted(core)
    assert counted is not None and counted["num_blocks"] == 0
    assert scheduler.run(path, "a") == 0


def test_session_that_has_ended_is_evicted_like_all_others() -> None:
    scheduler, core = scheduler_of("full", 0.5)
    path = tokens(1, 330)
    scheduler.run(path, "a")
    methods.coppice_release_session_kv(core, ["a", "unknown"])
    flood(scheduler)
    assert scheduler.run(path, "a") == 0


def test_engine_without_retention_has_nothing_to_release() -> None:
    _, core = scheduler_of("full", 0.0)
    methods.coppice_release_session_kv(core, ["a"])
    methods.release_all(core, except_blocks=set())
    assert methods.counted(core) is None
