"""Claude's agent SDK, which runs the Claude Code program: a tool loop, or parallel sub-agents."""

import asyncio
import json
import sys
from typing import Any

from claude_agent_sdk import (
    AgentDefinition,
    ClaudeAgentOptions,
    ResultMessage,
    create_sdk_mcp_server,
    query,
    tool,
)

ADD = "mcp__calculator__add"


@tool("add", "Adds two numbers.", {"a": int, "b": int})  # type: ignore[untyped-decorator]
async def add(given: dict[str, int]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}]}


def options(url: str, key: str, folder: str) -> Any:
    """Options of a run that uses the session only, and writes below `folder`."""
    adder = AgentDefinition(description="Adds.", prompt="You add two numbers.", tools=[ADD])
    return ClaudeAgentOptions(
        model="any",
        cwd=folder,
        mcp_servers={"calculator": create_sdk_mcp_server("calculator", tools=[add])},
        strict_mcp_config=True,
        allowed_tools=[ADD, "Task"],
        agents={"adder": adder},
        setting_sources=[],
        env={
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
            "CLAUDE_CONFIG_DIR": f"{folder}/claude",
            "HOME": folder,
            "IS_SANDBOX": "1",
        },
    )


async def run(url: str, key: str, folder: str, asked: str) -> str | None:
    result = None
    async for message in query(prompt=asked, options=options(url, key, folder)):
        if isinstance(message, ResultMessage):
            result = message.result
    return result


if __name__ == "__main__":
    print(json.dumps({"output": asyncio.run(run(*sys.argv[1:]))}))
