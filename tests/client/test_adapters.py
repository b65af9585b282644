import json
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load

from coppice import AdapterAnswer, AdaptersAnswer, AdaptersFull, NotFound
from tests.adapters import adapter_config, saved_adapter, tensors_file
from tests.client.app import App, answering, refusing
from tests.client.conftest import Connect
from tests.client.test_weights import check_put

LOADED = AdapterAnswer(
    name="policy", version="7", current=True, rank=4, num_bytes=1, num_rollouts_running=0
)
METADATA = "__metadata__"


def test_adapter_is_loaded_by_its_server_directory(connect: Connect) -> None:
    app = App(answering(LOADED, 201))
    assert connect(app).load_adapter("policy", Path("/adapters/7"), version="7") == LOADED
    assert app.request.url.path == "/v1/adapters/policy"
    assert json.loads(app.request.content) == {"path": "/adapters/7", "version": "7"}


def test_adapter_is_uploaded_as_one_file_with_its_config(connect: Connect, tmp_path: Path) -> None:
    app = App(answering(LOADED, 201))
    assert connect(app).publish_adapter("policy", "7", saved_adapter(tmp_path / "a")) == LOADED
    sent = app.request.content
    check_put(app.request, "/v1/adapters/policy/7", sent)
    ours, theirs = load(sent), load(tensors_file())
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    header = json.loads(sent[8 : 8 + int.from_bytes(sent[:8], "little")])
    assert json.loads(header[METADATA]["adapter_config"]) == adapter_config()


def test_adapters_are_listed_and_unloaded(connect: Connect) -> None:
    told = AdaptersAnswer(adapters=[LOADED], max_adapters=2, max_rank=16)
    app = App(answering(told, 200))
    assert connect(app).adapters() == told
    gone = App(lambda request: httpx.Response(204))
    connect(gone).unload_adapter("policy")
    assert (gone.request.method, gone.request.url.path) == ("DELETE", "/v1/adapters/policy")


def test_missing_adapter_and_full_capacity_are_distinct_errors(connect: Connect) -> None:
    with pytest.raises(NotFound):
        connect(App(refusing("adapter_not_found", 404))).unload_adapter("policy")
    with pytest.raises(AdaptersFull):
        connect(App(refusing("adapters_full", 503))).load_adapter("policy", "/a")


def test_invalid_adapter_name_is_never_sent(connect: Connect) -> None:
    app = App()
    with pytest.raises(ValueError):
        connect(app).load_adapter("a/b", "/a")
    assert not app.requests
