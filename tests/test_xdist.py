"""Distribution of tests among the processes of pytest-xdist."""

from tests.conftest import unit_of


def test_modules_that_share_fixtures_run_in_one_process() -> None:
    folder = "tests/engine/default_engine"
    for name in ("test_bounds", "test_trees"):
        assert unit_of(f"{folder}/{name}.py::test_request[a::b]") == folder


def test_other_tests_are_distributed_by_file() -> None:
    assert unit_of("tests/engine/test_sleep.py::test_x[1]") == "tests/engine/test_sleep.py"
