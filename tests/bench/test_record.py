"""Records name the machine, and are written to the given directory."""

from pathlib import Path

import pytest

from bench.harness.record import Record, Row, environment


def test_record_is_written_to_the_given_directory(tmp_path: Path) -> None:
    record = Record(name="one", claim="", rows=[Row(what="a", value="1")])
    assert record.write(tmp_path / "new") == tmp_path / "new" / "one.json"


@pytest.mark.parametrize(
    ("program", "found"),
    [("echo 'NVIDIA H200, 580.159.04'", ["NVIDIA H200, 580.159.04"]), ("echo no; exit 9", None)],
)
def test_record_names_the_gpus(
    program: str, found: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert environment("one")["machine"].get("gpus") == found
