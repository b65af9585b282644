"""Limits of requests that no other file of tests exceeds."""

from pathlib import Path

from service.compat.serving.routes import MAX_TOKENIZER_BYTES
from service.http.bodies import INLINE_BYTES
from service.http.params import MAX_WAIT_SECONDS
from tests.compat.third_party import foreign
from tests.fake_engine import FakeEngine
from tests.service.sockets import raw
from tests.serving import serving


async def test_body_of_a_control_route_is_limited(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await served.http.post("/v1/pause", json={"mode": "x" * INLINE_BYTES})
    assert refused.status_code == 413


async def test_body_of_a_tokenizer_route_is_limited(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        status, _ = await served.refused("/tokenize", {"prompt": "x" * MAX_TOKENIZER_BYTES})
    assert status == 413


async def test_wait_for_a_result_is_limited(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await served.http.get(f"/v1/rollouts/a?wait={MAX_WAIT_SECONDS + 1}")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")


async def test_idle_connection_is_closed(tmp_path: Path) -> None:
    limits = {"keep_alive_seconds": 1}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served, raw(served) as client:
        await client.send(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        status, _ = await client.answer()  # which reads until the connection is closed
    assert status == 200
