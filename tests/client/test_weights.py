import base64
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load, save_file

from coppice import BadAnswer, VersionAnswer, VersionsAnswer, WeightsRefused
from coppice.weights.checkpoint_files import fingerprint
from tests.client.answers import ACTIVATION, VERSION
from tests.client.app import App, answering, refusing
from tests.client.checkpoints import sharded, single
from tests.client.conftest import Connect


def digest_header(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def check_streamed(request: httpx.Request, target: str, body: bytes) -> None:
    assert request.method == "PUT"
    assert request.url.raw_path.decode() == target
    assert request.content == body
    assert request.headers["Content-Type"] == "application/octet-stream"
    assert request.headers["Content-Length"] == str(len(body))
    assert "Transfer-Encoding" not in request.headers


def check_put(request: httpx.Request, target: str, body: bytes) -> None:
    check_streamed(request, target, body)
    assert request.headers["Content-Digest"] == digest_header(body)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """The directory for temporary files during the test."""
    usual, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    yield tmp_path
    tempfile.tempdir = usual


def test_state_dict_is_sent_as_one_file(connect: Connect, scratch: Path) -> None:
    app = App(answering(VERSION, 201))
    state = {"a": np.ones((2, 3), dtype=np.float16), "b": np.arange(3.0)}
    assert connect(app).upload_weights("v7", state, sequence=7) == VERSION
    assert app.request.method == "PUT"
    assert app.request.url.raw_path.decode() == "/v1/weights/v7?sequence=7"
    assert app.request.headers["Content-Length"] == str(len(app.request.content))
    assert "Content-Digest" not in app.request.headers
    sent = load(app.request.content)
    assert sent.keys() == state.keys()
    assert all(np.array_equal(sent[name], state[name]) for name in state)
    assert not list(scratch.iterdir())


def test_state_dict_that_arrives_changed_is_deleted(connect: Connect) -> None:
    wrong = VERSION.model_copy(update={"xxh3_128": "0" * 32})
    app = App(answering(wrong, 201), lambda request: httpx.Response(204))
    with pytest.raises(BadAnswer):
        connect(app).upload_weights("v7", {"w": np.ones(2)})
    assert [request.method for request in app.requests] == ["PUT", "DELETE"]


def test_uploads_are_compared_with_the_checksum_that_the_server_computed(
    connect: Connect, tmp_path: Path
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        received = {"xxh3_128": xxhash.xxh3_128_hexdigest(request.content)}
        return httpx.Response(201, json=VERSION.model_copy(update=received).model_dump())

    state = {"w": np.arange(3 * 2**18, dtype=np.float32), "b": np.ones(2)}
    for source in (state, single(tmp_path / "step-7.safetensors")):
        assert connect(App(answer)).upload_weights("v7", source).version == "v7"


def test_torch_model_is_sent_without_its_tied_head(connect: Connect) -> None:
    torch = pytest.importorskip("torch")
    load_torch = pytest.importorskip("safetensors.torch").load
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    app = App(answering(VERSION))
    connect(app).upload_weights("v7", model.to(torch.bfloat16).state_dict())
    sent = load_torch(app.request.content)
    assert sent.keys() == {"0.weight"}
    assert torch.equal(sent["0.weight"], model[0].weight)


def test_refused_state_dict_leaves_no_file(connect: Connect, scratch: Path) -> None:
    app = App(refusing("weights_refused", 422))
    with pytest.raises(WeightsRefused):
        connect(app).upload_weights("v7", {"w": np.ones(2)})
    assert not list(scratch.iterdir())


def test_file_is_sent_unchanged(connect: Connect, tmp_path: Path) -> None:
    app = App(answering(VERSION))
    path = single(tmp_path / "step-7.safetensors")
    assert connect(app).upload_weights("v7", str(path)) == VERSION
    check_streamed(app.request, "/v1/weights/v7", path.read_bytes())


def test_sharded_checkpoint_is_sent_file_by_file(connect: Connect, tmp_path: Path) -> None:
    incomplete = VERSION.model_copy(update={"state": "incomplete", "missing_files": ["x"]})
    app = App(*[answering(incomplete)] * 3, answering(VERSION))
    files = sharded(tmp_path)
    assert connect(app).upload_weights("v7", tmp_path, sequence=7) == VERSION
    assert len(app.requests) == len(files)
    for request, path in zip(app.requests, files, strict=True):
        check_put(request, f"/v1/weights/v7/files/{path.name}?sequence=7", path.read_bytes())


def test_shards_share_the_sequence_of_the_first_one(connect: Connect, tmp_path: Path) -> None:
    app = App(answering(VERSION.model_copy(update={"sequence": 41})))
    sharded(tmp_path)
    connect(app).upload_weights("v7", tmp_path)
    sequences = [request.url.params.get("sequence") for request in app.requests]
    assert sequences == [None, "41", "41", "41"]


def test_refused_shard_ends_the_upload(connect: Connect, tmp_path: Path) -> None:
    app = App(answering(VERSION), refusing("digest_mismatch", 422))
    sharded(tmp_path)
    with pytest.raises(WeightsRefused):
        connect(app).upload_weights("v7", tmp_path)
    assert len(app.requests) == 2


def test_weights_on_the_server_are_named_by_path(connect: Connect) -> None:
    app = App(answering(VERSION))
    assert connect(app).stage_weights("v7", Path("/weights/7"), sequence=7) == VERSION
    assert (app.request.method, app.request.url.path) == ("POST", "/v1/weights/v7")
    assert json.loads(app.request.content) == {"path": "/weights/7", "sequence": 7}


def test_activation_sends_its_mode(connect: Connect) -> None:
    app = App(answering(ACTIVATION))
    client = connect(app)
    assert client.activate_weights("v7", mode="wait", allow_rollback=True) == ACTIVATION
    assert (app.request.method, app.request.url.path) == ("POST", "/v1/weights/v7/activate")
    assert json.loads(app.request.content) == {"mode": "wait", "allow_rollback": True}


def test_publish_sends_a_path_that_the_server_accepts(connect: Connect, tmp_path: Path) -> None:
    app = App(answering(VERSION, 201), answering(ACTIVATION))
    path = single(tmp_path / "model.safetensors")
    assert connect(app).publish_weights("v7", path, sequence=7) == ACTIVATION
    staging, activation = app.requests
    assert (staging.method, staging.url.path) == ("POST", "/v1/weights/v7")
    assert json.loads(staging.content) == {
        "path": str(path),
        "fingerprint": fingerprint(path),
        "sequence": 7,
    }
    assert activation.url.path == "/v1/weights/v7/activate"


def test_publish_uploads_other_files_and_activates(connect: Connect, tmp_path: Path) -> None:
    app = App(refusing("path_refused", 422), answering(VERSION), answering(ACTIVATION))
    path = single(tmp_path / "model.safetensors")
    client = connect(app)
    assert client.publish_weights("v7", path, sequence=7, mode="recompute") == ACTIVATION
    _, upload, activation = app.requests
    check_streamed(upload, "/v1/weights/v7?sequence=7", path.read_bytes())
    assert json.loads(activation.content) == {"mode": "recompute", "allow_rollback": False}


def test_refused_weights_are_not_activated(connect: Connect) -> None:
    app = App(refusing("weights_refused", 422))
    with pytest.raises(WeightsRefused):
        connect(app).publish_weights("v7", {"w": np.ones(2)})
    assert len(app.requests) == 1


def test_versions_are_listed(connect: Connect) -> None:
    other = VersionAnswer(version="v8", sequence=8, state="incomplete", num_bytes=0)
    versions = VersionsAnswer(active="v7", versions=[VERSION, other])
    app = App(answering(versions))
    assert connect(app).weights() == versions
    assert (app.request.method, app.request.url.path) == ("GET", "/v1/weights")


def test_version_is_deleted(connect: Connect) -> None:
    app = App(lambda request: httpx.Response(204))
    connect(app).delete_weights("v7")
    assert (app.request.method, app.request.url.path) == ("DELETE", "/v1/weights/v7")


def test_later_weights_are_sent_as_a_delta(connect: Connect, scratch: Path) -> None:
    app = App(answering(VERSION, 201))
    client = connect(app)
    first = {"a": np.ones(1000, np.float32), "b": np.zeros(1000, np.float16)}
    client.upload_weights("v6", first, delta=True)
    second = {**first, "b": np.ones(1000, np.float16)}
    client.upload_weights("v7", second, sequence=7, delta=True)
    whole, changed = app.requests
    check_put(whole, "/v1/weights/v6", whole.content)
    check_put(changed, "/v1/weights/v7?sequence=7&base=v6", changed.content)
    assert load(whole.content).keys() == {"a", "b"}
    assert load(changed.content).keys() == {"b"}
    assert len(list(scratch.iterdir())) == 1, "the base of the next delta is kept"
    client.close()
    assert not list(scratch.iterdir())


def test_lost_base_makes_the_client_send_everything(connect: Connect, scratch: Path) -> None:
    app = App(answering(VERSION), refusing("base_unavailable", 409), answering(VERSION))
    client = connect(app)
    for version, value in (("v6", 1.0), ("v7", 2.0)):
        client.upload_weights(version, {"w": np.full(5000, value, "f")}, delta=True)
    delta, whole = app.requests[1:]
    assert delta.url.params["base"] == "v6"
    check_put(whole, "/v1/weights/v7", whole.content)
    assert np.array_equal(load(whole.content)["w"], np.full(5000, 2.0, "f"))


def test_refused_version_is_not_used_as_a_base(connect: Connect) -> None:
    app = App(answering(VERSION), refusing("weights_refused", 422), answering(VERSION))
    client = connect(app)
    client.upload_weights("v6", {"w": np.ones(5000)}, delta=True)
    with pytest.raises(WeightsRefused):
        client.upload_weights("v7", {"w": np.full(5000, np.nan)}, delta=True)
    client.upload_weights("v8", {"w": np.ones(5000)}, delta=True)
    assert app.requests[-1].url.params["base"] == "v6"


def test_changed_set_of_tensors_is_sent_completely(connect: Connect) -> None:
    app = App(answering(VERSION))
    client = connect(app)
    client.upload_weights("v6", {"w": np.ones(5000)}, delta=True)
    client.upload_weights("v7", {"w": np.ones(5001)}, delta=True)
    assert "base" not in app.requests[-1].url.params


def test_delta_of_a_sharded_checkpoint_is_one_file(connect: Connect, tmp_path: Path) -> None:
    app = App(answering(VERSION))
    client = connect(app)
    for number, shard in enumerate(sharded(tmp_path)[1:]):
        save_file({f"w{number}": np.full(5000, number, np.float32)}, shard)
    client.upload_weights("v6", tmp_path, delta=True)
    client.upload_weights("v7", tmp_path, delta=True)
    whole, changed = app.requests
    check_put(whole, "/v1/weights/v6", whole.content)
    assert load(whole.content).keys() == {"w0", "w1", "w2"}
    assert not load(changed.content)
    assert changed.url.params["base"] == "v6"


@pytest.mark.parametrize("version", ["", "a/b", "..", "-v", "v 7", "v?x", "v" * 65])
def test_invalid_version_label_is_never_sent(connect: Connect, version: str) -> None:
    with pytest.raises(ValueError):
        connect(App()).upload_weights(version, {"w": np.ones(2)})
