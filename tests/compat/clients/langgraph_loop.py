"""A calculator agent of LangChain, which runs on LangGraph, with langchain-openai's client.

Each argument is a scenario and the URL and key of its session, separated by commas.
"""

import asyncio
import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

ASKED = "Compute (2 + 3) + (4 + 5)."
INSTRUCTIONS = "You are a calculator."


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def run(scenario: str, url: str, key: str) -> str:
    """Text of the last response."""
    model = ChatOpenAI(
        model="any",
        base_url=url,
        api_key=key,
        max_retries=0,
        use_responses_api=scenario.startswith("responses"),
    )
    agent: Any = create_agent(model, tools=[add], system_prompt=INSTRUCTIONS)
    asked = {"messages": [{"role": "user", "content": ASKED}]}
    if scenario.endswith("streamed"):
        states = [
            state
            async for mode, state in agent.astream(asked, stream_mode=["values", "messages"])
            if mode == "values"
        ]
        return str(states[-1]["messages"][-1].text)
    return str((await agent.ainvoke(asked))["messages"][-1].text)


async def main(given: list[str]) -> dict[str, str]:
    return {each[0]: await run(*each) for each in (text.split(",") for text in given)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1:]))))
