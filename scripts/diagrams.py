"""Renders Mermaid sources as pictures in docs/diagrams, beside the sources.

Sources are the files docs/diagrams/<name>.mmd and the Mermaid blocks of README.md, named after
their section. A file takes precedence over a block of the same name. The site shows the pictures,
because it does not render Mermaid. An SVG file without a source is drawn by hand.

Each rendered picture contains the SHA-256 of its source. `--check` tests whether the pictures are
up to date. Rendering needs mermaid-cli (`mmdc`, or npx to fetch it) and Chromium (`CHROMIUM=`,
default /usr/bin/chromium).
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "diagrams"
MARK = "<!-- sha256 of the source: "
CLI = "@mermaid-js/mermaid-cli@11.17.0"
# Labels as SVG text: viewers other than browsers do not render HTML inside of SVG.
CONFIG = {
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False},
    "sequence": {"wrap": True, "width": 150, "actorMargin": 24, "mirrorActors": False},
    "theme": "neutral",
}


def sources() -> dict[str, str]:
    """Mermaid source by the file name of its picture."""
    files = {f"{file.stem}.svg": file.read_text() for file in sorted(FOLDER.glob("*.mmd"))}
    return _readme_blocks() | files


def _readme_blocks() -> dict[str, str]:
    readme = (ROOT / "README.md").read_text()
    sections = re.split(r"^## ", readme, flags=re.MULTILINE)
    found = (
        (part.partition("\n")[0], re.search(r"```mermaid\n([^`]*)```", part)) for part in sections
    )
    return {f"{title.lower().replace(' ', '-')}.svg": block[1] for title, block in found if block}


def is_up_to_date(name: str, source: str) -> bool:
    file = FOLDER / name
    return file.exists() and f"{MARK}{_digest(source)} " in file.read_text()


def orphans() -> list[str]:
    """Rendered pictures whose source no longer exists."""
    known = sources()
    pictures = (file for file in sorted(FOLDER.glob("*.svg")) if file.name not in known)
    return [file.name for file in pictures if MARK in file.read_text()]


def render(name: str, source: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        inputs, browser, config = (Path(folder) / part for part in ("in.mmd", "browser", "config"))
        inputs.write_text(source)
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser.write_text(json.dumps({"executablePath": chromium, "args": ["--no-sandbox"]}))
        config.write_text(json.dumps(CONFIG))
        installed = ["mmdc"] if shutil.which("mmdc") else ["npx", "--yes", "--package", CLI, "mmdc"]
        command = [*installed, "--input", inputs, "--output", FOLDER / name]
        command += ["--puppeteerConfigFile", browser, "--configFile", config]
        command += ["--backgroundColor", "white"]
        subprocess.run(command, check=True)
    file = FOLDER / name
    file.write_text(f"{file.read_text()}\n{MARK}{_digest(source)} -->\n")


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def main() -> int:
    stale = [name for name, source in sources().items() if not is_up_to_date(name, source)]
    if "--check" in sys.argv:
        return 1 if stale or orphans() else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        render(name, sources()[name])
    for name in orphans():
        (FOLDER / name).unlink()
    print(f"rendered {len(stale)} of {len(sources())} diagrams")
    return 0


if __name__ == "__main__":
    sys.exit(main())
