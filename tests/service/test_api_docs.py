"""The page /docs: Swagger UI of the contract, without requests to other servers."""

import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.routes import api_documents
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys
from tests.serving import serving
from tests.ui.browser import tab

FOLDER = Path(api_documents.__file__).parents[1] / "api_docs"
FILES = ("/docs", *(f"/docs/{name}" for name in api_documents.API_DOCS))
# Of the package swagger-ui-dist 5.35.0 on registry.npmjs.org.
UPSTREAM = {
    "swagger-ui-bundle.js": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    "swagger-ui.css": "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
}
REQUESTED = "performance.getEntriesByType('resource').map(entry => entry.name)"
OPEN_RESUME = "document.querySelector('#operations-control-resume button').click()"
TRY_OUT = "document.querySelector('#operations-control-resume .try-out__btn')"
EXECUTE = "document.querySelector('#operations-control-resume .execute')"
STATUS = (
    "document.querySelector('#operations-control-resume .live-responses-table tbody td')?.innerText"
)


@pytest.mark.parametrize("name", UPSTREAM)
def test_files_of_swagger_ui_are_unchanged(name: str) -> None:
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == UPSTREAM[name]


async def test_page_is_public_and_may_only_load_from_its_own_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    write_keys(keys, a="rollout")
    async with serving(FakeEngine(), tmp_path, server={"keys_file": keys}) as served:
        answers = [await served.http.get(path) for path in FILES]
    for answer in answers:
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        sources = {word for rule in policy.split("; ") for word in rule.split()[1:]}
        assert sources == {"'none'", "'self'", "'unsafe-inline'", "data:"}
        assert "script-src 'self';" in policy


@pytest.mark.parametrize("ui", [True, False])
async def test_root_links_to_what_is_served(tmp_path: Path, ui: bool) -> None:
    async with serving(FakeEngine(), tmp_path, server={"ui": ui}) as served:
        answer = await served.http.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        paths = re.findall("href=([^>]+)", answer.text)
        assert ("/ui" in paths) == ui
        assert {"/docs", "/v1/status", "/metrics"} <= {*paths}
        others = [path for path in paths if path != "/ui"]  # not part of the contract
        assert {(await served.http.get(path)).status_code for path in others} == {200}


async def test_file_is_sent_unchanged(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.get("/docs/swagger-ui-bundle.js")
    assert answer.content == (FOLDER / "swagger-ui-bundle.js").read_bytes()


@pytest.mark.parametrize("name", ["LICENSE", "..%2fopenapi.yaml", "%2e%2e", "page.html", "x" * 999])
async def test_other_files_are_not_served(tmp_path: Path, name: str) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.get(f"/docs/{name}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


@pytest.mark.parametrize(
    ("origin", "marks", "status"),
    [
        ("own", SAME_ORIGIN, 200),
        ("own", {}, 403),
        ("own", {"sec-fetch-site": "same-site"}, 403),
        ("http://evil.example", SAME_ORIGIN, 403),
        ("null", SAME_ORIGIN, 403),
    ],
)
async def test_without_keys_only_the_servers_own_page_sends_requests(
    tmp_path: Path, origin: str, marks: dict[str, str], status: int
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        own = served.url if origin == "own" else origin
        answer = await served.http.post("/v1/resume", headers={"origin": own, **marks})
        rebound = {"host": "evil.example", "origin": "http://evil.example", **marks}
        assert (await served.http.post("/v1/resume", headers=rebound)).status_code == 403
    assert answer.status_code == status


@pytest.mark.slow
async def test_browser_shows_the_contract_and_sends_a_request(tmp_path: Path) -> None:
    async with (
        serving(FakeEngine(), tmp_path) as served,
        tab(f"{served.url}/docs", tmp_path / "profile") as seen,
    ):
        await seen.shown("document.querySelectorAll('.opblock').length > 30")
        await seen.value(OPEN_RESUME)
        await _click(seen, TRY_OUT)
        await _click(seen, EXECUTE)
        assert (await seen.shown(STATUS)).startswith("200")
        requested = await seen.value(REQUESTED)
    assert {httpx.URL(url).path for url in requested} >= {*FILES[1:], "/openapi.yaml", "/v1/resume"}
    assert all(url.startswith((served.url, "data:")) for url in requested), requested


async def _click(seen: Any, element: str) -> None:
    await seen.shown(f"!!{element}")
    await seen.value(f"{element}.click()")
