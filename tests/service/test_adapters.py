"""/v1/adapters: loading, unloading, their effect on running samples, and version labels."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import LoadFailed
from service.adapters.adapter_files import _copy
from service.cluster.in_memory_registry import InMemoryRegistry
from service.errors import WeightsRefused
from tests.adapters import adapter_config, saved_adapter, tensors_file
from tests.cluster import fleet
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weights import digest_of
from tests.serving import Served, serving


@asynccontextmanager
async def adapted(
    tmp_path: Path, engine: FakeEngine | None = None, **sections: Any
) -> AsyncIterator[Served]:
    """A server with capacity for two adapters, unless the engine is given."""
    weights = {"source_directories": [tmp_path / "sources"]}
    engine = engine or FakeEngine(max_adapters=2)
    async with serving(engine, tmp_path, weights=weights, **sections) as served:
        yield served
        served.server.adapters.check()


def saved(tmp_path: Path, name: str = "a", **content: Any) -> str:
    return str(saved_adapter(tmp_path / "sources" / name, **content))


async def load(served: Served, name: str, path: str, **asked: Any) -> httpx.Response:
    return await served.http.post(f"/v1/adapters/{name}", json={"path": path, **asked})


async def sample(served: Served, adapter: str | None, **rest: Any) -> httpx.Response:
    return await served.http.post("/v1/rollouts", json=body(group(1), adapter=adapter, **rest))


async def listed(served: Served) -> list[tuple[str, bool, int]]:
    answer = (await served.http.get("/v1/adapters")).json()
    return [
        (f"{a['name']}@{a['version']}", a["current"], a["num_rollouts_running"])
        for a in answer["adapters"]
    ]


def spans(answer: httpx.Response) -> Any:
    return answer.json()["groups"][0]["samples"][0]["versions"]


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


async def test_rollout_with_an_adapter_reports_the_adapter_version(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        loaded = await load(served, "policy", saved(tmp_path), version="step-7")
        assert loaded.status_code == 201
        assert loaded.json() == {
            "name": "policy",
            "version": "step-7",
            "current": True,
            "rank": 4,
            "num_bytes": len(tensors_file()),
            "num_rollouts_running": 0,
        }
        for named in ("policy", "policy@step-7"):
            answer = await sample(served, named)
            assert spans(answer) == [
                {"version": "v0", "start": 0, "end": 4, "adapter": "policy@step-7"}
            ]
        assert spans(await sample(served, None)) == [{"version": "v0", "start": 0, "end": 4}]


async def test_rollout_keeps_the_adapter_it_started_with(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False, max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        await load(served, "policy", saved(tmp_path, scale=1.0), version="1")
        old = asyncio.create_task(sample(served, "policy"))
        await running_samples(served, 1)
        await load(served, "policy", saved(tmp_path, scale=2.0), version="2")
        assert await listed(served) == [("policy@1", False, 1), ("policy@2", True, 0)]
        new = asyncio.create_task(sample(served, "policy"))
        await running_samples(served, 2)
        engine.step(4)
        assert [spans(await task)[0]["adapter"] for task in (old, new)] == ["policy@1", "policy@2"]
        assert [request.adapter for request in engine.submitted] == ["policy@1", "policy@2"]


async def test_adapter_slot_is_freed_once_no_sample_uses_it(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False, max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        await load(served, "policy", saved(tmp_path, scale=1.0), version="1")
        running = asyncio.create_task(sample(served, "policy"))
        await running_samples(served, 1)
        await load(served, "policy", saved(tmp_path, scale=2.0), version="2")
        full = await load(served, "policy", saved(tmp_path, scale=3.0), version="3")
        assert refusal(full) == (503, "adapters_full")
        assert "retry-after" in full.headers
        engine.step(4)
        await running
        assert await listed(served) == [("policy@2", True, 0)]
        again = await load(served, "policy", saved(tmp_path, scale=3.0), version="3")
        assert again.status_code == 201
        assert engine.calls[-2:] == ["unload policy@1", "load policy@3"]
        assert set(engine.adapters) == {"policy@2", "policy@3"}


async def test_reloading_identical_files_changes_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        first = await load(served, "policy", saved(tmp_path))
        again = await load(served, "policy", saved(tmp_path))
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == first.json()
        assert first.json()["version"] == "update-1"
        other = await load(served, "policy", saved(tmp_path, scale=2.0))
        assert other.json()["version"] == "update-2"
        assert engine.calls == ["load policy@update-1", "load policy@update-2"]


async def test_version_never_names_two_adapters(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        refused = await load(served, "policy", saved(tmp_path, scale=2.0), version="1")
        assert refusal(refused) == (409, "version_conflict")
        assert await listed(served) == [("policy@1", True, 0)]


async def test_replaced_version_never_names_another_adapter(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        await load(served, "policy", saved(tmp_path, scale=2.0), version="2")
        refused = await load(served, "policy", saved(tmp_path, scale=3.0), version="1")
        assert refusal(refused) == (409, "version_conflict")
        back = await load(served, "policy", saved(tmp_path), version="1")
        assert back.status_code == 201
        assert await listed(served) == [("policy@1", True, 0)]


async def test_next_version_is_one_never_used(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        await load(served, "policy", saved(tmp_path), version="update-1")
        other = await load(served, "policy", saved(tmp_path, scale=2.0))
        assert other.json()["version"] == "update-2"


async def test_unloaded_adapter_is_not_found_and_its_samples_continue(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False, max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        running = asyncio.create_task(sample(served, "policy"))
        await running_samples(served, 1)
        assert (await served.http.delete("/v1/adapters/policy")).status_code == 204
        assert refusal(await sample(served, "policy")) == (404, "adapter_not_found")
        assert refusal(await served.http.delete("/v1/adapters/policy"))[0] == 404
        assert (
            refusal(await load(served, "policy", saved(tmp_path, scale=2), version="1"))[0] == 409
        )
        engine.step(4)
        assert (await running).json()["outcome"] == "done"
        assert await listed(served) == []


async def test_only_the_current_version_can_be_requested(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        await load(served, "policy", saved(tmp_path, scale=2.0), version="2")
        for named in ("policy@1", "other", "policy@"):
            answer = await sample(served, named)
            assert answer.status_code in (404, 422)
        told = (await sample(served, "policy@1")).json()
        assert (told["code"], told["detail"]) == ("adapter_not_found", "'policy' is at version '2'")


async def test_trainer_may_overwrite_the_files_after_a_load(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        held = engine.adapters["policy@1"]
        saved(tmp_path, scale=2.0)
        assert (held / "adapter_model.safetensors").read_bytes() == tensors_file()
        assert not held.is_relative_to(tmp_path / "sources")
        await served.http.delete("/v1/adapters/policy")
        assert not held.exists()


async def test_upload_is_equivalent_to_a_directory(tmp_path: Path) -> None:
    content = tensors_file(adapter_config=json.dumps(adapter_config()))
    engine = FakeEngine(max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        put = served.http.put
        stored = await put("/v1/adapters/policy/1", content=content, headers=digest_of(content))
        assert (stored.status_code, stored.json()["rank"]) == (201, 4)
        home = engine.adapters["policy@1"]
        assert json.loads((home / "adapter_config.json").read_bytes()) == adapter_config()
        digest = hashlib.sha256((home / "adapter_model.safetensors").read_bytes()).digest()
        assert digest == hashlib.sha256(content).digest()
        assert (await put("/v1/adapters/policy/1", content=content)).status_code == 200
        wrong = await put("/v1/adapters/policy/2", content=content, headers=digest_of(b""))
        assert refusal(wrong) == (422, "digest_mismatch")
        for nothing in (b"", b"\xff" * 16, tensors_file()):
            refused = await put("/v1/adapters/policy/2", content=nothing)
            assert refusal(refused) == (422, "weights_refused")
        assert {path for path in home.parent.iterdir() if path.is_dir()} == {home}


async def test_refused_adapter_leaves_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        refused = await load(served, "policy", saved(tmp_path, refused="rank 64 is above 16"))
        assert refusal(refused) == (422, "weights_refused")
        assert refused.json()["detail"] == "rank 64 is above 16"
        engine.adapter_error = LoadFailed("the engine could not load the adapter")
        failed = await load(served, "policy", saved(tmp_path, "b"))
        assert refusal(failed) == (500, "activation_failed")
        assert await listed(served) == []
        home = served.server.checkpoints.make_temp_dir(".seen-")
        assert {path for path in home.parent.iterdir() if path.is_dir()} == {home}
        value = served.server.metrics.registry.get_sample_value
        for outcome in ("refused", "failed"):
            assert value("coppice_adapter_loads_total", {"outcome": outcome}) == 1


async def test_adapters_load_only_from_configured_directories(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        outside = saved_adapter(tmp_path / "elsewhere")
        link = Path(saved(tmp_path, "linked")) / "adapter_model.safetensors"
        link.unlink()
        link.symlink_to(outside / "adapter_model.safetensors")
        for path in (str(outside), str(link.parent), str(tmp_path / "sources" / "none")):
            assert refusal(await load(served, "policy", path)) == (422, "path_refused")


def test_file_longer_than_its_size_is_copied_up_to_the_limit(tmp_path: Path) -> None:
    """As for a file that grows during the copy. Files in /proc report size 0."""
    with pytest.raises(WeightsRefused, match="at most 100 bytes"):
        _copy({"a": Path("/proc/self/maps")}, {"a": 100}, tmp_path)
    assert (tmp_path / "a").stat().st_size <= 100


async def test_symbolic_links_inside_the_directory_are_followed(tmp_path: Path) -> None:
    """A Hugging Face hub cache consists of them."""
    engine = FakeEngine(max_adapters=1)
    async with adapted(tmp_path, engine) as served:
        folder = Path(saved(tmp_path))
        blob = (folder / "adapter_model.safetensors").rename(tmp_path / "sources" / "blob")
        (folder / "adapter_model.safetensors").symlink_to(blob)
        assert (await load(served, "policy", str(folder), version="1")).status_code == 201
        held = engine.adapters["policy@1"] / "adapter_model.safetensors"
        assert held.read_bytes() == tensors_file() and not held.is_symlink()


async def test_without_adapter_capacity_nothing_is_loaded(tmp_path: Path) -> None:
    async with adapted(tmp_path, FakeEngine()) as served:
        assert refusal(await load(served, "policy", saved(tmp_path))) == (422, "unsupported")
        assert (await served.http.get("/v1/adapters")).json()["max_adapters"] == 0
        assert refusal(await sample(served, "policy")) == (404, "adapter_not_found")


async def test_adapter_cannot_have_the_name_of_the_model(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        assert refusal(await load(served, "fake", saved(tmp_path))) == (422, "invalid_request")


async def test_adapters_survive_a_weights_activation(tmp_path: Path) -> None:
    """A sample running across it has tokens of both versions, under the one adapter."""
    engine = FakeEngine(instant=False, max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        running = asyncio.create_task(sample(served, "policy"))
        await running_samples(served, 1)
        engine.step(1)
        await served.http.put("/v1/weights/v1", content=b"w")
        await served.http.post("/v1/weights/v1/activate", json={})
        engine.step(3)
        assert spans(await running) == [
            {"version": "v0", "start": 0, "end": 1, "adapter": "policy@1"},
            {"version": "v1", "start": 1, "end": 4, "adapter": "policy@1"},
        ]
        assert set(engine.adapters) == {"policy@1"}


async def test_continued_sample_is_labelled_per_part(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        await load(served, "policy", saved(tmp_path), version="2")
        given = {"version": "v0", "start": 0, "end": 2, "adapter": "policy@1"}
        started = {"token_ids": [1, 2], "logprobs": [-0.5, -0.5], "versions": [given]}
        answer = await sample(served, "policy", continue_from={"samples": [started]})
        assert spans(answer) == [
            given,
            {"version": "v0", "start": 2, "end": 4, "adapter": "policy@2"},
        ]


async def test_every_segment_of_a_tree_uses_the_adapter(tmp_path: Path) -> None:
    engine = FakeEngine(max_adapters=2)
    async with adapted(tmp_path, engine) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        branching = {"mode": "interval", "interval": 32, "max_leaves": 4, "flatten": True}
        asked = {
            "groups": [group(*range(8))],
            "sampling": {"max_tokens": 80},
            "branching": branching,
            "adapter": "policy",
        }
        answer = (await served.http.post("/v1/rollouts", json=asked)).json()
        parts = answer["groups"][0]["segments"] + answer["groups"][0]["samples"]
        assert len(parts) > 4
        assert {span["adapter"] for part in parts for span in part["versions"]} == {"policy@1"}
        assert {request.adapter for request in engine.submitted} == {"policy@1"}


async def test_prompt_kv_is_exported_only_for_the_base_model(tmp_path: Path) -> None:
    async with adapted(tmp_path, FakeEngine(max_adapters=1, prompt_kv=True)) as served:
        await load(served, "policy", saved(tmp_path))
        refused = await sample(served, "policy", kv={})
        assert refusal(refused) == (422, "invalid_request")
        assert "kv" in refused.json()["detail"]


async def test_responses_are_scored_under_the_named_adapter(tmp_path: Path) -> None:
    async with adapted(tmp_path) as served:
        await load(served, "policy", saved(tmp_path), version="1")
        item = {"prompt": {"token_ids": [1]}, "responses": [[2]]}
        asked = {"items": [item], "adapter": "policy"}
        answer = (await served.http.post("/v1/score", json=asked)).json()
        assert answer["items"][0]["responses"][0]["adapter"] == "policy@1"
        refused = await served.http.post("/v1/score", json={"items": [item], "adapter": "none"})
        assert refusal(refused) == (404, "adapter_not_found")


@pytest.mark.parametrize("name", ["-a", "a" * 65, "a@b"])
async def test_adapter_names_are_validated(tmp_path: Path, name: str) -> None:
    async with adapted(tmp_path) as served:
        refused = await load(served, name, saved(tmp_path))
        assert refused.json()["errors"][0]["location"] == "name"


async def test_adapter_of_one_replica_is_not_found_on_another(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    engines = [FakeEngine(max_adapters=2) for _ in range(2)]
    weights = {"source_directories": [tmp_path / "sources"]}
    async with fleet(tmp_path, engines, lambda: shared, weights=weights) as (one, other):
        assert (await load(one, "policy", saved(tmp_path))).status_code == 201
        assert (await sample(one, "policy")).status_code == 200
        missing = await sample(other, "policy")
        assert refusal(missing) == (404, "adapter_not_found")
        assert "load it on each" in missing.json()["detail"]
        await load(other, "policy", saved(tmp_path))
        assert (await sample(other, "policy")).status_code == 200
