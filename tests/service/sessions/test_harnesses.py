"""Agents of other people's SDKs, whose tool loops must stay one path of one tree."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from mcp import Client
from mcp.server.mcpserver import MCPServer

from tests.compat.programs import install, run_client_program
from tests.service.sessions.agents import Agent, Trainer, training
from tests.service.sessions.scripted_engine import ScriptedEngine
from tests.service.sessions.template_families import FAMILIES, FamilyEngine, make_engine

pytestmark = pytest.mark.slow

ASKED = "Compute (2 + 3) + (4 + 5)."


def called(a: int, b: int) -> str:
    """A tool call with white space that JSON writers do not write."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"b":{b},   "a": {a}}}}}\n</tool_call>'


TEXTS = (
    f"<think>\nTwo sums, at once.\n</think>\n\nI begin.\n{called(2, 3)}\n{called(4, 5)}",
    f"<think>\nThe last one.\n</think>\n\n{called(5, 9)}",
    "<think>\nDone.\n</think>\n\nIt is 14.",
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    directory = tmp_path_factory.mktemp("family") / "qwen3"
    return make_engine(directory, FAMILIES["qwen3"], tool_parser="hermes", reasoning_parser="qwen3")


@dataclass(frozen=True)
class Harness:
    """A session for the agent under test, and the engine that records what was sampled."""

    trainer: Trainer
    agent: Agent
    engine: ScriptedEngine

    async def check(self, texts: Sequence[str] = TEXTS) -> None:
        """All samples are on one path, with the tokens and logprobs that the engine returned."""
        answer = await self.trainer.finish(self.agent, reward=1.0)
        reasons = [turn["reason"] for turn in answer["turns"]]
        assert reasons == ["new_conversation"] + ["extended"] * (len(texts) - 1)
        [group] = answer["groups"]
        assert len(group["leaves"]) == 1
        sampled = [part for part in group["segments"] if part.get("sampled", True)]
        calls = self.engine.script.calls
        assert [part["token_ids"] for part in sampled] == [call.token_ids for call in calls]
        for part, call in zip(sampled, calls, strict=True):
            assert part["logprobs"] == pytest.approx(call.logprobs)
        path = [token for part in group["segments"] for token in part["token_ids"]]
        assert group["prompt_token_ids"] + path == calls[-1].prompt + calls[-1].token_ids


@asynccontextmanager
async def harness(
    tmp_path: Path, family: FamilyEngine, texts: Sequence[str] = TEXTS
) -> AsyncIterator[Harness]:
    engine = ScriptedEngine(family, texts)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(sampling={"max_tokens": 200})
        yield Harness(trainer, agent, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_tool_runner(tmp_path: Path, family: FamilyEngine, stream: bool) -> None:
    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    async with (
        harness(tmp_path, family) as found,
        AsyncAnthropic(base_url=found.agent.url, api_key=found.agent.key, max_retries=0) as client,
    ):
        runner: Any = client.beta.messages.tool_runner(
            model="any",
            max_tokens=100,
            system="You are a calculator.",
            messages=[{"role": "user", "content": ASKED}],
            tools=[add],
            stream=stream,
        )
        last = await runner.until_done()
        assert last.content[-1].text.strip() == "It is 14."
        await found.check()


async def test_tool_loop_over_mcp(tmp_path: Path, family: FamilyEngine) -> None:
    server = MCPServer("calculator")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    async with (
        harness(tmp_path, family) as found,
        found.agent.openai() as speaker,
        Client(server) as tools,
    ):
        offered: Any = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in (await tools.list_tools()).tools
        ]
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        while True:
            answer = await speaker.chat.completions.create(
                model="any", messages=messages, tools=offered
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                assert call.type == "function"
                result: Any = await tools.call_tool(
                    call.function.name, json.loads(call.function.arguments)
                )
                text = result.content[0].text
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        assert [each["content"] for each in messages if each["role"] == "tool"] == ["5", "9", "14"]
        await found.check()


@pytest.mark.parametrize("stream", ["whole", "streamed"])
async def test_openai_agents(tmp_path: Path, family: FamilyEngine, stream: str) -> None:
    install("clients")
    async with harness(tmp_path, family) as found:
        arguments = (f"{found.agent.url}/v1", found.agent.key, stream, ASKED)
        printed = await asyncio.to_thread(
            run_client_program, ["clients"], "openai_agents_loop", *arguments
        )
        assert printed["output"].strip() == "It is 14."
        assert sorted(printed["sums"]) == [5, 9, 14]
        await found.check()
