"""Agents of OpenAI's agent SDK over the Responses API: a tool loop, handoffs and sub-agents.

Each argument is a scenario and the URL and key of its session, separated by commas.
"""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    HandoffInputData,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

ASKED = "Compute (2 + 3) + (4 + 5)."


@function_tool  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def calculator(model: Any) -> Any:
    return Agent(name="calculator", instructions="You are a calculator.", model=model, tools=[add])


def only_the_question(given: HandoffInputData) -> HandoffInputData:
    return given.clone(pre_handoff_items=(), new_items=())


def triage(model: Any, **options: Any) -> Any:
    return Agent(
        name="triage",
        instructions="You pass questions on.",
        model=model,
        handoffs=[handoff(calculator(model), **options)],
    )


def manager(model: Any) -> Any:
    sums = calculator(model).as_tool("calculate", "Computes one sum.")
    return Agent(name="manager", instructions="You delegate.", model=model, tools=[sums])


async def streamed(agent: Any) -> str:
    running = Runner.run_streamed(agent, ASKED)
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


async def cancelled_and_repeated(agent: Any) -> str:
    """Output of a second run; the first one is cancelled at its first text."""
    running = Runner.run_streamed(agent, ASKED)
    async for event in running.stream_events():
        if event.type == "raw_response_event" and event.data.type.endswith(".delta"):
            running.cancel()
    return await streamed(agent)


async def run(scenario: str, model: Any) -> str:
    match scenario:
        case "streamed":
            return await streamed(calculator(model))
        case "cancelled":
            return await cancelled_and_repeated(calculator(model))
        case "handoff":
            agent = triage(model)
        case "fresh_handoff":
            agent = triage(model, input_filter=only_the_question)
        case "sub_agents":
            agent = manager(model)
        case "whole":
            agent = calculator(model)
    return str((await Runner.run(agent, ASKED)).final_output)


async def main(given: list[str]) -> dict[str, str]:
    set_tracing_disabled(True)
    outputs = {}
    for scenario, url, key in (each.split(",") for each in given):
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            outputs[scenario] = await run(scenario, OpenAIResponsesModel("any", client))
    return outputs


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1:]))))
