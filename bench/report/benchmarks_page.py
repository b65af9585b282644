"""Generator of docs/performance/benchmarks.md; `--check` tests if the page is up to date."""

import json
import sys
from pathlib import Path
from typing import Any

from bench.harness.record import RECORDS
from bench.report.explanations import EXPLANATIONS

PAGE = Path(__file__).parents[2] / "docs" / "performance" / "benchmarks.md"
HEAD = """# Benchmark tables

Every measured row, including slowdowns and goals that were missed. [Performance](index.md) shows
the main results as charts. All rows are from a CPU.

- **Arms** are the configurations that are compared. They run in turn on the same machine, in the
  same process layout.
- **Ratios** such as `1.83 [1.79, 1.88]` are medians over pairs of runs with a 95 % bootstrap
  interval. `a / b` is the value of `a` divided by that of `b`.
- **Goals** may be met or missed; `within noise` means that the interval contains the goal.
- **Ours** is the implementation in this repository.
- **The command** and its date are above each table. If several commands measured the rows, it is
  the last one, and the rows give their number of rounds.

`make bench` measures all and writes this page; `python -m bench.report.benchmarks_page` only writes
it from `bench/records/`.
"""


def page() -> str:
    records = [json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json"))]
    return "\n".join([HEAD, *map(_section, records)])


def _section(record: dict[str, Any]) -> str:
    machine = record["machine"]
    title, rows = EXPLANATIONS[record["name"]]
    lines = [
        f"## {record['name']}\n",
        f"**{title}.** {record['claim']}\n",
        *([f"{rows}\n"] if rows else []),
        f"`{record['command']}`, {record['date']}, {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, "
        + "".join(f"{gpu}, " for gpu in machine.get("gpus", []))
        + ", ".join(f"{name} {number}" for name, number in record["versions"].items() if number)
        + ".\n",
        "| row | measured | goal | verdict |",
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
