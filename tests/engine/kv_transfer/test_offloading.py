"""Offloading of KV blocks to host memory, beside prompt KV and across weights versions."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from engine.errors import StartFailed
from engine.kv_transfer.connector import PromptKvConnector
from engine.kv_transfer.versioned_offloading import VersionedOffloadingConnector
from engine.settings import EngineSettings
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL

BYTES = 2**30


def connectors(*, prompt_kv: bool, kv_offload_bytes: int | None) -> list[type]:
    """Classes of the connectors that vLLM makes of the settings."""
    settings = EngineSettings(prompt_kv=prompt_kv, kv_offload_bytes=kv_offload_bytes)
    config = engine_arguments(settings, MODEL, on_cpu=False).kv_transfer_config
    if config is None:
        return []
    if config.kv_connector != "MultiConnector":
        return [KVConnectorFactory.get_connector_class(config)]
    assert MultiConnector.all_children_support_hma(config)
    made = MultiConnector._get_connector_classes_and_configs(
        SimpleNamespace(kv_transfer_config=config)
    )
    return [connector for connector, _ in made]


def test_prompt_kv_comes_first_beside_offloading() -> None:
    assert connectors(prompt_kv=False, kv_offload_bytes=None) == []
    assert connectors(prompt_kv=True, kv_offload_bytes=None) == [PromptKvConnector]
    assert connectors(prompt_kv=False, kv_offload_bytes=BYTES) == [VersionedOffloadingConnector]
    both = [PromptKvConnector, VersionedOffloadingConnector]
    assert connectors(prompt_kv=True, kv_offload_bytes=BYTES) == both


def test_offloading_gets_its_bytes() -> None:
    config = engine_arguments(
        EngineSettings(prompt_kv=False, kv_offload_bytes=BYTES), MODEL, on_cpu=False
    ).kv_transfer_config
    assert config.kv_connector_extra_config == {"cpu_bytes_to_use": BYTES}


def test_offloading_is_refused_on_cpu() -> None:
    with pytest.raises(StartFailed, match=r"^engine\.kv_offload_bytes needs a GPU"):
        engine_arguments(EngineSettings(kv_offload_bytes=BYTES), MODEL, on_cpu=True)


def test_requests_that_outlive_a_weights_version_offload_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own reset lets them offload from their first block again."""
    running = SimpleNamespace(max_offload_tokens=None)
    connector = VersionedOffloadingConnector.__new__(VersionedOffloadingConnector)
    connector.connector_scheduler = SimpleNamespace(_req_status={"r": running})
    monkeypatch.setattr(OffloadingConnector, "reset_cache", lambda self: True)
    assert connector.reset_cache() is True
    assert running.max_offload_tokens == 0
