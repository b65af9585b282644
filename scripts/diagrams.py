"""Renders the Mermaid diagrams of README.md as pictures: docs/diagrams/<section>.svg.

Each picture contains the SHA-256 of the source that it was rendered from. `--check` tests whether
the pictures are up to date. Rendering needs mermaid-cli
(`mmdc`, or npx to fetch it) and Chromium (`CHROMIUM=`, default /usr/bin/chromium).
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
CLI = "@mermaid-js/mermaid-cli@11.17.0"
# Labels as SVG text: viewers other than browsers do not render HTML inside of SVG.
CONFIG = {"htmlLabels": False, "flowchart": {"htmlLabels": False}, "theme": "neutral"}


def sources() -> dict[str, str]:
    """Mermaid source by the file name of its picture."""
    readme = (ROOT / "README.md").read_text()
    sections = re.split(r"^## ", readme, flags=re.MULTILINE)
    found = (
        (part.partition("\n")[0], re.search(r"```mermaid\n([^`]*)```", part)) for part in sections
    )
    return {f"{title.lower().replace(' ', '-')}.svg": block[1] for title, block in found if block}


def is_up_to_date(name: str, source: str) -> bool:
    file = FOLDER / name
    return file.exists() and _digest(source) in file.read_text()


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
    file.write_text(f"{file.read_text()}\n<!-- sha256 of the source: {_digest(source)} -->\n")


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def main() -> int:
    stale = [name for name, source in sources().items() if not is_up_to_date(name, source)]
    if "--check" in sys.argv:
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        render(name, sources()[name])
    print(f"rendered {len(stale)} of {len(sources())} diagrams")
    return 0


if __name__ == "__main__":
    sys.exit(main())
