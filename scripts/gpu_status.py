"""GPU column of README's status table, from the records of runs on a GPU.

    python scripts/gpu_status.py

A record is `bench/records/gpu/run-N.json`. A row is found by the name of the first page that it
links. It has the result of the newest run that has one.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench" / "records" / "gpu"
README = ROOT / "README.md"
COLUMN = 3
_TABLE = re.compile(r"(?<=\n)\| Capability \|.*?\n\n", re.DOTALL)
_PAGE = re.compile(r"\[[^]]*\]\(docs/(?:[\w-]+/)*([\w-]+)\.md")

Record = dict[str, Any]


def records() -> list[Record]:
    """All records, the newest last."""
    found: list[Record] = [json.loads(file.read_text()) for file in RECORDS.glob("run-*.json")]
    return sorted(found, key=lambda record: record["run"])


def cells(runs: list[Record]) -> dict[str, str]:
    """The cell of each capability. A run that has not run it does not change its cell."""
    found: dict[str, str] = {}
    for run in runs:
        for name, result in run["capabilities"].items():
            if result["status"] != "not run" or name not in found:
                found[name] = _cell(run, **result)
    return found


def _cell(run: Record, status: str, what: str) -> str:
    device = run["gpu"].split()[0]
    prefixes = {
        "ran": f"ran on an {device}",
        "failed, fixed": f"failed on an {device}, fixed, not run again",
        "failed": f"failed on an {device}",
        "not run": "not run",
    }
    return f"{prefixes[status]}: {what}" if what else prefixes[status]


def keys(readme: str) -> list[str]:
    """Names of the rows of the table."""
    return [_key(row) for row in _rows(readme)]


def _rows(readme: str) -> list[str]:
    [table] = _TABLE.findall(readme)
    return str(table).strip().splitlines()[2:]


def _key(row: str) -> str:
    """Name of the first page in the last column."""
    found = _PAGE.search(row.rstrip(" |").rpartition(" | ")[2])
    assert found, row
    return found[1]


def rendered(readme: str, runs: list[Record]) -> str:
    """README with the column of these runs. Raises KeyError if a row has no result."""
    found = cells(runs)
    for row in _rows(readme):
        columns = row.split("|")
        columns[COLUMN] = f" {found[_key(row)]} "
        readme = readme.replace(row, "|".join(columns))
    return readme


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(), records()))
