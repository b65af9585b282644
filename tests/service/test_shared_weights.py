"""Publication of files that the client and the server both see, and of all others by upload."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coppice import AsyncRollouts, WeightsRefused
from coppice.weights.checkpoint_files import fingerprint
from tests.fake_engine import FakeEngine
from tests.serving import serving


def saved(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": np.arange(8, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def settings(tmp_path: Path) -> dict[str, Any]:
    return {"source_directories": [str(tmp_path / "shared")]}


async def test_files_in_a_configured_directory_are_read_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path = FakeEngine(), saved(tmp_path / "shared" / "v1")
    caplog.set_level(logging.INFO, "coppice")
    monkeypatch.chdir(tmp_path)
    async with (
        serving(engine, tmp_path, weights=settings(tmp_path)) as served,
        AsyncRollouts(served.url) as client,
    ):
        await client.publish_weights("v1", "shared/v1")
        assert engine.loaded == [path]
        assert f"the server reads the weights of v1 from {path}" in caplog.text
        await client.publish_weights("v2", path / "model.safetensors")
        assert engine.loaded[1:] == [path / "model.safetensors"]


@pytest.mark.parametrize("options", [{"delta": True}, {"streams": 2}])
async def test_deltas_and_streams_are_uploaded(tmp_path: Path, options: Any) -> None:
    engine, path = FakeEngine(), saved(tmp_path / "shared" / "v1")
    async with (
        serving(engine, tmp_path, weights=settings(tmp_path)) as served,
        AsyncRollouts(served.url) as client,
    ):
        await client.publish_weights("v1", path, **options)
        assert engine.loaded == [served.server.checkpoints.folder("v1")]


async def test_files_that_the_server_does_not_see_are_uploaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Outside its directories, or where it has other files at the same path."""
    engine, outside = FakeEngine(), saved(tmp_path / "outside")
    inside, file = saved(tmp_path / "shared" / "v2"), tmp_path / "shared/v2/model.safetensors"
    caplog.set_level(logging.INFO, "coppice")
    async with (
        serving(engine, tmp_path, weights=settings(tmp_path)) as served,
        AsyncRollouts(served.url) as client,
    ):
        await client.publish_weights("v1", outside)
        assert "the weights of v1 are uploaded: " in caplog.text
        stale = {"path": str(inside), "fingerprint": fingerprint(inside)}
        os.utime(file, (1, 1))
        refused = await served.http.post("/v1/weights/v2", json=stale)
        assert (refused.status_code, refused.json()["code"]) == (422, "path_refused")
        assert "other files" in refused.json()["detail"]
        current = stale | {"fingerprint": fingerprint(inside)}
        first = await served.http.post("/v1/weights/v2", json=current)
        again = await served.http.post("/v1/weights/v2", json=current)
        assert (first.status_code, again.status_code) == (201, 201)
        assert again.json() == first.json()
        os.utime(file, (2, 2))
        changed = stale | {"fingerprint": fingerprint(inside)}
        conflict = await served.http.post("/v1/weights/v2", json=changed)
        assert (conflict.status_code, conflict.json()["code"]) == (409, "version_conflict")
        unnamed = await served.http.post("/v1/weights/v2", json={"path": str(inside)})
        assert unnamed.json()["code"] == "version_conflict"
        assert engine.loaded == [served.server.checkpoints.folder("v1")]


async def test_refused_weights_are_not_uploaded(tmp_path: Path) -> None:
    engine, path = FakeEngine(), saved(tmp_path / "shared" / "v1")
    engine.refused_weights["v1"] = "w holds NaN"
    async with (
        serving(engine, tmp_path, weights=settings(tmp_path)) as served,
        AsyncRollouts(served.url) as client,
    ):
        with pytest.raises(WeightsRefused, match="NaN"):
            await client.publish_weights("v1", path)
        assert not served.server.checkpoints.folder("v1").exists()


def test_fingerprint_is_of_names_sizes_and_times(tmp_path: Path) -> None:
    path = saved(tmp_path / "v1")
    file = path / "model.safetensors"
    before = fingerprint(path)
    assert fingerprint(file) == before
    (path / "config.json").write_text("{}")
    assert fingerprint(path) == before
    os.utime(file, ns=(7, 7))
    assert fingerprint(path) != before
    assert fingerprint(path / "none") == fingerprint(tmp_path / "none")
