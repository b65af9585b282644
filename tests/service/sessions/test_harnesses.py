"""Agents of other people's SDKs, whose tool loops must stay one path of one tree."""

import asyncio
import json
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from mcp import Client
from mcp.server.mcpserver import MCPServer

from engine.types.samples import Completion, SampleRequest
from tests.compat.programs import install, run_client_program
from tests.service.sessions.agents import training
from tests.service.sessions.harness import (
    ASKED,
    Harness,
    added,
    by_results,
    harness,
    harnesses,
    thought,
)
from tests.service.sessions.scripted_engine import Script, ScriptedEngine
from tests.service.sessions.template_families import FAMILIES, FamilyEngine, make_engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    directory = tmp_path_factory.mktemp("family") / "qwen3"
    return make_engine(directory, FAMILIES["qwen3"], tool_parser="hermes", reasoning_parser="qwen3")


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


@pytest.mark.parametrize(
    "stream", ["whole", pytest.param("streamed", marks=pytest.mark.exhaustive)]
)
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


@pytest.mark.exhaustive
async def test_rllm_gateway(tmp_path: Path, family: FamilyEngine) -> None:
    """The gateway in front of the server, and in front of a session; its traces have all tokens."""
    install("clients")
    async with harnesses(tmp_path, family, by_results, n=2) as found:
        paths = {"server": ("/v1", "EMPTY"), "server_streamed": ("/v1", "EMPTY")}
        for name, each in zip(("session", "session_streamed"), found, strict=True):
            paths[name] = (f"/sessions/{each.agent.id}/v1", each.agent.key)
        arguments = [",".join((name, *given)) for name, given in paths.items()]
        printed = await asyncio.to_thread(
            run_client_program,
            ["clients"],
            "rllm_gateway",
            found[0].trainer.served.url,
            *arguments,
        )
        assert {name: run["output"].strip() for name, run in printed.items()} == dict.fromkeys(
            paths, "It is 14."
        )
        traces = [trace for name in paths for trace in printed[name]["traces"]]
        sampled = found[0].sampled
        assert len(traces) == len(sampled) == 3 * len(paths)
        for trace, call in zip(traces, sampled, strict=True):
            assert (trace["prompt"], trace["token_ids"]) == (call.prompt, call.token_ids)
            assert trace["logprobs"] == pytest.approx(call.logprobs)
        for each in found:
            await each.check()


@pytest.mark.exhaustive
async def test_langgraph(tmp_path: Path, family: FamilyEngine) -> None:
    install("clients")
    scenarios = ("chat", "chat_streamed", "responses", "responses_streamed")
    async with harnesses(tmp_path, family, by_results, n=len(scenarios)) as found:
        arguments = [
            f"{name},{each.agent.url}/v1,{each.agent.key}"
            for name, each in zip(scenarios, found, strict=True)
        ]
        printed = await asyncio.to_thread(
            run_client_program, ["clients"], "langgraph_loop", *arguments
        )
        assert {name: printed[name].strip() for name in printed} == dict.fromkeys(
            scenarios, "It is 14."
        )
        for each in found:
            await each.check()


class GatedEngine(ScriptedEngine):
    """Samples whose tokens are delivered at once, and that end when `gate` is set."""

    def __init__(self, family: FamilyEngine, script: Script) -> None:
        super().__init__(family, script)
        self.gate = asyncio.Event()

    async def submit(self, samples: Sequence[SampleRequest]) -> list[Awaitable[Completion]]:
        return [self._gated(each) for each in await super().submit(samples)]

    async def _gated(self, completion: Awaitable[Completion]) -> Completion:
        await self.gate.wait()
        return await completion


CALL_AFTER_TEXT = (thought(f"I begin.\n\n{added(2, 3)}"), thought("It is 5."))
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}


async def test_streamed_response_with_text_before_a_call_is_continued(
    tmp_path: Path, family: FamilyEngine
) -> None:
    engine = GatedEngine(family, CALL_AFTER_TEXT)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(sampling={"max_tokens": 200})
        speaker = agent.openai()
        items: list[Any] = [{"role": "user", "content": ASKED}]
        for _ in CALL_AFTER_TEXT:
            output: list[Any] = []
            async for event in await speaker.responses.create(
                model="any", input=items, tools=[ADD], store=False, stream=True
            ):
                if event.type == "response.function_call_arguments.delta":
                    engine.gate.set()
                if event.type == "response.output_item.done":
                    output.append(event.item.model_dump(exclude_none=True))
            calls = [item for item in output if item["type"] == "function_call"]
            items += output
            items += [
                {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
                for call in calls
            ]
        await speaker.close()
        await Harness(trainer, agent, engine.sampled).check(num_calls=2)
