"""Settings of engines on several machines, and what these engines refuse."""

import os
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from engine.attention.settings import AttentionSettings
from engine.errors import StartFailed
from engine.feature_base import StartSettings
from engine.features import Features
from engine.launch.environment import (
    intel_openmp_library,
    interface_variables,
    rank_preload,
    rank_variables,
    settings_digest,
    thread_variables,
)
from engine.launch.ranks.data_parallel import check_settings
from engine.launch.ranks.digests import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    MachineDigests,
    check_machines_equal,
    check_ranks_equal,
    model_digest,
)
from engine.launch.ranks.multi_machine_setup import (
    check_ray,
    check_serves,
    network_variables,
    set_network_variables,
)
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from tests.engine.made_arguments import features_of

TWO: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2}
RAY: dict[str, Any] = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}
OFF = SpeculationSettings(mode="off")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_rank": 1}, "node_rank is 1, and nnodes is 1"),
        ({"nnodes": 2}, "does not divide the 1 ranks"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "does not divide the 3 ranks"),
        (TWO | {"distributed_executor_backend": "ray"}, "exclude each other: Ray places"),
        (TWO | {"vllm_args": {"nnodes": 2}}, "nnodes and vllm_args.nnodes are both set"),
        ({"distributed_executor_backend": "uni"}, "'mp'"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineSettings(**changes)


def test_arguments_of_vllm_are_the_settings_of_the_same_name() -> None:
    assert EngineSettings(vllm_args=TWO | {"node_rank": 1}) == EngineSettings(**TWO, node_rank=1)


def check_features(settings: EngineSettings, speculation: SpeculationSettings) -> None:
    Features(StartSettings(engine=settings, speculation=speculation)).check()


@pytest.mark.parametrize(
    ("changes", "mode", "message"),
    [
        ({"prompt_kv": True}, "off", "set engine.prompt_kv to false"),
        ({"kv_offload_bytes": 2**20}, "off", "set engine.kv_offload_bytes to none"),
        ({"weight_transfer": "ipc"}, "off", "set engine.weight_transfer to none"),
        ({}, "drafter", "set speculation.mode to siblings or off"),
    ],
)
def test_features_of_one_machine_are_refused(
    changes: dict[str, Any], mode: Any, message: str
) -> None:
    speculation = SpeculationSettings(mode=mode)
    check_features(EngineSettings(tensor_parallel_size=2, **changes), speculation)
    with pytest.raises(StartFailed, match=message) as refused:
        check_features(EngineSettings(**TWO, **changes), speculation)
    assert "engine.nnodes is 2" in str(refused.value)
    with pytest.raises(StartFailed, match=message) as refused:
        check_features(EngineSettings(**RAY, **changes), speculation)
    assert "engine.distributed_executor_backend is ray" in str(refused.value)


def test_start_without_ray_names_the_package() -> None:
    with pytest.raises(StartFailed, match=r"install coppice-rl\[ray\]"):
        check_ray(EngineSettings(**RAY), finds=lambda _: False)


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "local", "LOCAL", "10.0.0.1", " "])
def test_address_that_is_not_of_a_node_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(StartFailed, match="must be on a node"):
        check_ray(EngineSettings(**RAY), finds=lambda _: True)
    for joined in ("", "auto", "10.0.0.1:6379", "[fd00::1]:6379"):
        monkeypatch.setenv("RAY_ADDRESS", joined)
        check_ray(EngineSettings(**RAY), finds=lambda _: True)


def test_ray_is_an_argument_of_vllm_too() -> None:
    same = EngineSettings(tensor_parallel_size=2, vllm_args={"distributed_executor_backend": "ray"})
    assert same == EngineSettings(**RAY) and same.uses_ray and same.uses_several_machines


def test_ray_places_the_ranks_of_one_engine() -> None:
    with pytest.raises(StartFailed, match="distributed_executor_backend ray exclude"):
        check_settings(EngineSettings(**RAY, data_parallel_size=2))


def test_ranks_in_ray_are_not_bound_to_processors_of_the_service() -> None:
    variables = thread_variables(EngineSettings(**RAY, cpu_threads=2), [0, 1])
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables["OMP_NUM_THREADS"] == "2"


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
    digest = settings_digest(first, {"A": "1"})
    elsewhere = {"model": "/other/path", "cache_directory": "/other/cache"}
    second = EngineSettings(**TWO, **elsewhere, node_rank=1, seed=3)
    assert settings_digest(second, {"A": "1"}) == digest
    others = [
        settings_digest(EngineSettings(**TWO, max_logprobs=3), {"A": "1"}),
        settings_digest(first, {"A": "2"}),
        settings_digest(first, {"B": "1"}),
    ]
    assert digest not in others
    assert len(set(others)) == len(others)


def test_machines_share_the_settings_of_features_that_ranks_have() -> None:
    siblings = SpeculationSettings(mode="siblings")
    engine = EngineSettings(**TWO)
    plain = features_of(engine, speculation=siblings).environment()
    own = siblings.model_copy(update={"drafter_training": False, "drafter": Path("/here")})
    assert features_of(engine, speculation=own).environment() == plain
    shorter = siblings.model_copy(update={"longest_draft": 3})
    always = AttentionSettings(shared_prefix="always")
    others = [
        features_of(engine),
        features_of(engine, speculation=shorter),
        features_of(engine, speculation=siblings, attention=always),
    ]
    assert plain not in [features.environment() for features in others]


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
    check_machines_equal([first, first, first, first], ranks_per_node=2)
    with pytest.raises(StartFailed, match=rf"machines \[1\] {message}"):
        check_machines_equal([first, first, cast(MachineDigests, other), first], ranks_per_node=2)


def test_ranks_in_ray_get_the_variables_of_engines_and_no_credentials() -> None:
    kept = {
        "COPPICE_ENGINE": "1",
        "COPPICE_ENGINE_START_PHASES": "/tmp/phases",
        "VLLM_PLUGINS": "coppice",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
    }
    others = (
        *(
            "COPPICE_AUTH__KEYS",
            "COPPICE_ENGINE__MODEL",
            "HF_TOKEN",
            "VLLM_API_KEY",
            "VLLM_HOST_IP",
            "TMPDIR",
            "PATH",
        ),
        *("VLLM_NIXL_SIDE_CHANNEL_HOST", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "LD_PRELOAD"),
    )
    assert rank_variables(kept | dict.fromkeys(others, "x")) == kept


def test_only_the_openmp_runtime_is_preloaded_in_ray() -> None:
    library = str(intel_openmp_library())
    assert rank_preload({"LD_PRELOAD": f"/x/libtcmalloc.so:{library}"}) == {"LD_PRELOAD": library}
    assert rank_preload({"LD_PRELOAD": "/x/libtcmalloc.so"}) == rank_preload({}) == {}


def test_interfaces_of_a_ray_node_precede_those_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    service = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}
    set_network_variables("127.0.0.1", interface_variables(service))
    assert [os.environ[name] for name in names] == ["127.0.0.1", "eth1", "ib0"]
    assert os.environ.get("NCCL_DEBUG") != "INFO"


def test_address_of_a_ray_node_gives_way_to_the_variables_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.7")
    set_network_variables("127.0.0.1", {})
    assert (os.environ["VLLM_HOST_IP"], os.environ["GLOO_SOCKET_IFNAME"]) == ("192.0.2.7", "lo")


@pytest.mark.parametrize("name", ["versions", "model"])
def test_nodes_of_ray_that_differ_from_the_service_are_refused(name: str) -> None:
    own = MachineDigests(settings="a", versions="b", model="c")
    other = cast(MachineDigests, own | {name: "d"})
    check_ranks_equal([own, own], own)
    with pytest.raises(StartFailed, match=r"the nodes of ranks \[1\] have other .* than the mach"):
        check_ranks_equal([own, other], own)


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
