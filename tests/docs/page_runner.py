"""Execution of the commands of one documentation page: python page_runner.py BLOCKS.json

A subprocess of test_commands.py. Python blocks share one namespace, and their tracebacks have the
line numbers of the page. Each bash block is a shell of its own, which starts with the directory and
the variables that the previous one left behind. A command fails with its pipeline, and curl fails
on an HTTP error.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHELL = """set -euo pipefail
if [ -f {state} ]; then . {state}; cd "$PWD"; fi
curl() {{ command curl --fail-with-body "$@"; }}
set -a
trap 'export -p > {state}' EXIT
"""


def main() -> None:
    sys.path[0] = ""
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        shell = SHELL.format(state=Path(folder) / "variables")
        for block in json.loads(Path(sys.argv[1]).read_text()):
            print(f"--- {block['place']}", flush=True)
            if block["language"] == "bash":
                subprocess.run(["bash", "-c", shell + block["text"]], check=True)
            else:
                lines = "\n" * block["line"] + block["text"]
                exec(compile(lines, block["page"], "exec"), names)


if __name__ == "__main__":
    main()
