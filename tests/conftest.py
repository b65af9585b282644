"""Collection of test files by `-m` expression, their order, and the process that runs them."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from engine.runtime import process_setup
from tests.sample_sizes import TIMES, num_examples

# No deadline: an example's duration depends on the load of the machine. Examples are the same in
# every run, so that a change cannot fail on code it did not touch. `make soak` draws others.
settings.register_profile(
    "unhurried",
    deadline=None,
    max_examples=num_examples(100),
    derandomize=TIMES < 1,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unhurried")

ROOT = Path(__file__).parents[1]
_NAMED = re.compile(r"\bmark\.(\w+)")
_OF_THE_FILE = re.compile(r"^pytestmark = (\[.*?\]|.*?)$", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without a matching mark: importing vLLM for deselected tests takes seconds."""
    asked: str = config.option.markexpr
    if not asked or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return None if any(_matches(asked, marks) for marks in _sets_of_marks(text)) else True


def pytest_collection() -> None:
    process_setup.disable_gc()


def pytest_collection_finish() -> None:
    process_setup.freeze_gc()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests marked `long` first, so that none runs last while other workers are idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


class FolderScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Assignment of whole files to processes, and of whole folders whose fixtures are shared."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """The file of a test, or its folder if that has fixtures of package scope.

    One process runs all tests of a unit: each process has its own fixtures.
    """
    file = Path(nodeid.partition("::")[0])
    return str(file.parent if has_package_fixtures(file.parent) else file)


@cache
def has_package_fixtures(folder: Path) -> bool:
    conftest = ROOT / folder / "conftest.py"
    return conftest.exists() and 'scope="package"' in conftest.read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FolderScheduling | None:
    return FolderScheduling(config, log) if config.option.dist == "loadfile" else None


def _sets_of_marks(text: str) -> Iterator[set[str]]:
    """Mark sets that a test of this file may have: the module's plus a subset of those named."""
    own = {name for marks in _OF_THE_FILE.findall(text) for name in _NAMED.findall(marks)}
    others = sorted(set(_NAMED.findall(text)) - own)
    for count in range(len(others) + 1):
        for some in combinations(others, count):
            yield own | set(some)


def _matches(asked: str, marks: set[str]) -> bool:
    """Evaluates a mark expression: names, `and`, `or`, `not` and brackets are valid Python."""
    names = {name: name in marks for name in re.findall(r"\w+", asked)}
    words = {"and", "or", "not"}
    return bool(eval(asked, {}, {n: v for n, v in names.items() if n not in words}))
