"""Construction of the KV components: export of prompt KV, and KV reuse between prompts."""

from dataclasses import dataclass

from engine.protocol import Engine
from service.cluster.build import Cluster
from service.config.prompt_kv import KvSettings
from service.kv.handles.downloads import KvDownloads
from service.kv.handles.manager import PromptKvManager
from service.kv.spans.manager import KvReuseManager
from service.observability.kv_metrics import PromptKvMetrics
from service.weights_versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Kv:
    """Prompt KV, its downloads, and KV reuse."""

    prompt_kv: PromptKvManager
    kv_downloads: KvDownloads
    kv_reuse: KvReuseManager


def build_kv(
    settings: KvSettings,
    engine: Engine,
    metrics: PromptKvMetrics,
    versions: Versions,
    cluster: Cluster,
) -> Kv:
    return Kv(
        prompt_kv=PromptKvManager(settings, engine, versions, replica_id=cluster.membership.own_id),
        kv_downloads=KvDownloads(settings.max_open_transfers, metrics),
        kv_reuse=KvReuseManager(
            engine,
            versions,
            directory=settings.directory,
            capacity_bytes=settings.spans_bytes,
        ),
    )
