"""docs/dependencies.md: what the lock for CPU installs, with versions and licences.

    .venv/bin/python scripts/dependencies.py

From the metadata of the installed packages, so it needs the environment that `make serve` makes.
"""

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "dependencies.md"
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
# Licences that ask of whoever passes the image on more than to keep their text.
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
    """The expression, else the classifiers, else the first words of what stands there."""
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
