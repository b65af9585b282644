"""The served model name: no answer reveals the model's path."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.settings import EngineSettings
from service.status.dashboard_snapshot import snapshot
from tests.compat.third_party import foreign
from tests.fake_engine import FakeEngine

PATH = "/secret/place/tiny"
ENDLESS = ("/ui/events", "/v1/sessions")
COMPLETION: dict[str, Any] = {"prompt": [1], "max_tokens": 1}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model": "org/tiny"}, "org/tiny"),
        ({"model": "org/tiny", "served_model_name": "policy"}, "policy"),
        ({"model": "{directory}"}, "tiny"),
        ({"model": "{directory}/"}, "tiny"),
        ({"model": "{directory}/../tiny"}, "tiny"),
        ({"model": "{directory}", "served_model_name": "policy"}, "policy"),
        ({"model": "/"}, "model"),
    ],
)
def test_directory_is_served_under_its_last_component(
    tmp_path: Path, fields: dict[str, str], name: str
) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    given = {key: value.replace("{directory}", str(directory)) for key, value in fields.items()}
    assert EngineSettings.model_validate(given).served_name == name


def test_path_is_not_a_name() -> None:
    with pytest.raises(ValueError, match="served_model_name"):
        EngineSettings(served_model_name="/models/tiny")


async def test_no_route_reveals_the_path_of_the_model(tmp_path: Path) -> None:
    async with foreign(tmp_path, FakeEngine(model_given=PATH)) as served:
        paths = [route.path for route in served.routes() if "GET" in route.methods]
        assert {"/v1/status", "/v1/models", "/server_info", "/get_model_info"} <= set(paths)
        answers: list[httpx.Response] = [
            await served.http.get(path)
            for path in paths
            if "{" not in path and path not in (*ENDLESS, "/flush_cache")
        ]
        answers.append(await served.http.post("/v1/completions", json={**COMPLETION, "model": "x"}))
        assert str(snapshot(served.server)).find("/secret") == -1
    assert [answer.url.path for answer in answers if "/secret" in answer.text] == []
    assert answers[-1].status_code == 404 and "fake" in answers[-1].text


async def test_model_is_addressed_by_its_name_or_its_configured_path(tmp_path: Path) -> None:
    """Trainers send the path from which they loaded the model."""
    async with foreign(tmp_path, FakeEngine(model_given=PATH)) as served:
        for name in ("fake", PATH):
            answer = await served.post("/v1/completions", {**COMPLETION, "model": name})
            assert answer["model"] == "fake"
            talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": name}
            assert (await served.post("/v1/chat/completions", talk))["model"] == "fake"
