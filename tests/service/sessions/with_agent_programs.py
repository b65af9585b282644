"""Agents that are large programs or start many processes: run by `make soak`, not by `make test`.

python -m pytest tests/service/sessions/with_agent_programs.py
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.programs import ROOT, install, run_client_program
from tests.service.sessions.harness import (
    ASKED,
    TEXTS,
    Harness,
    added,
    by_results,
    called,
    harness,
    harnesses,
    thought,
)
from tests.service.sessions.template_families import FAMILIES, FamilyEngine, make_engine

ADD, RESULT = "mcp__calculator__add", "<tool_response>\n"
SUB_AGENT = "You add two numbers."


@pytest.fixture
def agent_sdk() -> None:
    install("agent_sdk")


@pytest.fixture
def codex_cli() -> None:
    if shutil.which("npm") is None:
        pytest.skip("no npm, which installs the Codex CLI: install Node.js")
    install("codex_cli")


@pytest.fixture
def verifiers() -> None:
    install("verifiers")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    """A context for the programs' instructions, whose characters are tokens."""
    return make_engine(
        tmp_path_factory.mktemp("family") / "qwen3",
        FAMILIES["qwen3"],
        max_context_tokens=2**18,
        tool_parser="hermes",
        reasoning_parser="qwen3",
    )


async def run_claude(found: Harness, folder: Path) -> str:
    arguments = (found.agent.url, found.agent.key, str(folder), ASKED)
    printed = await asyncio.to_thread(
        run_client_program, ["agent_sdk"], "claude_agent_loop", *arguments, seconds=300
    )
    return str(printed["output"]).strip()


async def run_codex(found: Harness, folder: Path) -> str:
    """Last message of the Codex CLI, which runs commands in `folder`."""
    settings = {
        "model": '"any"',
        "model_provider": '"coppice"',
        "model_providers.coppice.name": '"coppice"',
        "model_providers.coppice.base_url": f'"{found.agent.url}/v1"',
        "model_providers.coppice.env_key": '"SESSION_KEY"',
        "model_providers.coppice.wire_api": '"responses"',
        "web_search": '"disabled"',
        "features.multi_agent": "false",
    }
    home, output = folder / "codex", folder / "output.txt"
    home.mkdir()
    running = await asyncio.create_subprocess_exec(
        str(ROOT / ".codex_cli" / "node_modules" / ".bin" / "codex"),
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("--output-last-message", str(output)),
        *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
        ASKED,
        cwd=folder,
        env={
            **os.environ,
            "CODEX_HOME": str(home),
            "HOME": str(folder),
            "SESSION_KEY": found.agent.key,
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(300):
        printed, _ = await running.communicate()
    assert running.returncode == 0, printed.decode()[-6000:]
    return output.read_text().strip()


def by_results_with(tool: str) -> Callable[[str], str]:
    """Samples of a tool loop whose tool has the given name."""
    return lambda prompt: by_results(prompt).replace('"add"', f'"{tool}"')


@pytest.mark.usefixtures("agent_sdk")
async def test_claude_code_calls_tools(tmp_path: Path, family: FamilyEngine) -> None:
    async with harness(tmp_path, family, by_results_with(ADD)) as found:
        assert await run_claude(found, tmp_path) == "It is 14."
        await found.check()


@pytest.mark.usefixtures("agent_sdk")
async def test_claude_code_runs_sub_agents(tmp_path: Path, family: FamilyEngine) -> None:
    def task(numbers: str) -> str:
        arguments = f'{{"subagent_type": "adder",  "description": "Add", "prompt": "{numbers}"}}'
        return called("Agent", arguments)

    def script(prompt: str) -> str:
        num_results = prompt.count(RESULT)
        if SUB_AGENT in prompt:
            sums = added(2, 3) if "2 + 3" in prompt else added(4, 5)
            return thought("It is added." if num_results else sums.replace('"add"', f'"{ADD}"'))
        return TEXTS[2] if num_results else thought(f"{task('2 + 3')}\n{task('4 + 5')}")

    async with harness(tmp_path, family, script) as found:
        assert await run_claude(found, tmp_path) == "It is 14."
        answer = await found.check_samples(("new_conversation", "extended") * 3)
        assert sum(len(group["leaves"]) for group in answer["groups"]) == 3


@pytest.mark.usefixtures("codex_cli")
async def test_codex_runs_commands(tmp_path: Path, family: FamilyEngine) -> None:
    def script(prompt: str) -> str:
        """The program adds the time to the results, so they are counted."""
        commands = ((2, 3), (4, 5)), ((5, 9),), ()
        num_results = prompt.count(RESULT)
        runs = commands[{0: 0, 2: 1, 3: 2}[num_results]]
        calls = [called("exec_command", f'{{"cmd":  "expr {a} + {b} >> sums"}}') for a, b in runs]
        return thought("\n".join(calls) or "It is 14.")

    async with harness(tmp_path, family, script) as found:
        assert await run_codex(found, tmp_path) == "It is 14."
        assert sorted((tmp_path / "sums").read_text().split()) == ["14", "5", "9"]
        await found.check()


@pytest.mark.usefixtures("verifiers")
async def test_verifiers(tmp_path: Path, family: FamilyEngine) -> None:
    """Rollouts that run at the same time, each with a tool server of its own."""
    async with harnesses(tmp_path, family, by_results_with("calculator_add"), n=2) as found:
        sessions = [f"{each.agent.url}/v1,{each.agent.key}" for each in found]
        printed = await asyncio.to_thread(
            run_client_program,
            ["verifiers"],
            "verifiers_rollout",
            ASKED,
            *sessions,
            variables={"HOME": str(tmp_path)},
        )
        for rollout in printed:
            assert rollout == {**rollout, "reward": 1, "num_branches": 1, "errors": []}
            assert rollout["output"].strip() == "It is 14."
        for each in found:
            await each.check()
