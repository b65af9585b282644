"""Feature classes: KV kept across weights updates, and KV retained for paused sessions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from engine.feature_base import CorePart, EngineFeature, Ping, feature_status
from engine.kv_lifetime.core import version_hooks
from engine.kv_lifetime.core.engine_core_methods import METHODS, counted, release_all
from engine.settings import SESSION_KV_SECONDS
from engine.types.feature_stats import FeatureStatus, KeptKvStats, KvRetentionStats, total
from engine.types.info import EngineInfo, KeptKvReason

HOW: Final = "engine.session_kv_fraction"


class KeptKv(EngineFeature):
    """KV of chains, with the weights versions that computed it."""

    name = "kept_kv"
    core = CorePart(
        install=version_hooks.install,
        methods=(version_hooks.coppice_can_keep_kv,),
        counted=version_hooks.counted,
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


class SessionKvRetention(EngineFeature):
    """KV of paused sessions, which is evicted after all other cached KV."""

    name = "session_kv_retention"
    core = CorePart(methods=METHODS, counted=counted, on_prefix_cache_reset=release_all)
    stats: KvRetentionStats = KvRetentionStats()

    def status(self) -> Iterable[FeatureStatus]:
        fraction, reason = self.settings.engine.session_kv_fraction, f"{HOW} is 0"
        if fraction:
            reason = f"up to {fraction:.0%} of the KV cache, for {SESSION_KV_SECONDS:g} s"
        yield feature_status(self.name, fraction, reason, HOW)

    async def start(self, info: EngineInfo) -> None:
        if fraction := self.settings.engine.session_kv_fraction:
            method = "coppice_start_session_kv_retention"
            await self.engine.call_cores(method, fraction, SESSION_KV_SECONDS)

    async def release(self, session_ids: Sequence[str]) -> None:
        await self.engine.call_cores("coppice_release_session_kv", list(session_ids))

    def on_ping(self, pings: Sequence[Ping]) -> None:
        engines = [KvRetentionStats(**(each["core"] or {})) for each in self.counts(pings)]
        self.stats = total(engines)
