"""Report of a run: the decisions that its results allow, and its record.

    python -m bench.gpu.report DIRECTORY [--run NUMBER] [--commit HASH]

It writes DIRECTORY/report.md and DIRECTORY/run-NUMBER.json. The record is committed to
`bench/records/gpu`, and README's GPU column and docs/performance are rendered from it.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.gpu.decisions import QUESTIONS
from bench.gpu.jobs import read_json, write_json
from bench.gpu.results import Decision, Results
from bench.report.gpu_runs import table

CAPABILITIES: Final[Mapping[str, Sequence[str]]] = {
    "group": ("arm-off", "arm-host"),
    "weights-version": ("pause",),
    "sharing-a-gpu": (),
    "sampling": (),
    "trees": (),
    "training": (),
    "prompt-kv": ("tests-kv_transfer",),
    "kv-reuse": ("tests-kv_transfer",),
    "shared-prefix-attention": ("arm-always", "arm-auto", "tests-engine"),
    "speculation": ("arm-siblings", "arm-drafter", "tests-speculation"),
    "lora-adapters": (),
    "cuda-graphs": ("tests-graphs",),
    "cluster": (),
    "security": (),
    "docker": (),
}
"""Processes of a run that show a capability of README's status table."""


def write(out: Path, run: int, commit: str = "") -> None:
    """Write the report and the record of a folder of results."""
    results = Results(out)
    found = record(results, run, [decide(results) for decide in QUESTIONS])
    found["commit"] = found["commit"] or commit
    write_json(out / f"run-{run}.json", found)
    text = page(found, jobs_of(results))
    (out / "report.md").write_text(text)
    print(text, flush=True)


def record(results: Results, run: int, decisions: Sequence[Decision]) -> dict[str, Any]:
    environment = results.json("environment.json")
    gpu, _, driver = next(iter(environment.get("machine", {}).get("gpus", [])), "").partition(", ")
    tests = tests_of(results)
    return {
        "run": run,
        "date": environment.get("date", ""),
        "commit": environment.get("commit", ""),
        "gpu": gpu.removeprefix("NVIDIA ") or "none: a rehearsal",
        "versions": environment.get("versions", {}) | ({"driver": driver} if driver else {}),
        "tests": tests,
        "capabilities": capabilities(results.on_gpu, jobs_of(results), tests),
        "figures": [asdict(decision) for decision in decisions],
    }


def tests_of(results: Results) -> dict[str, dict[str, int]]:
    """Counts of each file's tests, as `tests.gpu` reports them."""
    reports = [results.json(f"tests/{file.name}") for file in results.files("tests/*.json")]
    return {
        report["file"]: {kind: len(report[kind]) for kind in ("passed", "failed", "skipped")}
        for report in reports
    }


def jobs_of(results: Results) -> dict[str, dict[str, Any]]:
    """End of each process."""
    files: Iterable[dict[str, Any]] = map(read_json, results.files("jobs-*.json"))
    return {name: job for file in files for name, job in file.items()}


def capabilities(
    on_gpu: bool, jobs: Mapping[str, Mapping[str, Any]], tests: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, str]]:
    """Status of each capability: it ran if all its processes have ended without a failure."""
    found = {}
    for capability, names in CAPABILITIES.items():
        ended = [name for name in names if name in jobs and not _is_skipped(name, tests)]
        ended = ended if on_gpu else []
        failed = [name for name in ended if jobs[name]["status"] != "done"]
        status = "failed" if failed else "ran" if ended else "not run"
        what = "; ".join(_shown(name, jobs[name]["status"], tests) for name in ended)
        found[capability] = {"status": status, "what": what}
    return found


def _is_skipped(name: str, tests: Mapping[str, Mapping[str, int]]) -> bool:
    """True for a file of tests, all of which were skipped."""
    counts = tests.get(_file_of(name))
    return counts is not None and not counts["passed"] + counts["failed"]


def _file_of(name: str) -> str:
    return f"tests/gpu/{name.replace('tests-', 'test_')}.py"


def _shown(name: str, status: str, tests: Mapping[str, Mapping[str, int]]) -> str:
    """Evidence of a process, such as `arm always` or `11 of 12 tests of test_engine`."""
    counts = tests.get(_file_of(name))
    if counts:
        passed, failed = counts["passed"], counts["failed"]
        return f"{passed} of {passed + failed} tests of {name.replace('tests-', 'test_')}"
    engine = name.replace("arm-", "an engine in mode ").replace("pause", "publications of 8B")
    return engine if status == "done" else f"{engine} {status}"


def page(found: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]]) -> str:
    tests = [
        f"| {file} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |"
        for file, counts in found["tests"].items()
    ]
    ended = [f"| {name} | {job['status']} | {job['seconds']} |" for name, job in jobs.items()]
    return "\n".join(
        [
            f"# GPU run {found['run']}\n",
            table(found),
            "\n| tests | passed | failed | skipped |\n|---|---|---|---|",
            *tests,
            "\n| process | status | seconds |\n|---|---|---|",
            *ended,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--run", type=int, default=2)
    parser.add_argument("--commit", default="", help="that of a tree without a repository")
    given = parser.parse_args()
    write(given.directory, given.run, given.commit)


if __name__ == "__main__":
    main()
