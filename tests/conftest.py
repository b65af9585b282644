"""Which test files are read for `-m`, and which of their tests begin first."""

import os
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from engine.runtime import gc_freeze

# How long an example takes says how busy the machine is. The same examples every time: a change is
# not to fail for what it did not touch. `make soak` draws others.
settings.register_profile(
    "unhurried",
    deadline=None,
    derandomize="COPPICE_DRAWS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unhurried")

_NAMED = re.compile(r"\bmark\.(\w+)")
_OF_THE_FILE = re.compile(r"^pytestmark = (\[.*?\]|.*?)$", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What cannot be asked for is not read: to import vLLM for tests left out takes seconds."""
    asked: str = config.option.markexpr
    if not asked or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if any(_matches(asked, marks) for marks in _sets_of_marks(text)) else True


def pytest_collection() -> None:
    gc_freeze.disable_gc()


def pytest_collection_finish() -> None:
    gc_freeze.freeze_gc()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes first, lest it ends alone while another process has nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _sets_of_marks(text: str) -> Iterator[set[str]]:
    """All that a test of this file may have: the file's own, and any of those that it names."""
    own = {name for marks in _OF_THE_FILE.findall(text) for name in _NAMED.findall(marks)}
    others = sorted(set(_NAMED.findall(text)) - own)
    for count in range(len(others) + 1):
        for some in combinations(others, count):
            yield own | set(some)


def _matches(asked: str, marks: set[str]) -> bool:
    """`asked` is names, `and`, `or`, `not` and brackets: Python that means the same."""
    names = {name: name in marks for name in re.findall(r"\w+", asked)}
    words = {"and", "or", "not"}
    return bool(eval(asked, {}, {n: v for n, v in names.items() if n not in words}))
