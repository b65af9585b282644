"""The catalogue of problems: every problem document refers to an entry that the server serves."""

import re
from pathlib import Path

import httpx
import pytest

from coppice.wire.problem_catalogue import PROBLEMS, ProblemCatalogue, ProblemKind
from service.app import create_app
from service.config.settings import Settings
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys
from tests.serving import serving, settings_for

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


async def test_catalogue_lists_every_problem_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    write_keys(keys, me="rollout")
    async with serving(FakeEngine(), tmp_path, server={"keys_file": keys}) as served:
        answer = await served.http.get("/problems")
        listed = ProblemCatalogue.model_validate_json(answer.content)
    assert {kind.code: kind for kind in listed.problems} == PROBLEMS


async def test_type_of_a_problem_document_resolves_to_its_entry(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        problem = (await served.http.get("/v1/rollouts/none")).json()
        entry = (await served.http.get(problem["type"])).json()
    assert ProblemKind.model_validate(entry) == PROBLEMS["rollout_not_found"]
    assert entry["title"] == problem["title"]


async def test_every_type_is_served(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        for kind in PROBLEMS.values():
            answer = await served.http.get(kind.type)
            assert ProblemKind.model_validate_json(answer.content) == kind


@pytest.mark.parametrize(
    "code", ["nothing", "x" * 10_000, "%0d%0aX: y", "<script>", "..%2f..%2flivez", "%00", "%ff"]
)
async def test_unknown_code_is_refused_shortly(tmp_path: Path, code: str) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.get(f"/problems/{code}", headers={"accept": BROWSER})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert len(answer.content) < 400


async def test_browsers_get_a_page(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        one = await served.http.get("/problems/kv_gone", headers={"accept": BROWSER})
        all_of_them = await served.http.get("/problems", headers={"accept": BROWSER})
    assert one.headers["content-type"].startswith("text/html")
    assert PROBLEMS["kv_gone"].action in one.text
    assert all_of_them.text.count("<h2>") == len(PROBLEMS)


@pytest.mark.parametrize(
    ("mode", "status"), [("navigate", 200), ("cors", 403)], ids=["link", "script"]
)
async def test_pages_of_other_sites_may_only_link(tmp_path: Path, mode: str, status: int) -> None:
    marks = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": mode,
        "sec-fetch-dest": "document" if mode == "navigate" else "empty",
    }
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.get("/problems/internal", headers=marks)
    assert answer.status_code == status


async def test_operators_port_serves_the_catalogue_too(tmp_path: Path) -> None:
    app = create_app(settings_for(tmp_path, server={"operators_port": 0}), FakeEngine())
    transport = httpx.ASGITransport(app.state.operators)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/problems/internal")).status_code == 200


def test_settings_that_the_catalogue_names_exist() -> None:
    sections = "|".join(Settings.model_fields)
    named = {
        (section, field)
        for kind in PROBLEMS.values()
        for section, field in re.findall(rf"\b({sections})\.(\w+)", f"{kind.meaning} {kind.action}")
    }
    assert len(named) > 5
    for section, field in named:
        model = Settings.model_fields[section].annotation
        assert model is not None and field in model.model_fields, f"{section}.{field}"
