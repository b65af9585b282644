"""Retained KV of paused agent sessions as a feature of the engine."""

from collections.abc import Iterable, Sequence
from typing import Final

from engine.feature_base import CorePart, EngineFeature, Ping, feature_status
from engine.kv_retention.core.engine_core_methods import METHODS, counted, release_all
from engine.settings import SESSION_KV_SECONDS
from engine.types.feature_stats import FeatureStatus, KvRetentionStats, total
from engine.types.info import EngineInfo

HOW: Final = "engine.session_kv_fraction"


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
