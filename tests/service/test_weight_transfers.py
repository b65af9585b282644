"""POST /v1/weights/{version}/transfer: weights in a trainer's GPU memory, with a fake engine."""

import asyncio
import base64
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.errors import CheckpointRefused, FilesRestored, LoadFailed
from service.config.settings import Settings
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.test_rollouts import body, group, running_samples
from tests.service.test_weights import activate, sample, until, upload
from tests.serving import Served, serving

HANDLE = base64.b64encode(b"\x02c" + bytes(64)).decode()
GPU = "3f2a1c44-0000-4000-8000-000000000001"
TENSOR: dict[str, Any] = {
    "name": "model.norm.weight",
    "dtype": "BF16",
    "shape": [4, 2],
    "handles": {
        GPU: {
            "handle": HANDLE,
            "offset": 512,
            "ref_counter": "/torch_41_1804289383_0",
            "ref_counter_offset": 3,
        }
    },
}
IPC: dict[str, Any] = {"engine": {"weight_transfer": "ipc"}}


async def transfer(served: Served, version: str, *tensors: Any, **options: Any) -> Any:
    content = {"tensors": list(tensors) or [TENSOR], **options}
    return await served.http.post(f"/v1/weights/{version}/transfer", json=content)


async def states(served: Served) -> dict[str, str]:
    listed = (await served.http.get("/v1/weights")).json()["versions"]
    return {version["version"]: version["state"] for version in listed}


async def test_transferred_version_is_active_and_has_no_files(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path, **IPC) as served:
        answer = await transfer(served, "v1", sequence=7)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["version"], found["sequence"], found["previous"]) == ("v1", 7, "v0")
        [[tensor]] = engine.transferred
        [handle] = tensor.handles.values()
        assert (tensor.name, tensor.shape, tensor.num_bytes) == ("model.norm.weight", (4, 2), 16)
        assert (handle.handle, handle.offset) == (b"\x02c" + bytes(64), 512)
        sampled = (await sample(served)).json()["groups"][0]["samples"][0]
        assert sampled["versions"] == [{"version": "v1", "start": 0, "end": 4}]
        listed = (await served.http.get("/v1/weights")).json()["versions"]
        assert [(one["has_files"], one["num_bytes"]) for one in listed] == [(True, 0), (False, 16)]
        assert served.server.versions.active.transfer is None, "the handles are dropped"


async def test_transfer_needs_the_operators_setting(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await transfer(served, "v1")
        assert (refused.status_code, refused.json()["code"]) == (422, "unsupported")
        assert "engine.weight_transfer" in refused.json()["detail"]


def test_transfer_is_refused_in_a_cluster() -> None:
    with pytest.raises(ValidationError, match=r"engine\.weight_transfer and cluster\.redis_url"):
        Settings.model_validate(
            IPC
            | {
                "cluster": {"redis_url": "redis://127.0.0.1/0"},
                "server": {"advertised_url": "http://127.0.0.1:8000"},
            }
        )


async def test_key_of_a_caller_cannot_hand_weights_over(tmp_path: Path) -> None:
    engine, file = FakeEngine(), tmp_path / "keys.yaml"
    caller = bearer(write_keys(file, caller="rollout")["caller"])
    async with serving(engine, tmp_path, server={"keys_file": file}, **IPC) as served:
        for headers, status in (({}, 401), (caller, 403)):
            refused = await served.http.post(
                "/v1/weights/v1/transfer", json={"tensors": [TENSOR]}, headers=headers
            )
            assert refused.status_code == status
    assert not engine.calls


def handle_with(**fields: Any) -> dict[str, Any]:
    tensor = deepcopy(TENSOR)
    tensor["handles"][GPU] |= fields
    return tensor


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    "tensor",
    [
        handle_with(handle=base64_of(b"\x02e" + bytes(64))),  # an expandable segment
        handle_with(handle=base64_of(b"\x02c" + bytes(65))),
        handle_with(handle="not base64"),
        handle_with(offset=-1),
        handle_with(offset=2**48),
        handle_with(ref_counter="/torch_1_2_3/../other"),
        handle_with(ref_counter="/coppice-kv"),
        handle_with(ref_counter_offset=10_000),
        handle_with(ref_counter_offset=-1),
        handle_with(event="AAAA"),
        TENSOR | {"dtype": "I64"},
        TENSOR | {"shape": [-1]},
        TENSOR | {"shape": [1] * 9},
        TENSOR | {"handles": {}},
        TENSOR | {"handles": {"../gpu": TENSOR["handles"][GPU]}},
        TENSOR | {"pickled": "gASV"},
    ],
)
async def test_field_out_of_bounds_is_refused(tmp_path: Path, tensor: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path, **IPC) as served:
        refused = await transfer(served, "v1", tensor)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
        assert await states(served) == {"v0": "active"}
    assert not engine.calls


async def test_body_is_limited(tmp_path: Path) -> None:
    limits = {"max_body_bytes": 1024}
    async with serving(FakeEngine(), tmp_path, limits=limits, **IPC) as served:
        refused = await transfer(served, "v1", *[TENSOR] * 10)
        assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")


async def test_tensors_that_do_not_fit_leave_nothing(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.refused_weights["model.norm.weight"] = "missing: lm_head.weight"
    async with serving(engine, tmp_path, **IPC) as served:
        refused = await transfer(served, "v1")
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        assert await states(served) == {"v0": "active"}
        engine.refused_weights.clear()
        assert (await transfer(served, "v1")).status_code == 200


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
async def test_tensors_that_cannot_be_opened_end_no_sample(tmp_path: Path, mode: str) -> None:
    """Also not one that is bound to the served version."""
    engine = FakeEngine(instant=False)
    engine.open_error = CheckpointRefused("model.norm.weight contains NaN or infinity")
    async with serving(engine, tmp_path, **IPC) as served:
        bound = asyncio.create_task(sample(served, exact_version="v0"))
        await running_samples(served, 1)
        refused = await transfer(served, "v1", mode=mode)
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        assert refused.json()["detail"] == "model.norm.weight contains NaN or infinity"
        assert await states(served) == {"v0": "active"}
        assert not any(call.startswith("pause") for call in engine.calls)
        engine.step(8)
        sampled = (await bound).json()["groups"][0]["samples"][0]
        assert sampled["finish_reason"] == "length"


async def test_tensors_are_closed_if_they_are_not_loaded(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path, **IPC) as served:
        engine.load_error = LoadFailed("loading failed")
        assert (await transfer(served, "v1")).status_code == 500
        assert engine.opened is None


async def test_label_is_used_once(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, **IPC) as served:
        assert (await transfer(served, "v1")).status_code == 200
        again = await transfer(served, "v1")
        assert (again.status_code, again.json()["code"]) == (409, "version_conflict")


async def test_failed_load_keeps_the_previous_version_and_forgets_the_new_one(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    engine.load_error = LoadFailed("loading failed: no handle for this GPU")
    async with serving(engine, tmp_path, **IPC) as served:
        failed = await transfer(served, "v1")
        assert (failed.status_code, failed.json()["code"]) == (500, "activation_failed")
        assert "no handle for this GPU" in failed.json()["detail"]
        assert await states(served) == {"v0": "active"}
        engine.load_error = None
        assert (await transfer(served, "v1")).status_code == 200


async def test_version_with_files_is_active_if_weights_without_files_are_lost(
    tmp_path: Path,
) -> None:
    """Also if a version with files fails to load."""
    engine = FakeEngine()
    async with serving(engine, tmp_path, **IPC) as served:
        await upload(served, "v1")
        await activate(served, "v1")
        for fails in (transfer, activate):
            assert (await transfer(served, f"gpu-{fails.__name__}")).status_code == 200
            if fails is activate:
                await upload(served, "next")
            engine.load_error = FilesRestored("v1")
            began = time.monotonic()
            failed = await fails(served, "next")
            assert (failed.status_code, failed.json()["code"]) == (500, "activation_failed")
            assert "v1, the last version with files" in failed.json()["detail"]
            assert served.server.versions.active_seconds < time.monotonic() - began
            engine.load_error = None
            assert (await states(served))["v1"] == "active"
            sampled = (await sample(served)).json()["groups"][0]["samples"][0]
            assert [span["version"] for span in sampled["versions"]] == ["v1"]


async def test_version_that_a_failure_would_restore_is_kept(tmp_path: Path) -> None:
    weights = {"retain_superseded": 0}
    async with serving(FakeEngine(), tmp_path, weights=weights, **IPC) as served:
        await upload(served, "v1")
        await activate(served, "v1")
        for number in (2, 3, 4):
            assert (await transfer(served, f"v{number}")).status_code == 200
        assert await states(served) == {"v0": "superseded", "v1": "superseded", "v4": "active"}
        refused = await served.http.delete("/v1/weights/v1")
        assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
        await upload(served, "v5")
        await activate(served, "v5")
        assert await states(served) == {"v0": "superseded", "v5": "active"}


async def test_version_without_files_cannot_be_activated_again(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, **IPC) as served:
        for version in ("v1", "v2"):
            assert (await transfer(served, version)).status_code == 200
        refused = await activate(served, "v1", allow_rollback=True)
        assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
        assert "publish it again" in refused.json()["detail"]
        assert (await activate(served, "v2")).status_code == 200, "it is active"


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_active_version_that_is_replaced_meanwhile_is_not_activated_again(
    tmp_path: Path, mode: str
) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path, **IPC) as served:
        assert (await transfer(served, "v1")).status_code == 200
        await upload(served, "v2")
        engine.load_gate = asyncio.Event()
        replacing = asyncio.create_task(activate(served, "v2"))
        await until(lambda: served.server.versions.is_activating("v2"))
        again = asyncio.create_task(activate(served, "v1", mode=mode, allow_rollback=True))
        await asyncio.sleep(0.05)
        engine.load_gate.set()
        assert (await replacing).status_code == 200
        refused = await again
        assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
        assert "publish it again" in refused.json()["detail"]
        assert len(engine.loaded) == 1
        assert (await states(served))["v2"] == "active"


async def test_transfer_in_mode_wait_begins_after_the_running_samples(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, **IPC) as served:
        rollout = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(1))))
        await running_samples(served, 1)
        transferring = asyncio.create_task(transfer(served, "v1", mode="wait"))
        await until(lambda: served.server.versions.find("v1") is not None)
        other = await activate(served, "v1")
        assert other.json()["code"] == "version_conflict", "only its publisher activates it"
        assert not engine.transferred
        engine.step(8)
        assert (await transferring).status_code == 200
        sampled = (await rollout).json()["groups"][0]["samples"][0]
        assert [span["version"] for span in sampled["versions"]] == ["v0"]


async def test_version_whose_publisher_waits_cannot_be_deleted(tmp_path: Path) -> None:
    """Neither while it waits for samples nor while it waits for another activation."""
    engine = FakeEngine()
    async with serving(engine, tmp_path, **IPC) as served:
        await upload(served, "v1")
        engine.load_gate = asyncio.Event()
        first = asyncio.create_task(activate(served, "v1"))
        await until(lambda: served.server.versions.is_activating("v1"))
        transferring = asyncio.create_task(transfer(served, "v2"))
        await until(lambda: served.server.versions.find("v2") is not None)
        refused = await served.http.delete("/v1/weights/v2")
        engine.load_gate.set()
        assert refused.status_code == 409 and "handed over" in refused.json()["detail"]
        assert (await first).status_code == (await transferring).status_code == 200


async def test_tensors_of_a_publisher_that_has_gone_are_not_opened(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, **IPC) as served:
        rollout = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(1))))
        await running_samples(served, 1)
        transferring = asyncio.create_task(transfer(served, "v1", mode="wait"))
        await until(lambda: served.server.versions.find("v1") is not None)
        found = served.server.versions.get("v1").transfer
        assert found is not None
        transferring.cancel()
        await until(lambda: served.server.versions.find("v1") is None)
        assert found.is_withdrawn and engine.running, "the wait for the samples has ended"
        engine.step(8)
        assert (await rollout).status_code == 200
        assert not engine.transferred
        assert (await states(served)) == {"v0": "active"}


async def test_transfer_that_has_begun_ends_without_its_publisher(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.transfer_gate = asyncio.Event()
    async with serving(engine, tmp_path, **IPC) as served:
        transferring = asyncio.create_task(transfer(served, "v1"))
        await until(lambda: engine.paused)
        transferring.cancel()
        engine.transfer_gate.set()
        versions = served.server.versions
        await until(lambda: versions.active.label == "v1" and versions.active.transfer is None)


@pytest.mark.parametrize("transfers_while_asleep", [False, True])
async def test_weights_without_files_are_dropped_only_for_other_weights(
    tmp_path: Path, transfers_while_asleep: bool
) -> None:
    """A sleep at level 2 drops them. The wake loads the last files if no others were loaded."""
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, **IPC) as served:
        assert (await transfer(served, "v1")).status_code == 200
        bound = asyncio.create_task(sample(served, exact_version="v1"))
        await running_samples(served, 1)
        assert (await served.http.post("/v1/sleep", json={"level": 2})).status_code == 200
        await served.http.post("/v1/wake", json={"tags": ["weights"]})
        if transfers_while_asleep:
            assert (await transfer(served, "v2")).status_code == 200
        else:
            engine.restored_version = "v0"
        assert (await served.http.post("/v1/wake", json={})).json()["paused"] is False
        ended = (await bound).json()["groups"][0]["samples"][0]
        assert ended["finish_reason"] == "version_changed"
        expected = "v2" if transfers_while_asleep else "v0"
        assert served.server.versions.active.label == engine.version == expected
