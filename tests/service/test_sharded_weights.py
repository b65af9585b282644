"""Checkpoints of several files, listed in an index."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.compat.errors import to_openai_json
from service.errors import WeightsRefused
from service.http.exception_handlers import as_json
from tests.fake_engine import FakeEngine
from tests.service.test_weights import activate
from tests.serving import serving

pytestmark = pytest.mark.slow

INDEX = "model.safetensors.index.json"


async def test_sharded_checkpoint_is_staged_when_its_index_is_complete(tmp_path: Path) -> None:
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    index = json.dumps({"weight_map": shards}).encode()
    async with serving(FakeEngine(), tmp_path) as served:

        async def put(name: str, content: bytes) -> Any:
            return await served.http.put(f"/v1/weights/v1/files/{name}", content=content)

        first = (await put("one.safetensors", b"1")).json()
        assert (first["state"], first["missing_files"]) == ("incomplete", [INDEX])
        second = (await put(INDEX, index)).json()
        assert second["missing_files"] == ["two.safetensors"]
        early = await activate(served, "v1")
        assert (early.status_code, early.json()["code"]) == (409, "version_conflict")
        assert (await put("two.safetensors", b"2")).json()["state"] == "staged"
        assert (await put("two.safetensors", b"2")).status_code == 200
        assert (await put("two.safetensors", b"3")).status_code == 409
        assert (await put("evil.py", b"")).json()["code"] == "invalid_request"
        assert (await activate(served, "v1")).status_code == 200


@pytest.mark.parametrize(
    "index",
    [
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": null, "b": "m.safetensors"}}',
        b"[" * 100_000,
        b'{"weight_map": {"a": "\\ud800.safetensors"}}',
        b'{"weight_map": {"a": "\\udc00\\ud800"}}',
    ],
)
async def test_malformed_index_is_refused_and_affects_nothing_else(
    tmp_path: Path, index: bytes
) -> None:
    engine = FakeEngine()
    engine.refused_weights["v1"] = "the index names no files"
    async with serving(engine, tmp_path) as served:
        refused = await served.http.put(f"/v1/weights/v1/files/{INDEX}", content=index)
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        listed = await served.http.get("/v1/weights")
        assert [version["version"] for version in listed.json()["versions"]] == ["v0"]


async def test_index_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every listing of versions includes its names."""
    monkeypatch.setattr("engine.weights.checkpoint.MAX_HEADER_BYTES", 100)
    index = json.dumps({"weight_map": {"a": f"{'m' * 100}.safetensors"}}).encode()
    engine = FakeEngine()
    engine.refused_weights["v1"] = "the index is too large"
    async with serving(engine, tmp_path) as served:
        refused = await served.http.put(f"/v1/weights/v1/files/{INDEX}", content=index)
        assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")


def test_problem_is_encodable_whatever_its_text_contains() -> None:
    """File names that are not UTF-8 reach Python as lone surrogates."""
    for write in (as_json, to_openai_json):
        text = write(WeightsRefused("\udcff.safetensors is missing").problem())
        assert json.loads(text)["detail"] == r"\udcff.safetensors is missing"
