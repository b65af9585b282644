"""Generator of docs/performance/index.md and its charts.

    python -m bench.report.performance_page

Both are drawn from bench/records/. tests/bench/test_report.py checks that they are up to date.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from bench.report import agents, generation, gpu_runs, serving, training, whole_groups
from bench.report.drawing import svg
from bench.report.records import Chart, record

CHARTS = (
    serving.HEADLINE,
    *whole_groups.CHARTS,
    *training.CHARTS,
    *generation.CHARTS,
    *agents.CHARTS,
    *serving.CHARTS,
)

FOLDER = Path(__file__).parents[2] / "docs" / "performance"
WIDTH = 100
HEAD = """# Performance

This page shows what the capabilities of Coppice gain and cost. Each is compared with a baseline.
Read it before you enable a feature for its speed.

**All charts were measured on a CPU.** Expect other ratios on a GPU: there, arithmetic is cheaper
compared with memory access and fixed overhead.

- {machines}
- Models are small: 25 or 100 million parameters, unless the text names another.
- A capability and its baseline run in turn on the same machine, in the same process layout.
- A ratio is the median over pairs of runs, with a 95 % bootstrap interval. Above 1x is a gain.
- [Tables](benchmarks.md) has every row that was measured, with its goal and whether it was met.
- `make bench` measures again and writes this page.
"""


def machines(chart: Chart) -> list[str]:
    """Machines on which the records of a chart were made."""
    found = (record(name)["machine"] for name in chart.records)
    return sorted(
        {
            f"an {m['processor'].removesuffix(' Processor')} processor with {m['cores']} cores and "
            f"{m['memory_gib']} GiB of memory"
            for m in found
        }
    )


def section(chart: Chart) -> str:
    sources = ", ".join(f"[{name}](benchmarks.md#{name})" for name in chart.records)
    dates = sorted({record(name)["date"] for name in chart.records})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return (
        "\n\n".join(
            [
                f"## {chart.title}",
                f"![{chart.title}]({chart.name}.svg)",
                fill(" ".join(chart.text().split()), WIDTH, break_on_hyphens=False),
                fill(
                    f"CPU: {' or '.join(machines(chart))}; {days}. Tables: {sources}.",
                    WIDTH,
                    break_long_words=False,
                ),
            ]
        )
        + "\n"
    )


def page() -> str:
    head = HEAD.format(machines=sentence([name for chart in CHARTS for name in machines(chart)]))
    return "\n".join([head, *map(section, CHARTS), *filter(None, [gpu_runs.section()])])


def sentence(of_charts: Sequence[str]) -> str:
    """Sentence about the machines of all charts, the most frequent one first."""
    if len(set(of_charts)) == 1:
        return f"The machine has {of_charts[0]}."
    found = [name for name, _ in Counter(of_charts).most_common()]
    listed = fill("; or ".join(found), WIDTH - 2, subsequent_indent="  ")
    return f"Each section names its machine. The machines have\n  {listed}."


def files() -> dict[Path, str]:
    """Expected text of each generated file."""
    pictures = {FOLDER / f"{chart.name}.svg": svg(chart.draw()) for chart in CHARTS}
    return {FOLDER / "index.md": page()} | pictures


def main() -> None:
    for path, text in files().items():
        path.write_text(text)
        print(f"wrote {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
