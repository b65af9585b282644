"""Repeated runs of tests on a busy machine, to find races.

    python -m tests.stress [--times 20] [--load 4] PYTEST_ARGUMENTS

Every test runs `--times` times while `--load` processes keep the processors busy.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUSY = "while True: pass"


class Repetition:
    """A pytest plugin that runs each test several times."""

    def __init__(self, times: int) -> None:
        self._times = times

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(self._times), ids=lambda number: f"run{number}")


@contextmanager
def busy_processors(num_processes: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="runs of each test")
    parser.add_argument("--load", type=int, default=4, help="busy processes")
    options, arguments = parser.parse_known_args()
    with busy_processors(options.load):
        return int(pytest.main(["-q", *arguments], plugins=[Repetition(options.times)]))


if __name__ == "__main__":
    sys.exit(main())
