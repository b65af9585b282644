"""LoRA adapters by the protocols of vLLM and TRL, prime-rl, and SGLang."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters import saved_adapter
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow


def adapters(num: int = 4) -> FakeEngine:
    return FakeEngine(max_adapters=num)


def sources(tmp_path: Path) -> dict[str, Any]:
    return {"weights": {"source_directories": [tmp_path / "out"]}}


def saved(tmp_path: Path, name: str, scale: float = 1.0) -> str:
    return str(saved_adapter(tmp_path / "out" / name, scale=scale))


async def completed(served: Foreign, model: str) -> Any:
    asked = {"model": model, "prompt": [1], "max_tokens": 2, "return_weight_versions": True}
    return await served.post("/v1/completions", asked)


async def names(served: Foreign) -> list[str]:
    return [card["id"] for card in (await served.http.get("/v1/models")).json()["data"]]


async def test_trl_policies_are_separate_models(tmp_path: Path) -> None:
    """One name per step; the oldest is unloaded."""
    async with foreign(tmp_path, adapters(3), **sources(tmp_path)) as served:
        config = (await served.http.get("/server_info")).json()["vllm_config"]
        assert config["lora_config"] == {"max_lora_rank": 16, "max_loras": 3}
        for step in range(4):
            name = f"trl-policy-v{step}"
            body = {"lora_name": name, "lora_path": saved(tmp_path, name, step)}
            loaded = await served.http.post("/v1/load_lora_adapter", json=body)
            assert loaded.text == f"Success: LoRA adapter '{name}' added successfully."
            answer = await completed(served, name)
            assert answer["model"] == name
            [span] = answer["choices"][0]["weight_versions"]
            assert span["adapter"] == f"{name}@update-{step + 1}"
            if step >= 2:
                stale = {"lora_name": f"trl-policy-v{step - 2}"}
                gone = await served.http.post("/v1/unload_lora_adapter", json=stale)
                assert gone.status_code == 200
        assert await names(served) == ["fake", "trl-policy-v2", "trl-policy-v3"]


async def test_vllm_load_replaces_an_adapter_only_on_request(tmp_path: Path) -> None:
    async with foreign(tmp_path, adapters(), **sources(tmp_path)) as served:
        body = {"lora_name": "policy", "lora_path": saved(tmp_path, "a")}
        for _ in range(2):  # a repeated call
            assert (await served.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
        other = {"lora_name": "policy", "lora_path": saved(tmp_path, "b", 2.0)}
        status, problem = await served.refused("/v1/load_lora_adapter", other)
        assert (status, problem["code"]) == (409, "version_conflict")
        in_place = {**other, "load_inplace": True}
        assert (await served.http.post("/v1/load_lora_adapter", json=in_place)).status_code == 200
        [span] = (await completed(served, "policy"))["choices"][0]["weight_versions"]
        assert span["adapter"] == "policy@update-2"


async def test_one_prime_rl_name_gets_a_version_per_step(tmp_path: Path) -> None:
    async with foreign(tmp_path, adapters(2), **sources(tmp_path)) as served:
        for step in (1, 2, 3):
            body = {"lora_name": "run", "lora_path": saved(tmp_path, f"step_{step}", step)}
            answer = await served.post("/load_lora_adapter", body)
            assert answer["adapter_version"] == f"update-{step}"
            asked: dict[str, Any] = {
                "model": "run",
                "token_ids": [1],
                "sampling_params": {"max_tokens": 2},
            }
            asked["return_weight_versions"] = True
            drawn = await served.post("/inference/v1/generate", asked)
            [span] = drawn["choices"][0]["weight_versions"]
            assert span["adapter"] == f"run@update-{step}"


async def test_sglang_requests_name_an_adapter_as_lora_path(tmp_path: Path) -> None:
    async with foreign(tmp_path, adapters(), **sources(tmp_path)) as served:
        body = {"lora_name": "policy", "lora_path": saved(tmp_path, "a")}
        loaded = await served.post("/load_lora_adapter", body)
        assert loaded["success"] and loaded["loaded_adapters"] == {"policy": "policy@update-1"}
        asked = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}, "lora_path": "policy"}
        drawn = await served.post("/generate", asked)
        assert drawn["meta_info"]["weight_versions"][0]["adapter"] == "policy@update-1"
        unloaded = await served.post("/unload_lora_adapter", {"lora_name": "policy"})
        assert unloaded["loaded_adapters"] == {}
        assert (await served.refused("/generate", asked))[1]["code"] == "adapter_not_found"


async def test_chat_uses_the_adapter_named_by_its_model(tmp_path: Path) -> None:
    async with foreign(tmp_path, adapters(), **sources(tmp_path)) as served:
        body = {"lora_name": "policy", "lora_path": saved(tmp_path, "a")}
        await served.http.post("/v1/load_lora_adapter", json=body)
        messages = [{"role": "user", "content": "a"}]
        asked: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 2}
        asked["return_weight_versions"] = True
        answer = await served.post("/v1/chat/completions", asked)
        assert answer["model"] == "policy"
        assert answer["choices"][0]["weight_versions"][0]["adapter"] == "policy@update-1"


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/load_lora_adapter"])
async def test_adapter_that_fails_to_load_is_a_problem(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path, adapters(), **sources(tmp_path)) as served:
        outside = {"lora_name": "policy", "lora_path": str(tmp_path / "elsewhere")}
        assert (await served.refused(path, outside))[1]["code"] == "path_refused"
        odd = {"lora_name": "a/b", "lora_path": saved(tmp_path, "a")}
        assert (await served.refused(path, odd))[1]["errors"][0]["location"] == "lora_name"


async def test_unknown_model_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path, adapters()) as served:
        asked = {"model": "none", "prompt": [1]}
        assert (await served.http.post("/v1/completions", json=asked)).status_code == 404
        assert (await served.refused("/v1/unload_lora_adapter", {"lora_name": "none"}))[0] == 404
