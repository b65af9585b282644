"""The site builds without warnings, loads nothing from other servers, and has no broken link."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from markdown import Markdown

from tests.tools import ROOT
from tests.ui.browser import tab

pytestmark = pytest.mark.slow
READMES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "client/README.md")),
    ROOT / "helm" / "coppice" / "README.md",
    *sorted((ROOT / "examples").glob("**/README.md")),
]
# Attributes of elements that a browser loads without a click.
LOADED = {
    *(("script", "src"), ("img", "src"), ("img", "srcset"), ("source", "src"), ("iframe", "src")),
    *(("source", "srcset"), ("video", "src"), ("audio", "src"), ("embed", "src")),
    *(("object", "data"), ("use", "href"), ("image", "href"), ("form", "action")),
}
LOADING_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload"}


class Page(HTMLParser):
    """Ids, links and loaded addresses of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        self.loaded += [values[name] for kind, name in LOADED if kind == tag and name in values]
        if tag == "link" and LOADING_RELATIONS & set(values.get("rel", "").split()):
            self.loaded.append(values["href"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


def is_remote(address: str) -> bool:
    return bool(urlsplit(address.strip()).netloc)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for file in sorted(site.rglob("*.html")):
        yield file, Page(file.read_text(encoding="utf-8"))


def test_every_link_of_the_site_has_a_target(site: Path) -> None:
    built = dict(pages(site))
    assert len(built) > 40
    broken = [
        f"{file.relative_to(site)}: {link}"
        for file, page in built.items()
        for link in page.links
        if not is_remote(link) and not has_target(site, built, file, link)
    ]
    assert not broken


def has_target(site: Path, built: dict[Path, Page], file: Path, link: str) -> bool:
    address = urlsplit(link)
    if address.scheme or file.name == "404.html":  # its links start at the site's root
        return True
    target = (file.parent / unquote(address.path)).resolve() if address.path else file
    target = target / "index.html" if target.is_dir() else target
    if not target.is_relative_to(site.resolve()) or not target.exists():
        return False
    fragment = unquote(address.fragment)
    return not fragment or fragment in built[target].ids | {"__top"}


@pytest.mark.parametrize(
    ("link", "found"),
    [
        *[("#here", True), ("b.html", True), ("b.html#there", True), ("mailto:a@b.c", True)],
        *[("#there", False), ("c.html", False), ("b.html#here", False), ("../b.html", False)],
    ],
)
def test_broken_links_are_detected(tmp_path: Path, link: str, found: bool) -> None:
    (tmp_path / "a.html").write_text('<h1 id="here"></h1>')
    (tmp_path / "b.html").write_text('<a name="there"></a>')
    assert has_target(tmp_path, dict(pages(tmp_path)), tmp_path / "a.html", link) is found


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    remote = {
        f"{file.relative_to(site)}: {address}"
        for file, page in pages(site)
        for address in page.loaded
        if is_remote(address)
    }
    assert not remote


def test_style_sheets_load_nothing_from_other_servers(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(url\(|@import)\s*[\"']?\s*(https?:)?//", text), sheet.name


def test_no_page_uses_a_feature_whose_script_is_fetched_from_a_server(site: Path) -> None:
    """The theme's script fetches Mermaid for diagrams, and repository facts for `repo_url`."""
    for file, _ in pages(site):
        text = file.read_text(encoding="utf-8")
        assert 'class="mermaid"' not in text, file.name
        assert 'data-md-component="source"' not in text, file.name


async def test_browser_requests_only_files_of_the_site(site: Path, tmp_path: Path) -> None:
    with served(site) as url:
        page = f"{url}/reference/settings.html?q=block_size"
        async with tab(page, tmp_path / "profile") as seen:
            await seen.shown("document.querySelectorAll('.md-search-result__item').length")
            loaded = await seen.value("performance.getEntriesByType('resource').map(e => e.name)")
    assert any(address.endswith(".css") for address in loaded)
    assert all(address.startswith((url, "data:", "blob:")) for address in loaded), loaded


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Address of a file server for the site."""
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """File server that does not log its requests."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("address", ["//a.b/c.js", "https://a.b/c.js", " http://a.b"])
def test_remote_addresses_are_detected(address: str) -> None:
    assert is_remote(address)
    assert Page(f'<script src="{address}"></script>').loaded == [address]


@pytest.mark.parametrize("readme", READMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_of_a_readme_have_targets(readme: Path) -> None:
    page = rendered(readme)
    for link in page.links:
        address = urlsplit(link)
        if address.scheme:
            continue
        target = (readme.parent / unquote(address.path)).resolve() if address.path else readme
        assert target.exists(), link
        if address.fragment:
            assert target.suffix == ".md", link
            assert unquote(address.fragment) in rendered(target).ids, link


def rendered(file: Path) -> Page:
    extensions = ["tables", "fenced_code", "toc", "attr_list", "md_in_html"]
    return Page(Markdown(extensions=extensions).convert(file.read_text(encoding="utf-8")))
