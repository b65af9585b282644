"""A calculator agent of OpenAI's agent SDK, over chat completions."""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


async def run(url: str, key: str, stream: str, asked: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    sums: list[int] = []

    @function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        sums.append(a + b)
        return a + b

    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        agent = Agent(
            name="calculator",
            instructions="You are a calculator.",
            model=OpenAIChatCompletionsModel(model="any", openai_client=client),
            tools=[add],
        )
        if stream == "streamed":
            running = Runner.run_streamed(agent, asked)
            async for _ in running.stream_events():
                pass
            return {"output": running.final_output, "sums": sums}
        result = await Runner.run(agent, asked)
    return {"output": result.final_output, "sums": sums}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(*sys.argv[1:]))))
