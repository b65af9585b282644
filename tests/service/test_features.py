"""Optional features in GET /v1/status and in the table that is printed at start."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coppice.wire.status import FeatureStatus, StatusAnswer
from engine.types import feature_stats
from engine.types.info import EngineInfo
from service.server import Server
from service.status.features import features, table
from tests.fake_engine import FakeEngine
from tests.serving import serving, settings_for

DRAFTING = feature_stats.FeatureStatus(
    name="speculation", enabled=False, reason="it is off", how_to_change="speculation.mode"
)


class Featured(FakeEngine):
    """A fake engine with a feature."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, features=(DRAFTING,))


async def listed(
    tmp_path: Path, *, prompt_kv: bool = False, **sections: Any
) -> dict[str, FeatureStatus]:
    async with serving(Featured(prompt_kv=prompt_kv), tmp_path, **sections) as served:
        answer = StatusAnswer.model_validate((await served.http.get("/v1/status")).json())
    return {feature.name: feature for feature in answer.features}


async def test_status_lists_features_of_the_engine_and_of_the_service(tmp_path: Path) -> None:
    found = await listed(tmp_path)
    assert vars(found["speculation"]) == {
        "name": "speculation",
        "enabled": False,
        "reason": "it is off",
        "how_to_change": "speculation.mode",
    }
    assert found.keys() == {
        *("prompt_kv", "kv_reuse", "speculation", "cluster", "weight_replication"),
        *("authentication", "operators_port", "tracing", "dashboard"),
    }
    assert all(feature.reason for feature in found.values())


async def test_features_are_empty_before_the_engine_has_started(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.start_gate = asyncio.Event()
    async with serving(engine, tmp_path, wait=False) as served:
        assert (await served.http.get("/v1/status")).json()["features"] == []


async def test_kv_reuse_needs_prompt_kv(tmp_path: Path) -> None:
    assert (await listed(tmp_path))["kv_reuse"].reason == "it needs prompt_kv"


async def test_prompt_kv_and_kv_reuse_are_on_with_room(tmp_path: Path) -> None:
    found = await listed(tmp_path, prompt_kv=True, kv={"capacity_bytes": 2**20})
    assert found["prompt_kv"].enabled and found["kv_reuse"].enabled
    assert found["prompt_kv"].reason.startswith("up to 1 MiB of shared memory")


@pytest.mark.parametrize(
    ("setting", "reason", "how"),
    [
        (False, "engine.prompt_kv is false", "engine.prompt_kv: true"),
        (None, "kv.directory has less than 128 MiB free", "more shared memory"),
        ("two machines", "it is not supported on several machines", "engine.nnodes: 1"),
        ("ray", "it is not supported on several machines", "engine.distributed_executor_backend"),
    ],
)
async def test_reason_of_disabled_prompt_kv_says_who_disabled_it(
    tmp_path: Path, setting: bool | str | None, reason: str, how: str
) -> None:
    several: dict[object, dict[str, Any]] = {
        "two machines": {"nnodes": 2, "tensor_parallel_size": 2},
        "ray": {"distributed_executor_backend": "ray"},
    }
    engine = several.get(setting, {"prompt_kv": setting})
    server = Server(settings_for(tmp_path, engine=engine), Featured())
    found = {feature.name: feature for feature in features(server)}["prompt_kv"]
    assert (found.enabled, found.reason) == (False, reason)
    assert found.how_to_change.startswith(how)


async def test_cache_of_spans_can_be_disabled_alone(tmp_path: Path) -> None:
    kv = {"capacity_bytes": 2**20, "spans_bytes": 0}
    found = await listed(tmp_path, prompt_kv=True, kv=kv)
    assert found["prompt_kv"].enabled
    assert not found["kv_reuse"].enabled
    assert found["kv_reuse"].reason == "kv.spans_bytes is 0"


async def test_settings_of_the_service_enable_features(tmp_path: Path) -> None:
    trace = {"endpoint": "http://secret-collector:4318/v1/traces"}
    server = Server(settings_for(tmp_path, trace=trace, server={"ui": True}), Featured())
    found = {feature.name: feature for feature in features(server)}
    assert found["tracing"].enabled and found["dashboard"].enabled
    assert not found["authentication"].enabled
    assert found["authentication"].how_to_change == "server.keys_file"
    assert "secret-collector" not in str(found)
    assert str(tmp_path) not in str(found)


async def test_table_is_printed_once_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="service.app"):
        await listed(tmp_path)
    [printed] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("features:")]
    lines = printed.splitlines()
    assert lines[1].split() == ["feature", "reason", "changed", "by"]
    [line] = [line for line in lines if line.startswith("speculation")]
    assert line.split("  ")[-1] == "speculation.mode" and " off " in line


def test_columns_of_the_table_are_aligned() -> None:
    short = FeatureStatus(name="a", enabled=True, reason="r", how_to_change="x")
    long = FeatureStatus(name="longer", enabled=False, reason="reason", how_to_change="")
    assert table([short, long]).splitlines() == [
        "feature       reason  changed by",
        "a        on   r       x",
        "longer   off  reason",
    ]
