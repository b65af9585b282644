"""The table of docs/migrate/index.md has the pinned versions, and names existing tests."""

import json
import re
from pathlib import Path

import pytest

from tests.compat.record import CLIENTS, PAGE, ROOT, named, written

PINS = ("agent_sdk", "clients", "cpu", "miles", "verl")


def pinned(name: str) -> str:
    if name.startswith("@"):
        lock = json.loads((ROOT / "requirements" / "codex_cli" / "package-lock.json").read_text())
        return str(lock["packages"][f"node_modules/{name}"]["version"])
    files = ("verifiers",) if name == "verifiers" else PINS
    texts = [(ROOT / "requirements" / f"{file}.txt").read_text() for file in files]
    [version] = {found[1] for t in texts for found in re.finditer(rf"(?m)^{name}==(\S+)", t)}
    return version


def test_table_has_the_pinned_versions_and_tests_of_each_client() -> None:
    rows = [row.strip("| ").split(" | ") for row in written(PAGE.read_text()).splitlines()[2:]]
    said = {name: (version, tests) for name, version, _, tests in rows}
    assert said == {client.name: (pinned(client.name), named(client)) for client in CLIENTS}


@pytest.mark.parametrize("test", [test for client in CLIENTS for test in client.tests])
def test_every_named_test_exists(test: str) -> None:
    path, _, function = test.partition("::")
    assert (
        f"def {function}(" in (ROOT / path).read_text() if function else Path(ROOT / path).exists()
    )
