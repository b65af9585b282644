"""Runs the tests of third-party clients and records the version of each.

python -m tests.compat.record       writes the table of docs/migrate/index.md
"""

import datetime
import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrate" / "index.md"
BEGIN = "<!-- tested: written by python -m tests.compat.record -->"
END = "<!-- end -->"
ENVIRONMENTS = ("clients", "verl", "miles", "agent_sdk")
HEAD = "| client | version | tested | by |\n|---|---|---|---|\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A distribution, and the tests that run its code."""

    name: str
    tests: tuple[str, ...]

    @property
    def version(self) -> str:
        """The installed version. `@` begins the name of an npm package.

        Searched beside .venv first; in .verifiers last, which has other versions of some clients.
        """
        if self.name.startswith("@"):
            package = ROOT / ".codex_cli" / "node_modules" / self.name / "package.json"
            return str(json.loads(package.read_text())["version"])
        beside = [str(ROOT / f".{name}") for name in ENVIRONMENTS]
        paths = [*beside, *sys.path, str(ROOT / ".verifiers")]
        found = importlib.metadata.distributions(path=paths)
        return next(part.version for part in found if part.name == self.name)


SESSIONS = "tests/service/sessions"
CLIENTS = (
    Client(
        name="@openai/codex",
        tests=(f"{SESSIONS}/with_agent_programs.py::test_codex_runs_commands",),
    ),
    Client(
        name="anthropic",
        tests=(
            "tests/compat/test_anthropic_client.py",
            f"{SESSIONS}/test_harnesses.py::test_anthropic_tool_runner",
        ),
    ),
    Client(
        name="claude-agent-sdk",
        tests=(
            f"{SESSIONS}/with_agent_programs.py::test_claude_code_calls_tools",
            f"{SESSIONS}/with_agent_programs.py::test_claude_code_runs_sub_agents",
        ),
    ),
    Client(name="langchain-openai", tests=(f"{SESSIONS}/test_harnesses.py::test_langgraph",)),
    Client(name="langgraph", tests=(f"{SESSIONS}/test_harnesses.py::test_langgraph",)),
    Client(name="mcp", tests=(f"{SESSIONS}/test_harnesses.py::test_tool_loop_over_mcp",)),
    Client(
        name="miles-rl",
        tests=(
            "tests/compat/with_ray.py::test_miles_updates_weights_and_resumes_aborted_rollouts",
        ),
    ),
    Client(
        name="openai",
        tests=(
            "tests/compat/test_openai_client.py",
            "tests/compat/test_openai_responses.py",
            "tests/compat/test_clients.py::test_openai_client_chats_with_the_shipped_model",
        ),
    ),
    Client(
        name="openai-agents",
        tests=(
            f"{SESSIONS}/test_harnesses.py::test_openai_agents",
            f"{SESSIONS}/test_delegating_harnesses.py::test_openai_agents_over_responses",
        ),
    ),
    Client(
        name="renderers",
        tests=(
            "tests/compat/test_clients.py::test_renderers_samples_two_turns_without_retokenizing",
        ),
    ),
    Client(name="rllm-model-gateway", tests=(f"{SESSIONS}/test_harnesses.py::test_rllm_gateway",)),
    Client(
        name="trl",
        tests=(
            "tests/compat/test_clients.py::test_trl_trains_and_serves_the_updated_weights",
            "tests/compat/test_clients.py::test_trl_serves_the_adapters_of_its_trainer",
            "tests/compat/test_clients.py::test_trl_gets_the_top_logprobs_of_given_tokens_from_a_teacher",
            "tests/compat/test_clients.py::test_trl_distills_from_the_server_as_its_teacher",
            "tests/compat/test_clients.py::test_trl_distills_asynchronously",
            "tests/examples/test_trainers.py::test_trl_trains_and_every_step_is_served",
        ),
    ),
    Client(name="verifiers", tests=(f"{SESSIONS}/with_agent_programs.py::test_verifiers",)),
    Client(
        name="verl",
        tests=(
            "tests/compat/with_ray.py::test_verl_trainers_serve_every_training_step",
            "tests/compat/with_ray.py::test_verl_actor_computes_the_logprobs_of_truncated_samples",
            "tests/compat/with_ray.py::test_verl_trains_on_truncated_samples",
            "tests/compat/with_ray.py::test_verl_distills_from_the_server_as_its_teacher",
            "tests/compat/with_ray.py::test_verl_example_trains",
            "tests/compat/with_ray.py::test_verl_resumes_requests_aborted_by_an_update",
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
