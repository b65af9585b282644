"""Tables of the runs on a GPU, from their records in bench/records/gpu."""

import json
from collections.abc import Mapping
from typing import Any

from bench.harness.record import RECORDS

FOLDER = RECORDS / "gpu"
HEAD = """## On a GPU

Each run answers questions by criteria that were set before it."""


def section() -> str:
    """Section of the runs that have figures, the newest first; empty without one."""
    records = [json.loads(file.read_text()) for file in FOLDER.glob("run-*.json")]
    runs = sorted((each for each in records if each["figures"]), key=lambda each: -each["run"])
    tables = [f"### Run {each['run']}\n\n{table(each)}" for each in runs]
    return "\n\n".join([HEAD, *tables]) + "\n" if tables else ""


def table(record: Mapping[str, Any]) -> str:
    """Decisions of a run, with its GPU, its date and its versions."""
    versions = ", ".join(f"{name} {text}" for name, text in record["versions"].items() if text)
    lines = [
        f"| {each['question']} | {each['criterion']} | {each['figure']} | {each['answer']} |"
        for each in record["figures"]
    ]
    return "\n".join(
        [
            f"{record['gpu']}, {record['date']}, {versions}.\n",
            "| question | yes if | measured | decision |\n|---|---|---|---|",
            *lines,
        ]
    )
