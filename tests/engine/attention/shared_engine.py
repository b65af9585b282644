"""A live engine with shared-prefix attention registered, and unregistered at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.attention import register
from engine.attention.counters import COUNTERS, Snapshot
from engine.attention.settings import AttentionSettings, SharedPrefixMode
from engine.runtime.process_environment import CACHE_ENV
from tests.engine.stepped_engine import LiveEngine, live_engine


class SharedEngine:
    """`live` is the engine; `mode` switches its attention between two steps."""

    def __init__(self, live: LiveEngine) -> None:
        self.live = live
        runner = live.core.model_executor.driver_worker.worker.model_runner
        self.builder: Any = runner.attn_groups[0][0].get_metadata_builder()
        if self.builder.isa != "vec":
            pytest.skip(f"vLLM packs the cache for {self.builder.isa} on this machine")

    @contextmanager
    def mode(self, mode: SharedPrefixMode) -> Iterator[Snapshot]:
        """Yields this engine's counters, filled on exit. The cache is empty at the start."""
        with self.live.paused():
            self.live.core.coppice_reset_prefix_cache()
        self.builder.grouper.mode = mode
        before, counted = COUNTERS.read(), COUNTERS.read()
        yield counted
        after = COUNTERS.read()
        counted["steps_grouped"] = after["steps_grouped"] - before["steps_grouped"]
        counted["rows_grouped"] = after["rows_grouped"] - before["rows_grouped"]
        counted["steps_skipped"] = {
            reason: number - before["steps_skipped"].get(reason, 0)
            for reason, number in after["steps_skipped"].items()
        }


@contextmanager
def shared_engine(
    model: Path, cache: Path, *, mode: SharedPrefixMode = "always", **settings: Any
) -> Iterator[SharedEngine]:
    unregister()  # an earlier engine in this process may have registered the stock backend
    os.environ[CACHE_ENV] = str(cache)
    register.install(AttentionSettings(shared_prefix=mode))
    try:
        with live_engine(model, **settings) as live:
            yield SharedEngine(live)
    finally:
        unregister()


def unregister() -> None:
    """Restores the stock backend for later engines of this process; vLLM caches the chosen one."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()
    register._register.cache_clear()
