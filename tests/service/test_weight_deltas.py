"""PUT /v1/weights/{version}?base=...: the exact file is restored, or nothing."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from coppice.weights.delta import Lineage
from coppice.weights.delta_writer import write_delta
from tests.fake_engine import FakeEngine
from tests.serving import Served, serving

OLD = save({"a": np.linspace(0, 1, 3000, dtype=np.float32), "b": np.ones(50, np.float16)})
NEW = save({"a": np.linspace(0, 1, 3000, dtype=np.float32), "b": np.zeros(50, np.float16)})


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def delta(
    folder: Path, old: bytes = OLD, new: bytes = NEW, lineage: dict[str, str] | None = None
) -> bytes:
    for name, content in (("old", old), ("new", new)):
        (folder / name).write_bytes(content)
    named = Lineage(sha256(old), sha256(new))._replace(**(lineage or {}))
    for _ in write_delta(folder / "old", folder / "new", named, folder / "delta"):
        pass
    return (folder / "delta").read_bytes()


async def put(served: Served, version: str, content: bytes, **query: Any) -> Any:
    return await served.http.put(f"/v1/weights/{version}", content=content, params=query)


def files(served: Served) -> set[str]:
    folder = served.server.checkpoints.folder("x").parent
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {
        ".owner"
    }


async def test_delta_becomes_a_version_like_any_other(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await put(served, "v1", OLD)
        sent = delta(tmp_path)
        stored = await put(served, "v2", sent, base="v1", sequence=9)
        assert stored.status_code == 201
        answer = stored.json()
        assert (answer["state"], answer["sequence"], answer["base"]) == ("staged", 9, "v1")
        assert (answer["sha256"], answer["num_bytes"]) == (sha256(NEW), len(NEW))
        assert answer["received_bytes"] == len(sent) < len(NEW) / 2
        assert (await put(served, "v2", sent, base="v1")).status_code == 200
        assert (await put(served, "v2", NEW)).status_code == 200, "the same bytes, sent whole"
        assert (await served.http.post("/v1/weights/v2/activate", json={})).status_code == 200
        assert (engine.loaded[0] / "model.safetensors").read_bytes() == NEW
        metrics = (await served.http.get("/metrics")).text
        spared = f"coppice_weights_delta_saved_bytes_total {float(len(NEW) - len(sent))}"
        assert spared in metrics
        # A version uploaded as a delta can be a base too, and so can a superseded one.
        back = await put(served, "v3", delta(tmp_path, NEW, OLD), base="v2")
        assert back.json()["sha256"] == sha256(OLD)
        assert (await put(served, "v4", sent, base="v1")).status_code == 201


async def test_missing_base_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await put(served, "v1", OLD)
        await served.http.put("/v1/weights/shards/files/one.safetensors", content=OLD)
        for base in ("unknown", "v0", "shards"):
            refused = await put(served, "v2", b"never read", base=base)
            assert (refused.status_code, refused.json()["code"]) == (409, "base_unavailable")
        assert (await put(served, "v2", b"", base="a b")).json()["code"] == "invalid_request"
        await served.http.delete("/v1/weights/v1")
        dropped = await put(served, "v2", delta(tmp_path), base="v1")
        assert (dropped.status_code, dropped.json()["code"]) == (409, "base_unavailable")


@pytest.mark.parametrize(
    ("lineage", "status", "code"),
    [
        ({"base": "0" * 64}, 409, "base_unavailable"),
        ({"result": "0" * 64}, 422, "digest_mismatch"),
        ({"result": "zero"}, 422, "weights_refused"),
    ],
)
async def test_broken_lineage_leaves_nothing(
    tmp_path: Path, lineage: dict[str, str], status: int, code: str
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await put(served, "v1", OLD)
        before = files(served)
        refused = await put(served, "v2", delta(tmp_path, lineage=lineage), base="v1")
        assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert files(served) == before
        assert len((await served.http.get("/v1/weights")).json()["versions"]) == 2


async def test_invalid_delta_leaves_nothing(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await put(served, "v1", OLD)
        before = files(served)
        lineage = {"base_sha256": sha256(OLD), "sha256": sha256(NEW)}
        strange = save({"c": np.ones(3)}, {"format": "coppice-delta", **lineage})
        for content in (b"torn", NEW, strange):
            refused = await put(served, "v2", content, base="v1")
            assert (refused.status_code, refused.json()["code"]) == (422, "weights_refused")
        engine.refused_weights["v2"] = "b holds NaN"
        assert (await put(served, "v2", delta(tmp_path), base="v1")).status_code == 422
        assert files(served) == before
        engine.refused_weights.clear()
        assert (await put(served, "v2", delta(tmp_path), base="v1")).status_code == 201
        other = await put(served, "v2", delta(tmp_path, OLD, OLD), base="v1")
        assert other.json()["code"] == "version_conflict"
