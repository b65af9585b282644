"""Methods added to vLLM's EngineCore to retain and release the KV of agent sessions."""

from collections.abc import Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict

from engine.types.feature_stats import KvReleaseReason

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

ATTRIBUTE: Final = "coppice_session_kv"


class Snapshot(TypedDict):
    num_blocks: int
    num_sessions: int
    num_released: dict[KvReleaseReason, int]


def coppice_start_session_kv_retention(
    self: "EngineCore", fraction: float, max_seconds: float
) -> None:
    """Retain the KV of paused sessions from now on, in at most a fraction of the KV cache."""
    from engine.kv_lifetime.core.retainer import SessionKvRetainer

    manager = self.scheduler.kv_cache_manager
    pool = manager.block_pool
    retainer = SessionKvRetainer(
        pool,
        partial(_cached_blocks, manager),
        max_blocks=int(fraction * (pool.num_gpu_blocks - 1)),
        max_seconds=max_seconds,
        releases_tails=_has_full_attention_only(manager),
    )
    retainer.attach(self.scheduler)
    setattr(self, ATTRIBUTE, retainer)


def coppice_release_session_kv(self: "EngineCore", session_ids: Sequence[str]) -> None:
    """Release the retained KV of sessions that have ended."""
    retainer = getattr(self, ATTRIBUTE, None)
    if retainer is not None:
        for session_id in session_ids:
            retainer.release(session_id)


def release_all(core: "EngineCore", except_blocks: Set[int]) -> None:
    """Release retained KV, because the prefix cache is reset except for some blocks."""
    retainer = getattr(core, ATTRIBUTE, None)
    if retainer is not None:
        retainer.release_all(except_blocks)


def counted(core: "EngineCore") -> Snapshot | None:
    """Counts of retained KV, or None if none is retained in this engine."""
    retainer = getattr(core, ATTRIBUTE, None)
    if retainer is None:
        return None
    retainer.release_expired()
    return Snapshot(
        num_blocks=retainer.num_retained_blocks,
        num_sessions=retainer.num_retained_sessions,
        num_released=dict(retainer.num_released),
    )


METHODS = (coppice_start_session_kv_retention, coppice_release_session_kv)


def _cached_blocks(manager: Any, request: Any) -> list[Any]:
    """Cached blocks, of all KV cache groups, that a prompt with the request's tokens would find."""
    groups, _, _ = manager.coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens
    )
    return [block for blocks in groups for block in blocks]


def _has_full_attention_only(manager: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = manager.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
