"""/v1/kv/{handle}: layout, bytes, lease, release and authorization."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import PROMPT, export_handle, rollout_body
from tests.serving import Served, serving


async def test_layout_describes_the_bytes(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served)
        layout = (await served.http.get(f"/v1/kv/{known.handle}")).json()
        file = (await served.http.get(f"/v1/kv/{known.handle}/data")).content
    assert layout["num_bytes"] == len(file) == known.num_bytes
    assert layout["data_offset"] == 8 + int.from_bytes(file[:8], "little")
    shape = (layout["num_layers"], layout["num_kv_heads"], layout["head_dim"], layout["dtype"])
    assert shape == (2, 2, 32, "float32")
    assert layout["data_offset"] + 2 * 2 * 2 * 32 * 4 * known.num_tokens == len(file)
    assert layout["rope"]["rope_theta"] == 10000.0
    assert 0 < layout["lease_seconds"] <= 60


async def test_version_can_be_asserted(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served)
        path = f"/v1/kv/{known.handle}"
        assert (await served.http.get(path, params={"version": "v0"})).status_code == 200
        other = await served.http.get(path, params={"version": "v1"})
        assert (other.status_code, other.json()["code"]) == (409, "kv_version_conflict")
        wrong = await served.http.get(path, params={"version": "../v1"})
        assert wrong.json()["code"] == "invalid_request"


async def test_ranges_reassemble_the_file(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served)
        path = f"/v1/kv/{known.handle}/data"
        whole = await served.http.get(path)
        etag = whole.headers["etag"]
        cut = known.num_bytes // 3
        parts = []
        for byte_range in (f"bytes=0-{cut}", f"bytes={cut + 1}-"):
            part = await served.http.get(path, headers={"Range": byte_range, "If-Range": etag})
            assert (part.status_code, part.headers["etag"]) == (206, etag)
            parts.append(part.content)
        assert part.headers["content-range"].endswith(f"/{known.num_bytes}")
        assert b"".join(parts) == whole.content
        beyond = await served.http.get(path, headers={"Range": f"bytes={known.num_bytes}-"})
        assert (beyond.status_code, beyond.json()["code"]) == (416, "range_not_satisfiable")
        assert beyond.headers["content-range"] == f"bytes */{known.num_bytes}"
        changed = await served.http.get(path, headers={"Range": "bytes=5-9", "If-Range": '"x"'})
        assert (changed.status_code, changed.content) == (200, whole.content)


async def test_head_returns_the_size(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served)
        answer = await served.http.head(f"/v1/kv/{known.handle}/data")
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == known.num_bytes
        assert answer.headers["accept-ranges"] == "bytes"
        again = await served.http.get(f"/v1/kv/{known.handle}/data")
        assert again.headers["etag"] == answer.headers["etag"]


async def test_lease_is_renewed_and_never_shortened(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served, lease_seconds=30)

        async def renewed(seconds: float) -> float:
            path = f"/v1/kv/{known.handle}/lease"
            answer = await served.http.post(path, json={"lease_seconds": seconds})
            left: float = answer.json()["lease_seconds"]
            return left

        assert 25 < await renewed(1) <= 30
        assert 55 < await renewed(60) <= 60
        assert 55 < await renewed(3000) <= 60


async def test_expired_handle_is_gone_and_unknown_handle_is_not_found(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served)
        for _ in range(2):
            assert (await served.http.delete(f"/v1/kv/{known.handle}")).status_code == 204
        for name, expected in ((known.handle, (410, "kv_gone")), ("none", (404, "kv_not_found"))):
            answers = [
                await served.http.get(f"/v1/kv/{name}"),
                await served.http.get(f"/v1/kv/{name}/data"),
                await served.http.post(f"/v1/kv/{name}/lease", json={}),
            ]
            assert {(a.status_code, a.json()["code"]) for a in answers} == {expected}
            assert (await served.http.head(f"/v1/kv/{name}/data")).status_code == expected[0]
        assert (await served.http.delete("/v1/kv/none")).status_code == 404


async def test_handle_belongs_to_its_owner(tmp_path: Path) -> None:
    keys = write_keys(
        tmp_path / "keys.yaml", mine="rollout,kv", yours="rollout,kv", plain="rollout"
    )
    server = {"keys_file": tmp_path / "keys.yaml"}
    async with serving(FakeEngine(prompt_kv=True), tmp_path, server=server) as served:
        answers = [
            (
                await served.http.post(
                    "/v1/rollouts", json=rollout_body(), headers=bearer(keys[name])
                )
            )
            for name in ("mine", "yours")
        ]
        mine, yours = (answer.json()["groups"][0]["kv"] for answer in answers)
        assert mine["locators"][0] != yours["locators"][0], "keys share no bytes"
        path = f"/v1/kv/{mine['handle']}"
        assert (await served.http.get(path, headers=bearer(keys["mine"]))).status_code == 200
        for method, at in (("GET", ""), ("GET", "/data"), ("POST", "/lease"), ("DELETE", "")):
            answer = await served.http.request(method, path + at, headers=bearer(keys["yours"]))
            assert (answer.status_code, answer.json()["code"]) == (404, "kv_not_found")
        assert (await served.http.get(path, headers=bearer(keys["plain"]))).status_code == 403
        refused = await served.http.post(
            "/v1/rollouts", json=rollout_body(), headers=bearer(keys["plain"])
        )
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize("seconds", [0, -1, 3601, "x"])
async def test_lease_seconds_are_validated(tmp_path: Path, seconds: object) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served)
        answer = await served.http.post(
            f"/v1/kv/{known.handle}/lease", json={"lease_seconds": seconds}
        )
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        body = rollout_body() | {"kv": {"lease_seconds": seconds}}
        assert (await served.http.post("/v1/rollouts", json=body)).status_code == 422


async def test_drain_waits_for_leases(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served)
        draining = asyncio.create_task(served.server.drain(30))
        await asyncio.sleep(0.1)
        assert (await served.http.get("/readyz")).status_code == 503
        assert (await read(served, known.handle)).status_code == 200
        renewed = await served.http.post(f"/v1/kv/{known.handle}/lease", json={"lease_seconds": 30})
        assert renewed.status_code == 200
        assert not draining.done()
        await served.http.delete(f"/v1/kv/{known.handle}")
        await draining
        late = await read(served, known.handle)
        assert (late.status_code, late.json()["code"]) == (503, "draining")


async def test_drain_timeout_bounds_the_wait_for_leases(tmp_path: Path) -> None:
    async with serving(FakeEngine(prompt_kv=True), tmp_path) as served:
        known = await export_handle(served, prompt=PROMPT)
        await served.server.drain(0.1)
        assert (await read(served, known.handle)).json()["code"] == "draining"


async def read(served: Served, handle_id: str) -> httpx.Response:
    return await served.http.get(f"/v1/kv/{handle_id}/data")
