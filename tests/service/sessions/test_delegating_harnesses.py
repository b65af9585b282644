"""Agents of other people's SDKs with several conversations per session: sub-agents and retries."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.compat.programs import install, run_client_program
from tests.service.sessions.harness import ASKED, TEXTS, added, called, harnesses, thought
from tests.service.sessions.scripted_engine import Unfinished
from tests.service.sessions.template_families import FAMILIES, FamilyEngine, make_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    directory = tmp_path_factory.mktemp("family") / "qwen3"
    return make_engine(directory, FAMILIES["qwen3"], tool_parser="hermes", reasoning_parser="qwen3")


def results(*outputs: str) -> str:
    """Results of tool calls, as the chat template writes them."""
    return "\n".join(f"<tool_response>\n{output}\n</tool_response>" for output in outputs)


SAMPLES = {
    ASKED: TEXTS[0],
    results("5", "9"): TEXTS[1],
    results("14"): TEXTS[2],
    results('{"assistant": "calculator"}'): TEXTS[0],
    "2 + 3": thought(added(2, 3)),
    "4 + 5": thought(added(4, 5)),
    results("5"): thought("It is 5."),
    results("9"): thought("It is 9."),
    results("It is 5.", "It is 9."): thought("It is 14."),
}
DELEGATED = "\n".join(
    called("calculate", f'{{"input":   "{each}"}}') for each in ("2 + 3", "4 + 5")
)


@dataclass
class Policy:
    """Samples by the instructions and the last message of a prompt."""

    interrupted: list[str] = field(default_factory=list)

    def __call__(self, prompt: str) -> str:
        last = re.sub(r"\n+", "\n", prompt.split("<|im_start|>")[-2])
        last = last.removesuffix("<|im_end|>\n").partition("\n")[2]
        if last == ASKED and "You pass questions on." in prompt:
            return thought(called("transfer_to_calculator", "{ }"))
        if last == ASKED and "You delegate." in prompt:
            return thought(DELEGATED)
        if "You are interrupted." in prompt and not self.interrupted:
            self.interrupted.append(prompt)
            return Unfinished(TEXTS[0])
        return SAMPLES[last]


CHAIN = ("new_conversation", "extended", "extended")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Reasons of the turns, and the number of leaves of each tree."""

    reasons: Sequence[str] = CHAIN
    num_leaves: Sequence[int] = (1,)


SCENARIOS = {
    "whole": Expected(),
    "streamed": Expected(),
    "cancelled": Expected(
        reasons=("new_conversation", "retry", "extended", "extended"), num_leaves=(2,)
    ),
    "handoff": Expected(
        reasons=("new_conversation", "edited_history", "extended", "extended"), num_leaves=(1, 1)
    ),
    "fresh_handoff": Expected(reasons=("new_conversation", *CHAIN), num_leaves=(1, 1)),
    "sub_agents": Expected(
        reasons=("new_conversation", "extended") * 3,
        num_leaves=(1, 2),  # the sub-agents have the same instructions and tools
    ),
}


@pytest.mark.exhaustive
async def test_openai_agents_over_responses(tmp_path: Path, family: FamilyEngine) -> None:
    install("clients")
    async with harnesses(tmp_path, family, Policy(), n=len(SCENARIOS)) as found:
        given = zip(SCENARIOS, (each.agent for each in found), strict=True)
        arguments = [f"{name},{agent.url}/v1,{agent.key}" for name, agent in given]
        outputs = await asyncio.to_thread(
            run_client_program, ["clients"], "openai_agents_responses", *arguments
        )
        assert {name: outputs[name].strip() for name in outputs} == dict.fromkeys(
            SCENARIOS, "It is 14."
        )
        for harness, expected in zip(found, SCENARIOS.values(), strict=True):
            answer = await harness.check_samples(expected.reasons)
            assert [len(group["leaves"]) for group in answer["groups"]] == [*expected.num_leaves]
            assert {turn["api"] for turn in answer["turns"]} == {"responses"}
