"""Settings of engines on several machines, and what these engines refuse."""

import os
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shapes import GraphShape
from engine.errors import StartFailed
from engine.launch.environment import settings_digest
from engine.launch.machines import (
    MachineDigests,
    check_equal,
    check_machines,
    check_serves,
    network_variables,
)
from engine.launch.worker_machines import BLOCK_BYTES, NUM_BLOCKS, model_digest
from engine.settings import AttentionSettings, EngineSettings, SpeculationSettings

TWO: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2}
OFF = SpeculationSettings(mode="off")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_rank": 1}, "node_rank is 1, and nnodes is 1"),
        ({"nnodes": 2}, "does not divide the 1 ranks"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "does not divide the 3 ranks"),
        ({"distributed_executor_backend": "ray"}, "Ray executor is not supported"),
        ({"vllm_args": {"distributed_executor_backend": "ray"}}, "Ray executor is not supported"),
        (TWO | {"vllm_args": {"nnodes": 2}}, "nnodes and vllm_args.nnodes are both set"),
        ({"distributed_executor_backend": "uni"}, "'mp'"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineSettings(**changes)


def test_arguments_of_vllm_are_the_settings_of_the_same_name() -> None:
    assert EngineSettings(vllm_args=TWO | {"node_rank": 1}) == EngineSettings(**TWO, node_rank=1)


@pytest.mark.parametrize(
    ("changes", "mode", "message"),
    [
        ({"prompt_kv": True}, "off", "set engine.prompt_kv to false"),
        ({"kv_offload_bytes": 2**20}, "off", "set engine.kv_offload_bytes to none"),
        ({}, "drafter", "set speculation.mode to siblings or off"),
    ],
)
def test_features_of_one_machine_are_refused(
    changes: dict[str, Any], mode: Any, message: str
) -> None:
    speculation = SpeculationSettings(mode=mode)
    check_machines(EngineSettings(tensor_parallel_size=2, **changes), speculation)
    with pytest.raises(StartFailed, match=message) as refused:
        check_machines(EngineSettings(**TWO, **changes), speculation)
    assert "engine.nnodes is 2" in str(refused.value)


def test_ranks_of_one_machine_use_loopback() -> None:
    assert network_variables(EngineSettings()) == {"VLLM_HOST_IP": "127.0.0.1"}


def test_ranks_of_several_machines_use_the_route_to_machine_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    settings = EngineSettings(**TWO, master_addr="localhost")
    variables = network_variables(settings)
    assert variables["VLLM_HOST_IP"] in ("127.0.0.1", "::1")
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert network_variables(settings) == {"VLLM_HOST_IP": "192.0.2.7"}


def test_unknown_machine_0_is_refused() -> None:
    settings = EngineSettings(**TWO, master_addr="machine-0.invalid", start_seconds=0.1)
    with pytest.raises(StartFailed, match=r"machine-0\.invalid is not known"):
        network_variables(settings)


def test_threads_are_shared_by_the_ranks_of_a_machine() -> None:
    available = len(os.sched_getaffinity(0))
    assert EngineSettings(**TWO).threads_per_rank == available


def test_digest_differs_by_shared_settings_only() -> None:
    first = EngineSettings(**TWO)
    plain = AttentionSettings(shared_prefix="off")
    digest = settings_digest(first, plain, OFF, None)
    second = EngineSettings(**TWO, node_rank=1, seed=3, model="/other/path")
    elsewhere = AttentionSettings(shared_prefix="off", cache_directory=Path("/other/path"))
    assert settings_digest(second, elsewhere, OFF, None) == digest
    siblings = SpeculationSettings(mode="siblings")
    plan = Plan(shapes=(GraphShape(8, 1),), estimated_bytes=1, budget_bytes=2)
    others = [
        settings_digest(EngineSettings(**TWO, max_logprobs=3), plain, OFF, None),
        settings_digest(first, AttentionSettings(shared_prefix="always"), OFF, None),
        settings_digest(first, plain, siblings, None),
        settings_digest(first, plain, OFF, plan),
    ]
    assert digest not in others
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("settings", "were started with other settings"),
        ("versions", "have other versions of Coppice, vLLM or torch"),
        ("model", "have other files of the model"),
    ],
)
def test_machines_that_differ_are_refused(name: str, message: str) -> None:
    first = MachineDigests(settings="a", versions="b", model="c")
    other = first | {name: "d"}
    check_equal([first, first, first, first], ranks_per_node=2)
    with pytest.raises(StartFailed, match=rf"machines \[1\] {message}"):
        check_equal([first, first, cast(MachineDigests, other), first], ranks_per_node=2)


def test_engine_is_on_machine_0_only() -> None:
    check_serves(EngineSettings(**TWO))
    with pytest.raises(StartFailed, match="engine.node_rank is 1: only machine 0 has the engine"):
        check_serves(EngineSettings(**TWO, node_rank=1))


def test_digest_of_a_model_covers_all_parts_of_large_files(tmp_path: Path) -> None:
    num_bytes = 3 * NUM_BLOCKS * BLOCK_BYTES
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(num_bytes))
    found = {model_digest(tmp_path)}
    for changed in (0, num_bytes // 2, num_bytes - 3 * BLOCK_BYTES):
        content = bytearray(num_bytes)
        content[changed : changed + BLOCK_BYTES] = b"\1" * BLOCK_BYTES
        weights.write_bytes(content)
        found.add(model_digest(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len(found | {model_digest(tmp_path)}) == 5
