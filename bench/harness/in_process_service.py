"""Runs a complete HTTP service in the benchmark's process, with access to its engine."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from prometheus_client import REGISTRY

from engine.attention.settings import AttentionSettings
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from engine.vllm_engine import VllmEngine
from service.app import create_app
from service.config.prompt_kv import KvSettings
from service.config.settings import Settings, WeightsSettings
from service.http.limited_protocol import protocol_with_limits


@asynccontextmanager
async def running_service(
    engine_settings: EngineSettings,
    attention: AttentionSettings | None = None,
    kv: KvSettings | None = None,
    speculation: SpeculationSettings | None = None,
) -> AsyncIterator[tuple[VllmEngine, str]]:
    engine = VllmEngine(
        engine_settings, attention=attention or AttentionSettings(), speculation=speculation
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            engine=engine_settings,
            weights=WeightsSettings(directory=Path(folder)),
            kv=kv or KvSettings(),
        )
        config = uvicorn.Config(
            create_app(settings, engine),
            http=protocol_with_limits(settings.limits),
            port=0,
            log_level="warning",
            access_log=False,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while engine.health().stage != "serving":
            await asyncio.sleep(0.1)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield engine, f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await serving


def computed_prompt_tokens() -> float:
    """Number of prompt tokens that vLLM has prefilled so far, according to its counter."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    wanted = ("vllm:prompt_tokens_by_source_total", "local_compute")
    return sum(s.value for s in samples if (s.name, s.labels.get("source")) == wanted)
