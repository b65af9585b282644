"""KV that chains keep across weights updates as a feature of the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.feature_base import CorePart, EngineFeature, Ping
from engine.kv_versions.core import hooks
from engine.types.feature_stats import KeptKvStats, total
from engine.types.info import KeptKvReason


class KeptKv(EngineFeature):
    """KV of chains, with the weights versions that computed it."""

    name = "kept_kv"
    core = CorePart(
        install=hooks.install, methods=(hooks.coppice_can_keep_kv,), counted=hooks.counted
    )
    stats: KeptKvStats = KeptKvStats()
    reason: KeptKvReason | None = None
    """Reason why no KV can be kept across weights updates; None if it can."""

    async def prepare(self) -> None:
        if not self.engine.llm.vllm_config.cache_config.enable_prefix_caching:
            self.reason = "prefix_caching_off"
        elif self.settings.engine.kv_offload_bytes is not None:
            self.reason = "kv_offloading"
        elif not all(await self.engine.call_cores("coppice_can_keep_kv")):
            self.reason = "unsupported_cache"

    def info_fields(self) -> Mapping[str, Any]:
        return {"kept_kv_reason": self.reason}

    def on_ping(self, pings: Sequence[Ping]) -> None:
        self.stats = total([KeptKvStats(**each["core"]) for each in self.counts(pings)])
