"""pytest plugin that writes the outcome of each test at once, for `tests.gpu.runner`."""

import json
import os
from typing import Any, Final

import pytest

REPORT: Final = "COPPICE_TEST_REPORT"
"""Variable with the file that receives one JSON object per line."""


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(collected=[item.nodeid for item in session.items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(test=report.nodeid, outcome="failed", reason=report.longreprtext)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what is known after this phase. A test has passed if there is no other outcome."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _write(test=report.nodeid, outcome="skipped", reason=report.longrepr[2])
    elif report.failed:
        _write(test=report.nodeid, outcome="failed", reason=report.longreprtext)
    elif report.when == "teardown":
        _write(test=report.nodeid, outcome="passed", reason="")


def pytest_sessionfinish() -> None:
    _write(is_complete=True)


def _write(**entry: Any) -> None:
    with open(os.environ[REPORT], "a") as file:
        file.write(json.dumps(entry) + "\n")
