"""/v1/weights: staging, activation, and their effect on running samples."""

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save

from coppice.wire.rollouts import RolloutRequest
from engine.errors import EngineDead, LoadFailed
from engine.types.samples import PauseMode
from engine.weights.magnitudes import UNKNOWN, Magnitudes
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import Manifest, ManifestConflict
from service.errors import VersionConflict
from service.rollouts.request import NewRollout
from service.weights_versions import Versions
from tests.fake_engine import VOCAB_SIZE, FakeEngine
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving


async def upload(served: Served, version: str, content: bytes = b"w", **query: Any) -> Any:
    return await served.http.put(f"/v1/weights/{version}", content=content, params=query)


async def activate(served: Served, version: str, **asked: Any) -> Any:
    return await served.http.post(f"/v1/weights/{version}/activate", json=asked)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


async def sample(served: Served, **weights: str) -> Any:
    return await served.http.post("/v1/rollouts", json=body(group(1), weights=weights or None))


def digest_of(content: bytes) -> dict[str, str]:
    return {
        "content-digest": f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"
    }


async def test_uploaded_version_is_staged_listed_and_served_once_active(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        stored = await upload(served, "v7", b"weights")
        assert stored.status_code == 201
        assert stored.json()["state"] == "staged"
        assert stored.json()["xxh3_128"] == xxhash.xxh3_128_hexdigest(b"weights")
        assert (await sample(served)).json()["groups"][0]["samples"][0]["versions"] == [
            {"version": "v0", "start": 0, "end": 4}
        ]
        activated = (await activate(served, "v7")).json()
        assert (activated["version"], activated["previous"]) == ("v7", "v0")
        assert (engine.loaded[0] / "model.safetensors").read_bytes() == b"weights"
        known = (await served.http.get("/v1/weights")).json()
        assert known["active"] == "v7"
        assert [(v["version"], v["state"]) for v in known["versions"]] == [
            ("v0", "superseded"),
            ("v7", "active"),
        ]
        answer = (await sample(served)).json()
        assert answer["groups"][0]["samples"][0]["versions"][0]["version"] == "v7"


async def test_identical_upload_is_accepted_and_another_refused(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        first = await upload(served, "v1", b"a")
        assert (first.status_code, first.json()["sha256"]) == (201, None)
        again = await upload(served, "v1", b"a")
        assert (again.status_code, again.json()["xxh3_128"]) == (200, first.json()["xxh3_128"])
        assert again.json()["sha256"] == hashlib.sha256(b"a").hexdigest(), "now it was needed"
        refused = await upload(served, "v1", b"b")
        assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")


async def test_digest_of_an_upload_is_computed_if_it_has_one(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        stored = await served.http.put("/v1/weights/v1", content=b"x", headers=digest_of(b"x"))
        assert stored.json()["sha256"] == hashlib.sha256(b"x").hexdigest()


async def test_digest_is_verified(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        path = "/v1/weights/v1"
        wrong = await served.http.put(path, content=b"x", headers=digest_of(b"y"))
        assert (wrong.status_code, wrong.json()["code"]) == (422, "digest_mismatch")
        right = digest_of(b"x")["content-digest"]
        for other in ("md5=:A:", "sha-256=:A:", f"x{right}", f"{right}x"):
            refused = await served.http.put(path, content=b"x", headers={"content-digest": other})
            assert refused.json()["errors"][0]["location"] == "Content-Digest"
        accepted = await served.http.put(path, content=b"x", headers=digest_of(b"x"))
        assert accepted.status_code == 201
        assert [
            v["version"] for v in (await served.http.get("/v1/weights")).json()["versions"]
        ] == [
            "v0",
            "v1",
        ]


async def test_weights_that_do_not_fit_leave_nothing(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refused_weights["v1"] = "layers.0.weight holds NaN"
    async with serving(engine, tmp_path) as served:
        refused = await upload(served, "v1")
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        assert refused.json()["detail"] == "layers.0.weight holds NaN"
        assert len((await served.http.get("/v1/weights")).json()["versions"]) == 1
        assert not served.server.checkpoints.folder("v1").exists()
        engine.refused_weights.clear()
        assert (await upload(served, "v1")).status_code == 201


async def test_paths_outside_the_configured_directories_are_refused(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    for directory in (allowed, outside):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"w")
    (allowed / "link").symlink_to(outside)
    weights = {"source_directories": (allowed,)}
    async with serving(FakeEngine(), tmp_path, weights=weights) as served:

        async def stage(path: Path) -> Any:
            return await served.http.post("/v1/weights/v1", json={"path": str(path)})

        (allowed / "loop").symlink_to(allowed / "loop")
        for path in (
            outside,
            allowed / ".." / "outside",
            allowed / "link",
            allowed / "missing",
            allowed / ("x" * 300),
            allowed / "nul\0",
            allowed / "loop",
        ):
            refused = await stage(path)
            assert (refused.status_code, refused.json()["code"]) == (422, "path_refused")
            assert str(tmp_path) not in refused.text
        assert (await stage(allowed)).status_code == 201
        assert (await activate(served, "v1")).status_code == 200
        assert (allowed / "model.safetensors").exists()


class RecordingCheck(FakeEngine):
    magnitudes: Magnitudes = UNKNOWN

    def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None:
        self.magnitudes = magnitudes


async def test_values_of_an_upload_are_checked_while_it_arrives(tmp_path: Path) -> None:
    values = {name: np.full(2**18, 1.5, np.float32) for name in "abcdefgh"}
    engine = RecordingCheck()
    async with serving(engine, tmp_path) as served:
        assert (await upload(served, "v1", save(values))).status_code == 201
    bits = int(np.float32(1.5).view(np.uint32))
    assert list(engine.magnitudes.values()) == [bits] * len(values)


class Removing(FakeEngine):
    def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None:
        path.unlink()


async def test_file_removed_while_it_is_staged_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "allowed" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"w")
    weights = {"source_directories": (file.parent,)}
    async with serving(Removing(), tmp_path, weights=weights) as served:
        refused = await served.http.post("/v1/weights/v1", json={"path": str(file)})
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        assert "changed" in refused.json()["detail"]
        assert str(tmp_path) not in refused.text


async def test_sequences_order_versions_and_belong_to_one_label(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        assert (await upload(served, "v5", sequence=5)).json()["sequence"] == 5
        assert (await upload(served, "next")).json()["sequence"] == 6
        assert (await upload(served, "other", sequence=5)).json()["code"] == "version_conflict"
        assert (await upload(served, "v5", sequence=4)).json()["code"] == "version_conflict"
        for wrong in ("x", "-1", str(2**53), "1_0", " 1", "07", "", "\u0667", ["7", "8"]):
            assert (await upload(served, "v9", sequence=wrong)).json()["code"] == "invalid_request"
        assert (await upload(served, "v9", sequenze=1)).json()["code"] == "invalid_request"


async def test_after_the_largest_sequence_one_must_be_given(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        assert (await upload(served, "last", sequence=2**53 - 1)).status_code == 201
        assert (await upload(served, "next")).json()["code"] == "version_conflict"
        assert (await upload(served, "next", sequence=7)).json()["sequence"] == 7


async def test_rollback_must_be_requested_explicitly(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        for version in ("v7", "v8"):
            await upload(served, version)
            assert (await activate(served, version)).status_code == 200
        refused = await activate(served, "v7")
        assert (refused.status_code, refused.json()["code"]) == (409, "rollback_refused")
        assert (await activate(served, "v7", allow_rollback=True)).status_code == 200
        assert (await activate(served, "v7")).json()["paused_seconds"] == 0
        assert (await activate(served, "nope")).json()["code"] == "version_not_found"


async def test_first_version_is_reloaded_from_the_model_path(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        await activate(served, "v1")
        await activate(served, "v0", allow_rollback=True)
        assert engine.loaded[-1] == engine.info.model_path


async def test_weights_policies_apply_to_the_active_version(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await upload(served, "v1")
        await upload(served, "v2")
        await activate(served, "v1")

        async def code(**weights: str) -> tuple[int, str | None]:
            answer = await sample(served, **weights)
            return answer.status_code, answer.json().get("code")

        assert await code(exact_version="v1") == (200, None)
        assert await code(min_version="v0") == (200, None)
        assert await code(exact_version="v0") == (409, "version_superseded")
        assert await code(exact_version="unknown") == (409, "version_superseded")
        assert await code(exact_version="v2") == (503, "version_unavailable")
        assert await code(min_version="v2") == (503, "version_unavailable")
        assert await code(min_version="unknown") == (503, "version_unavailable")


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        ("keep", ["pause keep", "swap v1", "resume"]),
        ("recompute", ["pause keep recompute", "swap v1", "resume"]),
        ("abort", ["pause abort", "swap v1", "resume"]),
    ],
)
async def test_activation_pauses_updates_and_resumes(
    tmp_path: Path, mode: str, calls: list[str]
) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        request = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(1))))
        await running_samples(served, 1)
        engine.step(2)
        assert (await activate(served, "v1", mode=mode)).status_code == 200
        engine.step(2)
        sample = (await request).json()["groups"][0]["samples"][0]
    assert engine.calls == calls
    if mode == "abort":
        assert (sample["finish_reason"], len(sample["token_ids"])) == ("aborted", 2)
    else:
        assert sample["versions"] == [
            {"version": "v0", "start": 0, "end": 2},
            {"version": "v1", "start": 2, "end": 4},
        ]


async def test_age_of_the_weights_is_counted_from_their_activation(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        server = served.server
        assert server.versions.active_seconds > 0
        await upload(served, "v1")
        began = time.monotonic()
        await activate(served, "v1")
        age = server.versions.active_seconds
        assert age < time.monotonic() - began
        await activate(served, "v1")  # already active
        assert server.versions.active_seconds > age
        text = (await served.http.get("/metrics")).text
    assert re.search(r"^coppice_weights_age_seconds 0\.\d+$", text, re.MULTILINE)


async def test_mode_wait_finishes_running_samples_and_holds_new_ones(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        asked = body(group(1), weights={"exact_version": "v0"})
        early = asyncio.create_task(served.http.post("/v1/rollouts", json=asked))
        await running_samples(served, 1)
        change = asyncio.create_task(activate(served, "v1", mode="wait"))
        await until(lambda: not served.server.rollouts._gate.is_set())
        late = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(2))))
        await until(lambda: served.server.admission.num_samples == 2)
        assert not change.done() and len(engine.running) == 1
        engine.step(4)
        assert (await early).json()["outcome"] == "done"
        assert (await change).status_code == 200
        await running_samples(served, 1)
        engine.step(4)
        versions = (await late).json()["groups"][0]["samples"][0]["versions"]
    assert versions == [{"version": "v1", "start": 0, "end": 4}]


async def test_group_with_an_exact_version_never_straddles_an_activation(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        asked = body(group(1, n=2), weights={"exact_version": "v0"})
        request = asyncio.create_task(served.http.post("/v1/rollouts", json=asked))
        await running_samples(served, 2)
        engine.step(3)
        assert (await activate(served, "v1")).json()["samples_ended"] == 2
        answer = (await request).json()["groups"][0]
    assert answer["outcome"] == "partial"
    for sample in answer["samples"]:
        assert sample["finish_reason"] == "version_changed"
        assert sample["versions"] == [{"version": "v0", "start": 0, "end": 3}]


async def test_failed_load_keeps_the_old_version_serving(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        engine.load_error = LoadFailed("broke off")
        failed = await activate(served, "v1")
        assert (failed.status_code, failed.json()["code"]) == (500, "activation_failed")
        assert (await served.http.get("/v1/weights")).json()["active"] == "v0"
        assert (await sample(served)).json()["outcome"] == "done"
        engine.load_error = None
        assert (await activate(served, "v1")).status_code == 200


async def test_partially_loaded_weights_never_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        engine.load_error = EngineDead("half loaded")
        assert (await activate(served, "v1")).json()["code"] == "engine_dead"
        assert engine.paused
        assert (await sample(served)).json()["code"] == "engine_dead"


async def test_engine_death_during_a_pause_is_a_problem(tmp_path: Path) -> None:
    class Dying(FakeEngine):
        async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
            self.die()
            raise EngineDead("dead")

    for path in ("/v1/pause", "/v1/weights/v1/activate"):
        async with serving(Dying(), tmp_path) as served:
            await upload(served, "v1")
            refused = await served.http.post(path, json={})
            assert (refused.status_code, refused.json()["code"]) == (503, "engine_dead")


async def test_pause_survives_an_activation(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await upload(served, "v1")
        assert (await served.http.post("/v1/pause", json={})).json()["paused"] is True
        assert (await activate(served, "v1")).status_code == 200
        assert engine.paused
        assert (await served.http.get("/v1/status")).json()["paused"] is True
        request = asyncio.create_task(sample(served))
        await running_samples(served, 1)
        stuck = await activate(served, "v0", mode="wait", allow_rollback=True)
        assert stuck.json()["code"] == "version_conflict"
        assert (await served.http.post("/v1/resume")).json()["paused"] is False
        assert (await request).json()["outcome"] == "done"


async def test_activation_does_not_wait_for_samples_frozen_before_a_step(
    tmp_path: Path,
) -> None:
    async with serving(FakeEngine(instant=False), tmp_path) as served:
        await upload(served, "v1")
        await served.http.post("/v1/pause", json={})
        request = RolloutRequest.model_validate(body(group(1)))
        rollout = await served.server.rollouts.start(
            NewRollout.of(request, owner="local", can_move=False)
        )
        assert rollout.num_running == 0, "its task has not run yet"
        with pytest.raises(VersionConflict):
            await served.server.activation.apply("v1", "wait", allow_rollback=False)


class SlowLoad(FakeEngine):
    """Loads weights once `can_load` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.loading, self.can_load = asyncio.Event(), asyncio.Event()

    async def update_weights(self, path: Path, version: str, *, keep_kv: bool = False) -> int:
        self.loading.set()
        await self.can_load.wait()
        return await super().update_weights(path, version, keep_kv=keep_kv)


@pytest.mark.parametrize("is_standalone", [True, False])
async def test_activation_completes_without_its_caller(tmp_path: Path, is_standalone: bool) -> None:
    engine, registry = SlowLoad(), None if is_standalone else InMemoryRegistry()
    async with serving(engine, tmp_path, shared=registry) as served:
        await upload(served, "v1")
        activate_v1 = served.server.coordinator.activate("v1", "keep", allow_rollback=False)
        caller = asyncio.create_task(activate_v1)
        await engine.loading.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        engine.can_load.set()
        assert (await activate(served, "v1")).json()["previous"] == "v1", "it waits for the other"
        metrics = (await served.http.get("/metrics")).text
        assert 'coppice_activations_total{mode="keep"} 2.0' in metrics


async def test_versions_can_be_deleted_unless_active(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await upload(served, "v1")
        folder = served.server.checkpoints.folder("v1")
        assert folder.exists()
        assert (await served.http.delete("/v1/weights/v1")).status_code == 204
        assert not folder.exists()
        assert not list(folder.parent.glob(".deleted-*"))
        assert (await served.http.delete("/v1/weights/v1")).json()["code"] == "version_not_found"
        assert (await served.http.delete("/v1/weights/v0")).json()["code"] == "version_conflict"


async def test_version_is_not_deleted_while_it_is_activated(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, weights={"retain_superseded": 0}) as served:
        stager, versions = served.server.stager, served.server.versions
        await upload(served, "v1")
        versions.put(replace(versions.get("v1"), state="superseded"))  # as after a rollback
        sampling = asyncio.create_task(sample(served))
        await running_samples(served, 1)
        activating = asyncio.create_task(activate(served, "v1", mode="wait"))
        while not versions.is_activating("v1"):
            await asyncio.sleep(0.001)
        assert (await served.http.delete("/v1/weights/v1")).json()["code"] == "version_conflict"
        await stager.trim()
        engine.step(VOCAB_SIZE)
        await sampling
        assert (await activating).status_code == 200
        assert versions.active.path.exists()


class ActivatingRegistry(InMemoryRegistry):
    """Registry in which a version is activated while its manifest is published."""

    versions: Versions

    async def publish(self, manifest: Manifest) -> None:
        self.versions.activated(manifest.version)
        await super().publish(manifest)


async def test_version_stays_active_if_it_is_activated_while_it_is_announced(
    tmp_path: Path,
) -> None:
    registry = ActivatingRegistry()
    async with serving(FakeEngine(), tmp_path, shared=registry) as served:
        registry.versions = served.server.versions
        assert (await upload(served, "v1")).json()["state"] == "active"
        assert (await served.http.delete("/v1/weights/v1")).json()["code"] == "version_conflict"


class ConflictingRegistry(ActivatingRegistry):
    """Registry in which another replica publishes other files meanwhile, too."""

    async def publish(self, manifest: Manifest) -> None:
        await super().publish(replace(manifest, files=()))
        raise ManifestConflict("published with other content")


async def test_conflict_of_a_version_that_was_activated_meanwhile_is_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = ConflictingRegistry()
    async with serving(FakeEngine(), tmp_path, shared=registry) as served:
        registry.versions = served.server.versions
        refused = (await upload(served, "v1")).json()
        assert refused["code"] == "version_conflict"
        assert "published with other content" in refused["detail"]
        assert served.server.versions.active.label == "v1"
    assert "v1 is active on this replica only" in caplog.text


async def test_superseded_uploads_are_deleted(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, weights={"retain_superseded": 1}) as served:
        for number in range(1, 5):
            await upload(served, f"v{number}")
            await activate(served, f"v{number}")
        known = (await served.http.get("/v1/weights")).json()["versions"]
        kept = [file.name for file in served.server.checkpoints.folder("v1").parent.glob("v*")]
    assert [version["version"] for version in known] == ["v0", "v3", "v4"]
    assert sorted(kept) == ["v3", "v4"]


async def test_upload_directory_is_removed_with_its_server(
    tmp_path: Path,
) -> None:
    precious = tmp_path / "weights" / "precious"
    precious.mkdir(parents=True)
    async with serving(FakeEngine(), tmp_path) as one, serving(FakeEngine(), tmp_path) as two:
        await upload(one, "v1")
        await upload(two, "v1")
        assert len(list(precious.parent.iterdir())) == 3
    assert list(precious.parent.iterdir()) == [precious]


async def test_uploads_of_a_dead_server_are_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "weights" / "weights-dead"
    left.mkdir(parents=True)
    (left / ".owner").touch()
    async with serving(FakeEngine(), tmp_path):
        assert not left.exists()


async def test_upload_over_the_limit_is_cut_off(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, weights={"max_upload_bytes": 10}) as served:
        refused = await upload(served, "v1", b"x" * 11)
        assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")
        assert not list(served.server.checkpoints.folder("v1").parent.glob(".incoming-*"))


@pytest.mark.parametrize("version", ["..", "a b", "%2e%2e", "-x", "x" * 65])
async def test_version_labels_are_validated(tmp_path: Path, version: str) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await upload(served, version)
        assert refused.status_code in (404, 405, 422)
