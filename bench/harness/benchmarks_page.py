"""Generator of docs/performance/benchmarks.md; `--check` tests if the page is up to date."""

import json
import sys
from pathlib import Path
from typing import Any

from bench.harness.record import RECORDS

PAGE = Path(__file__).parents[2] / "docs" / "performance" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `python -m bench.harness.benchmarks_page` from `bench/records/`. The arms of a benchmark
run in turn on the same machine in the same process layout. Ratios are medians over pairs with a
95 % bootstrap interval. Slowdowns and missed goals are included. If a record was made in parts
(speculation, trainer_step), its command and date are those of the last part, and the rows state the
number of rounds.
"""


def page() -> str:
    records = [json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json"))]
    return "\n".join([HEAD, *map(_section, records)])


def _section(record: dict[str, Any]) -> str:
    machine = record["machine"]
    lines = [
        f"## {record['name']}\n",
        f"{record['claim']}\n",
        f"`{record['command']}`, {record['date']}, {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, "
        + ", ".join(f"{name} {number}" for name, number in record["versions"].items() if number)
        + ".\n",
        "| | measured | goal | |",
        "|---|---|---|---|",
        *(f"| {r['what']} | {r['value']} | {r['goal']} | {r['verdict']} |" for r in record["rows"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(Path.cwd())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
