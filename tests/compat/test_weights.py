"""Weights from directories, by the protocols of TRL and vLLM, prime-rl, and SGLang."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import LoadFailed
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

NCCL = {"update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}}


def directory(tmp_path: Path, name: str = "step_1", content: bytes = b"1") -> str:
    """A directory as prime-rl writes it, marker file last. The fake engine reads none of it."""
    path = tmp_path / "broadcasts" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    (path / "STABLE").touch()
    return str(path)


def sources(tmp_path: Path) -> dict[str, Any]:
    return {"weights": {"source_directories": [tmp_path / "broadcasts"]}}


async def active(served: Foreign) -> str:
    return str((await served.http.get("/get_weight_version")).json()["weight_version"])


def swaps(engine: FakeEngine) -> list[str]:
    return [call for call in engine.calls if call.startswith("swap")]


async def test_prime_rl_update_is_active_when_it_returns(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        await served.post("/pause?mode=keep&clear_cache=false")
        assert served.engine.paused
        answer = await served.post("/update_weights", {"weight_dir": directory(tmp_path)})
        assert served.engine.paused, "the trainer's own pause survives the update"
        await served.post("/resume")
        assert answer == {"status": "ok", "weight_version": "update-1", "state": "active"}
        assert await active(served) == "update-1"
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
        drawn = await served.post("/inference/v1/generate", body)
    assert drawn["choices"][0]["weight_versions"][0]["version"] == "update-1"


async def test_every_update_gets_the_next_version(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        for step in (1, 2, 3):
            weights = directory(tmp_path, f"step_{step}")
            await served.post("/update_weights", {"weight_dir": weights})
            assert await active(served) == f"update-{step}"
        assert served.server.versions.active.sequence == 3


async def test_repeated_update_loads_nothing(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        weights = directory(tmp_path)
        first = await served.post("/update_weights", {"weight_dir": weights})
        assert await served.post("/update_weights", {"weight_dir": weights}) == first
        assert swaps(served.engine) == ["swap update-1"]


async def test_rewritten_files_are_another_version(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        for content in (b"1", b"22"):
            weights = directory(tmp_path, content=content)
            await served.post("/update_weights", {"weight_dir": weights})
        assert await active(served) == "update-2"
        labels = {version.label for version in served.server.versions.all()}
    assert labels == {"v0", "update-2"}, "what was overwritten cannot be gone back to"


async def test_nothing_changes_between_start_and_finish(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        await served.post("/start_weight_update", {"is_checkpoint_format": True})
        staged = await served.post("/update_weights", {"weight_dir": directory(tmp_path)})
        assert (staged["state"], await active(served)) == ("staged", "v0")
        assert (await served.post("/finish_weight_update"))["weight_version"] == "update-1"
        assert await active(served) == "update-1"


async def test_start_and_finish_are_idempotent(tmp_path: Path) -> None:
    """TRL repeats each after a 502 or 503, although the first call may have succeeded."""
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        for _ in range(2):
            await served.post("/start_weight_update", {})
        await served.post("/update_weights", {"weight_dir": directory(tmp_path)})
        for _ in range(2):
            answer = await served.post("/finish_weight_update", {})
            assert answer["weight_version"] == "update-1"
        assert swaps(served.engine) == ["swap update-1"]


async def test_start_discards_an_unfinished_update(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        for step in (1, 2):
            await served.post("/start_weight_update", {})
            weights = directory(tmp_path, f"step_{step}")
            await served.post("/update_weights", {"weight_dir": weights})
        await served.post("/finish_weight_update", {})
        [loaded] = served.engine.loaded
    assert loaded.name == "step_2"


async def test_update_without_weights_changes_nothing(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        await served.post("/start_weight_update", {})
        assert (await served.post("/finish_weight_update", {}))["weight_version"] == "v0"


async def test_finish_may_name_the_version(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        await served.post("/start_weight_update", {})
        await served.post("/update_weights", {"weight_dir": directory(tmp_path)})
        await served.post("/finish_weight_update", {"weight_version": "policy-7"})
        assert await active(served) == "policy-7"
        assert {version.label for version in served.server.versions.all()} == {"v0", "policy-7"}


async def test_failed_finish_can_be_repeated(tmp_path: Path) -> None:
    """No caller receives success for weights that do not serve."""
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        await served.post("/update_weights", {"weight_dir": directory(tmp_path, "step_0")})
        await served.post("/start_weight_update", {})
        await served.post("/update_weights", {"weight_dir": directory(tmp_path)})
        taken = {"weight_version": "update-1"}
        for _ in range(2):
            status, problem = await served.refused("/finish_weight_update", taken)
            assert (status, problem["code"]) == (409, "version_conflict")
        served.engine.load_error = LoadFailed("out of memory")
        assert (await served.refused("/finish_weight_update", {}))[0] == 500
        served.engine.load_error = None
        assert (await served.post("/finish_weight_update", {}))["weight_version"] == "update-2"
        assert await active(served) == "update-2"


async def test_active_directory_is_neither_dropped_nor_blocks_others(
    tmp_path: Path,
) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        weights = {"weight_dir": directory(tmp_path)}
        await served.post("/update_weights", weights)
        for _ in range(2):
            await served.post("/start_weight_update", {})
            await served.post("/update_weights", weights)
        assert (await served.post("/finish_weight_update", {}))["weight_version"] == "update-1"
        await served.post("/start_weight_update", {})
        await served.post("/update_weights", weights)
        await served.post("/finish_weight_update", {"weight_version": "resumed"})
        assert await active(served) == "resumed"
        assert {version.label for version in served.server.versions.all()} == {"v0", "resumed"}


async def test_sglang_update_from_disk_keeps_its_label(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        await served.post("/pause_generation", {})
        await served.post("/flush_cache")
        body = {"model_path": directory(tmp_path), "weight_version": "4", "flush_cache": True}
        for _ in range(2):
            answer = await served.post("/update_weights_from_disk", body)
            assert (answer["success"], answer["weight_version"]) == (True, "4")
        await served.post("/continue_generation", {})
        assert not served.engine.paused
        assert swaps(served.engine) == ["swap 4"]


async def test_directory_outside_the_allowed_ones_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path, field in (
            ("/update_weights", "weight_dir"),
            ("/update_weights_from_disk", "model_path"),
        ):
            status, problem = await served.refused(path, {field: directory(tmp_path)})
            assert (status, problem["code"]) == (422, "path_refused")


async def test_missing_file_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        weights = directory(tmp_path)
        file = tmp_path / "broadcasts" / "step_1" / "model.safetensors"
        file.unlink()
        file.symlink_to(tmp_path / "gone")
        answer = await served.http.post("/update_weights", json={"weight_dir": weights})
        assert answer.status_code == 422, answer.text


async def test_weights_over_nccl_are_refused_with_advice(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for body in (NCCL, {"weight_dir": None}, {}):
            status, problem = await served.refused("/update_weights", body)
            assert (status, problem["code"]) == (422, "unsupported")
            assert "coppice.integrations.trl" in problem["detail"]


async def test_refused_weights_keep_the_active_ones(tmp_path: Path) -> None:
    async with foreign(tmp_path, **sources(tmp_path)) as served:
        served.engine.refused_weights = {"step_1": "a tensor is missing"}
        body = {"weight_dir": directory(tmp_path)}
        status, problem = await served.refused("/update_weights", body)
        assert (status, problem["code"]) == (422, "weights_refused")
        served.engine.refused_weights = {}
        served.engine.load_error = LoadFailed("broke off")
        assert (await served.refused("/update_weights", body))[0] == 500
        assert await active(served) == "v0"
        served.engine.load_error = None
        await served.post("/update_weights", body)
        assert await active(served) == "update-1", "and a retry loads what is there now"


async def test_prefix_cache_is_reset_on_request(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        assert await served.post("/reset_prefix_cache") == {"success": True}
        assert (await served.http.get("/flush_cache")).status_code == 200
        assert served.engine.calls == ["pause keep", "forget", "resume"] * 2


async def test_server_info_is_readable_by_clients_of_both_servers(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        info = (await served.http.get("/server_info?config_format=json")).json()
        size = (await served.http.get("/get_world_size")).json()
        paused = (await served.http.get("/is_paused")).json()
        model = (await served.http.get("/get_model_info")).json()
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["vllm_config"]["lora_config"] is None
    assert (info["tp_size"], info["disaggregation_mode"]) == (1, "null")
    assert (size, paused) == ({"world_size": 1}, {"is_paused": False})
    assert (model["is_generation"], model["weight_version"]) == (True, "v0")


async def test_trainer_probes_answer(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path in ("/health", "/health_generate", "/liveness"):
            assert (await served.http.get(path)).status_code == 200
        served.engine.die()
        for path in ("/health", "/health_generate", "/liveness"):
            assert (await served.http.get(path)).status_code == 503


async def test_unknown_pause_mode_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        assert (await served.refused("/pause?mode=never"))[0] == 422
        assert (await served.refused("/abort_request", {}))[0] == 422
