"""Runs the tests of third-party clients and records the version of each.

python -m tests.compat.record       writes the table of docs/trainers.md
"""

import datetime
import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainers.md"
BEGIN = "<!-- tested: written by python -m tests.compat.record -->"
END = "<!-- end -->"
HEAD = "| client | version | tested | by |\n|---|---|---|---|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A distribution, and the tests that run its code."""

    name: str
    tests: tuple[str, ...]

    @property
    def version(self) -> str:
        """The installed version, searched beside .venv first."""
        beside = [str(ROOT / name) for name in (".clients", ".verl", ".miles")]
        found = importlib.metadata.distributions(path=[*beside, *sys.path])
        return next(part.version for part in found if part.name == self.name)


CLIENTS = (
    Client(
        name="miles-rl",
        tests=(
            "tests/compat/with_ray.py::test_miles_attaches_updates_and_goes_on_where_it_aborted",
        ),
    ),
    Client(
        name="openai",
        tests=(
            "tests/compat/test_openai_client.py",
            "tests/compat/test_clients.py::test_openais_client_speaks_to_the_shipped_model",
        ),
    ),
    Client(
        name="renderers",
        tests=(
            "tests/compat/test_clients.py::"
            "test_renderers_draws_two_turns_without_making_tokens_anew",
        ),
    ),
    Client(
        name="trl",
        tests=(
            "tests/compat/test_clients.py::test_trl_trains_and_what_is_served_changes",
            "tests/compat/test_clients.py::test_trls_adapters_are_what_its_trainer_has",
        ),
    ),
    Client(
        name="verl",
        tests=(
            "tests/compat/with_ray.py::test_verls_trainers_train_and_every_step_is_served",
            "tests/compat/with_ray.py::test_verls_clients_go_on_where_an_update_aborted_them",
        ),
    ),
)


def named(client: Client) -> str:
    return ", ".join(f"`{test}`" for test in client.tests)


def table(day: str) -> str:
    rows = [f"| {client.name} | {client.version} | {day} | {named(client)} |" for client in CLIENTS]
    return HEAD + "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page's current table."""
    return page.partition(BEGIN)[2].partition(END)[0].strip("\n") + "\n"


def main() -> None:
    tests = [test for client in CLIENTS for test in client.tests]
    subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    day = datetime.date.today().isoformat()
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(day)}\n{END}{after}")


if __name__ == "__main__":
    main()
