"""Part of a block at a prompt's end, which vLLM caches if hashes are finer than blocks."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from engine.kv_lifetime.core import version_hooks
from engine.kv_lifetime.keep_option import KEEP_KV_ARG, KeepOption
from engine.launch.engine_core_methods import _clear_block_hashes, _stop_caching_running
from tests.engine.kv_lifetime.test_kv_cache_manager import BLOCK, FULL, SLIDING

PROMPT = list(range(7 * BLOCK + 1))
"""Three blocks of twice BLOCK tokens, a part of BLOCK tokens, and one token."""


@pytest.fixture
def manager() -> KVCacheManager:
    version_hooks.install()
    init_none_hash(sha256)
    specs = [FULL.copy_with_new_block_size(2 * BLOCK), SLIDING]
    groups = [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config, max_model_len=512, scheduler_block_size=2 * BLOCK, hash_block_size=BLOCK
    )


KEEP: dict[str, Any] = {KEEP_KV_ARG: KeepOption(max_lag=None)}


def run(manager: KVCacheManager, extra_args: dict[str, Any] | None) -> Request:
    """A running request that has been prefilled."""
    params = SamplingParams(max_tokens=9, extra_args=extra_args)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request("a", PROMPT, params, None, block_hasher=hasher)
    blocks, num_cached, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(PROMPT) - num_cached, num_cached, blocks)
    request.num_computed_tokens = len(PROMPT)
    return request


def partial_blocks(manager: KVCacheManager, request: Request) -> list[Any]:
    """Blocks after the prompt's whole ones that have a hash, once the request may add them.

    The coordinator rounds the number of tokens down to whole blocks, except for Mamba models.
    """
    full = manager.coordinator.single_type_managers[0]
    full.cache_blocks(request, len(PROMPT), replay_boundaries=())
    blocks = full.req_to_blocks["a"][len(PROMPT) // (2 * BLOCK) :]
    return [block for block in blocks if block.block_hash is not None]


@pytest.mark.parametrize("keep", [False, True])
def test_running_request_caches_no_part_of_a_block_after_an_update(
    manager: KVCacheManager, keep: bool
) -> None:
    request = run(manager, KEEP if keep else None)
    assert bool(partial_blocks(manager, request)) == (not keep)  # a chain caches whole blocks only
    scheduler = SimpleNamespace(
        running=[request], requests={"a": request}, kv_cache_manager=manager
    )
    _stop_caching_running(scheduler, keep_chains=True)
    _clear_block_hashes(manager.block_pool, set())
    assert partial_blocks(manager, request) == []
