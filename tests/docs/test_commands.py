"""The commands of README.md and docs/ are executed as printed; blocks.py explains the markers."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.config.sources import load_settings
from tests.docs.blocks import ROOT, blocks, pages, problems
from tests.docs.conftest import DocServer, last_block, run_page
from tests.ports import free_port
from tests.service.command_line import parsed_flags


def pages_to_run() -> Iterator[object]:
    """Pages with commands. Of those that start a server, `make test` runs only the README."""
    for page in pages():
        executed = [block for block in blocks(page) if block.is_executed]
        if any(block.marker[1] == "server" or block.starts_server for block in executed):
            marks = [pytest.mark.engine]
            if page != "README.md":
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(page, id=page, marks=marks)
        elif executed:
            yield pytest.param(page, id=page, marks=pytest.mark.slow)


@pytest.mark.parametrize("page", list(pages_to_run()))
def test_commands_of_the_page_run(page: str, tree: Path, server: DocServer, tmp_path: Path) -> None:
    executed = [block for block in blocks(page) if block.is_executed]
    if any(block.starts_server for block in executed):
        server.stop()  # one engine at a time
    if any(block.marker[1] == "server" for block in executed):
        server.start()
        succeeded, log = run_page(executed, server.address, tree, tmp_path)
        server.stop_if_changed()
    else:
        succeeded, log = run_page(executed, f"127.0.0.1:{free_port()}", tree, tmp_path)
    assert succeeded, f"failed block: {last_block(log)}"


@pytest.mark.engine
@pytest.mark.exhaustive
def test_make_serve_starts_a_server(server: DocServer) -> None:
    server.start()
    assert httpx.get(f"http://{server.address}/readyz").status_code == 200


@pytest.mark.parametrize("page", pages())
def test_every_block_of_the_page_has_a_valid_marker(page: str) -> None:
    found = [f"{block.place}: {text}" for block in blocks(page) for text in problems(block)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("page", pages())
def test_fences_of_the_page_are_closed(page: str) -> None:
    """The parser would miss the blocks behind an open fence."""
    fences = re.findall(r"^ *(?:```|~~~)", (ROOT / page).read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))


@pytest.mark.parametrize("page", pages())
def test_settings_of_the_page_are_valid(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.marker == ("run", "settings"):
            file = tmp_path / "settings.yaml"
            file.write_text(block.text)
            load_settings(environ={}, file=file)


@pytest.mark.parametrize("page", pages())
def test_flags_of_the_page_are_valid(page: str) -> None:
    """Also those of commands that need a GPU."""
    for block in blocks(page):
        for command in serve_commands(block.text) if block.language == "bash" else ():
            load_settings(environ={}, flags=parsed_flags(*command))


def serve_commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `coppice serve` of a shell script, also of one in a container."""
    for found in re.finditer(r"\bcoppice(?::\S+)? serve\b(.*)", text.replace("\\\n", " ")):
        words = shlex.split(found[1], comments=True)
        yield list(itertools.takewhile(lambda word: not re.match(r"2?[&|;<>]", word), words))


def test_misspelt_flag_is_refused() -> None:
    [command] = serve_commands("HF_HUB_OFFLINE=0 .venv/bin/coppice serve \\\n  --engine.modell x &")
    with pytest.raises(SystemExit):
        parsed_flags(*command)
