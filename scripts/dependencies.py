"""Generator of docs/dependencies.md: the packages of the CPU lock file with versions and licences.

    .venv/bin/python scripts/dependencies.py

Reads the metadata of installed packages, so it needs the environment of `make serve`.
"""

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "dependencies.md"
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
# Licences that require more of redistributors than to keep the licence text.
ASKS_MORE = re.compile(r"GPL|MPL|Mozilla|EPL|Proprietary", re.IGNORECASE)
HEAD = """# Dependencies

What `requirements/cpu.txt` installs beside our own two distributions, as the packages' own metadata
state it; written by `scripts/dependencies.py`. `pyproject.toml` says what each direct dependency is
for. A licence in bold asks of whoever passes an image on more than to keep its text.

| package | version | licence |
|---|---|---|
"""


def pinned() -> dict[str, str]:
    text = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    return dict(PINNED.findall(text))


def licence(name: str) -> str:
    """The licence expression, or the classifiers, or the first words of the licence text."""
    try:
        found = metadata(name)
    except PackageNotFoundError:
        return "not installed on this platform"
    classified = [
        value.rpartition(" :: ")[2]
        for value in found.get_all("Classifier", [])
        if value.startswith("License :: ") and value != "License :: OSI Approved"
    ]
    written = (found.get("License") or "").strip().splitlines()
    return found.get("License-Expression") or "; ".join(classified) or " ".join(written[:1])[:60]


def row(name: str, version: str) -> str:
    said = licence(name) or "not stated"
    return f"| {name} | {version} | {f'**{said}**' if ASKS_MORE.search(said) else said} |\n"


def rendered() -> str:
    return HEAD + "".join(row(name, version) for name, version in sorted(pinned().items()))


if __name__ == "__main__":
    FILE.write_text(rendered(), encoding="utf-8")
