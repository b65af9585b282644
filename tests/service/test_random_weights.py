"""A server with random weights (`engine.load_format: dummy`) serves no weights version."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.config.settings import Settings
from tests.fake_engine import FakeEngine
from tests.service.test_score import score
from tests.service.test_weights import activate, sample, upload
from tests.serving import serving

DUMMY: dict[str, Any] = {"load_format": "dummy"}
WHY = "the server has random weights (engine.load_format dummy)"


async def test_samples_of_random_weights_name_no_version_of_the_model(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path, engine=DUMMY) as served:
        (answer,) = (await sample(served)).json()["groups"]
        assert answer["samples"][0]["versions"][0]["version"] == "random"
        assert (await served.http.get("/v1/status")).json()["weights_version"] == "random"


@pytest.mark.parametrize("required", ["exact_version", "min_version"])
@pytest.mark.parametrize("version", ["v0", "random", "v7"])
async def test_request_for_a_version_is_refused_for_good(
    tmp_path: Path, required: str, version: str
) -> None:
    async with serving(FakeEngine(), tmp_path, engine=DUMMY) as served:
        answer = await sample(served, **{required: version})
        assert (answer.status_code, answer.json()["code"]) == (409, "version_superseded")
        assert answer.json()["detail"] == f"{WHY}, and no weights version"
        answer = await score(served, [2, 3], weights={required: version})
        assert answer.json()["code"] == "version_superseded"


async def test_versions_are_neither_published_nor_activated(tmp_path: Path) -> None:
    engine, source = FakeEngine(), tmp_path / "source"
    source.mkdir()
    weights = {"source_directories": [source]}
    async with serving(engine, tmp_path, engine=DUMMY, weights=weights) as served:
        refused = [
            await upload(served, "v1"),
            await upload(served, "v1", base="v0"),
            await served.http.put("/v1/weights/v1/files/model.safetensors", content=b"w"),
            await served.http.post("/v1/weights/v1", json={"path": str(source)}),
            await activate(served, "random"),
            await activate(served, "v0"),
        ]
        for answer in refused:
            assert (answer.status_code, answer.json()["code"]) == (409, "version_conflict")
            assert answer.json()["detail"] == f"{WHY}, which no version can replace"
        known = (await served.http.get("/v1/weights")).json()
        assert [version["version"] for version in known["versions"]] == ["random"]
    assert not engine.loaded


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        (
            "cluster.redis_url",
            {
                "cluster": {"redis_url": "redis://localhost"},
                "server": {"advertised_url": "http://here"},
            },
        ),
        ("engine.weight_transfer", {"engine": {"weight_transfer": "ipc"}}),
        ("engine.max_adapters", {"engine": {"max_adapters": 1}}),
        ("speculation.mode drafter", {"speculation": {"mode": "drafter"}}),
    ],
)
def test_settings_that_need_the_models_weights_are_refused(
    name: str, sections: dict[str, Any]
) -> None:
    engine = DUMMY | sections.get("engine", {})
    with pytest.raises(ValidationError, match=f"load_format dummy and {name} exclude each other"):
        Settings.model_validate(sections | {"engine": engine})
