"""Feature classes: export and load of prompt KV, and vLLM's KV offloading."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from engine.errors import StartFailed
from engine.feature_base import (
    EngineFeature,
    WorkerPart,
    feature_status,
    refuse_several_machines,
)
from engine.kv_transfer.worker.worker_methods import METHODS
from engine.settings import EngineSettings
from engine.types.feature_stats import FeatureStatus
from engine.types.info import KvReason
from engine.types.kv import GpuMemory, KvFormat, LayerFormat

log = logging.getLogger(__name__)
PROMPT_KV_CONNECTOR: Final[Mapping[str, Any]] = {
    "kv_connector": "PromptKvConnector",
    "kv_connector_module_path": "engine.kv_transfer.connector",
    "kv_role": "kv_producer",  # loads of a consumer may outlast a step; ours never do
    "kv_load_failure_policy": "recompute",
}
OFFLOADING_CONNECTOR: Final[Mapping[str, Any]] = {
    "kv_connector": "VersionedOffloadingConnector",
    "kv_connector_module_path": "engine.kv_transfer.versioned_offloading",
    "kv_role": "kv_both",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSupport:
    """Format of exported prompt KV, or the reason why there are no exports.

    `indirect_reason` is the reason why a GPU does not copy directly into shared memory,
    `gpu_memory` the memory in which KV can stay on the GPUs, per rank that exports, and
    `gpu_reason` the reason why there is none.
    """

    format: KvFormat | None = None
    reason: KvReason | None = None
    indirect_reason: str | None = None
    gpu_memory: tuple[GpuMemory, ...] = ()
    gpu_reason: str = ""


def _connectors(settings: EngineSettings, *, on_cpu: bool) -> KVTransferConfig | None:
    """vLLM's configuration of one KV connector, or of several in a `MultiConnector`."""
    connectors = [dict(PROMPT_KV_CONNECTOR)] if settings.prompt_kv else []
    if settings.kv_offload_bytes is not None:
        connectors.append(_offloading_connector(settings.kv_offload_bytes, on_cpu=on_cpu))
    if not connectors:
        return None

    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    config = connectors[0] if len(connectors) == 1 else several
    return KVTransferConfig(**config)


def _offloading_connector(num_bytes: int, *, on_cpu: bool) -> dict[str, Any]:
    if on_cpu:
        raise StartFailed(
            "engine.kv_offload_bytes needs a GPU: on CPU the KV cache is in host memory already; "
            "set engine.cache_bytes instead"
        )
    return {
        **OFFLOADING_CONNECTOR,
        "kv_connector_extra_config": {"cpu_bytes_to_use": num_bytes},
    }


class PromptKvExport(EngineFeature):
    """Prompt KV that samples export, in the arena of the service and on the GPUs."""

    name = "prompt_kv"
    worker = WorkerPart(methods=METHODS)
    support: KvSupport = KvSupport()

    def check(self) -> None:
        settings = self.settings.engine
        if settings.prompt_kv:
            refuse_several_machines(
                settings,
                "prompt KV is exported to the shared memory of one machine",
                "engine.prompt_kv to false",
            )
        if settings.data_parallel_size > 1 and settings.prompt_kv_gpu_bytes is not None:
            raise StartFailed(
                "engine.data_parallel_size and engine.prompt_kv_gpu_bytes exclude each other: a "
                "handle has one GPU per rank, and does not state the engine; unset one of them"
            )

    def set_arguments(self, arguments: AsyncEngineArgs, *, on_cpu: bool) -> None:
        """Set the connector of prompt KV, and that of offloaded KV after it."""
        arguments.kv_transfer_config = _connectors(self.settings.engine, on_cpu=on_cpu)

    async def prepare(self) -> None:
        """Prepare every rank; one unsupported rank disables exports on all."""
        settings = self.settings.engine
        if not settings.prompt_kv:
            off = "prompt KV is off"
            self.support = KvSupport(reason="disabled", indirect_reason=off, gpu_reason=off)
            return
        gpu_bytes = settings.prompt_kv_gpu_bytes or 0
        results = await self.engine.call_workers("coppice_prepare_kv_export", gpu_bytes)
        config = self.engine.llm.vllm_config.model_config.hf_text_config
        self.support = kv_support(results, settings, getattr(config, "rope_parameters", None))

    def info_fields(self) -> Mapping[str, Any]:
        found = self.support
        return {
            "kv_format": found.format,
            "kv_reason": found.reason,
            "kv_gpu_memory": found.gpu_memory,
        }

    def status(self) -> Iterable[FeatureStatus]:
        indirect, why_off = self.support.indirect_reason, self.support.gpu_reason
        copied = indirect or "the GPU copies prompt KV into registered shared memory"
        yield feature_status("direct_kv_copies", indirect is None, copied)
        kept = why_off or "exported KV also stays in GPU memory, for readers by CUDA IPC"
        yield feature_status("prompt_kv_on_gpu", not why_off, kept, "engine.prompt_kv_gpu_bytes")

    async def flush(self) -> None:
        """Wait for exports by calling all workers, which run earlier steps and aborts first."""
        if self.support.format is not None:
            await self.engine.call_workers("coppice_flush_exports")


class KvOffloading(EngineFeature):
    """vLLM's offloading of KV to host memory, with versions in its keys."""

    name = "kv_offloading"
    covers = {
        "kv_offloading_size": "engine.kv_offload_bytes",
        "kv_offloading_backend": "engine.kv_offload_bytes",
    }

    def check(self) -> None:
        if self.settings.engine.kv_offload_bytes is not None:
            refuse_several_machines(
                self.settings.engine,
                "offloaded KV is in the host memory of one machine",
                "engine.kv_offload_bytes to none",
            )

    def status(self) -> Iterable[FeatureStatus]:
        num_bytes, how = self.settings.engine.kv_offload_bytes, "engine.kv_offload_bytes"
        reason = f"{how} is " + ("none" if num_bytes is None else f"{num_bytes}")
        yield feature_status(self.name, num_bytes is not None, reason, how)


def kv_support(results: Sequence[Any], settings: EngineSettings, rope: Any) -> KvSupport:
    """Format of exports, from the answers of all ranks, or the reason why there are none."""
    reasons, memory, failures = (
        [r.pop(name) for r in results if not isinstance(r, str)]
        for name in ("indirect_reason", "gpu_memory", "gpu_failure")
    )
    if any(isinstance(result, str) or result != results[0] for result in results):
        log.warning("prompt KV cannot be exported: %s", results)
        reason = "the model's KV cache cannot be exported"
        return KvSupport(reason="unsupported_cache", indirect_reason=reason, gpu_reason=reason)
    layers = [LayerFormat(**layer) for layer in results[0].pop("layers")]
    return KvSupport(
        format=KvFormat.of_layers(layers, **results[0], rope=dict(rope or {})),
        indirect_reason=next(filter(None, reasons), None),
        gpu_memory=() if any(failures) else tuple(map(GpuMemory.from_dict, filter(None, memory))),
        gpu_reason=_gpu_reason(settings, failures),
    )


def _gpu_reason(settings: EngineSettings, failures: Sequence[str | None]) -> str:
    """Reason why no KV stays on the GPUs; empty if it does."""
    if settings.prompt_kv_gpu_bytes is None:
        return "engine.prompt_kv_gpu_bytes is none"
    if current_platform.is_cpu():
        return "there is no GPU"
    return next(filter(None, failures), "")
