"""Rollouts of a verifiers agent with tools, each in an agent session, at the same time.

Arguments: the question, and the URL and key of each session, separated by commas.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harnesses import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

from tests.compat.clients.verifiers_tools import Calculator


class Sums(vf.Task):  # type: ignore[misc]
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward  # type: ignore[untyped-decorator]
    async def is_right(self, trace: Any) -> float:
        return float("14" in (trace.last_reply or ""))


class InstalledHarness(NullHarness):  # type: ignore[misc]
    """The null harness with the installed packages: its own program, which uv would install for."""

    async def setup(self, runtime: Any) -> None:
        await runtime.write("program.py", CHAT_PROGRAM_SOURCE.encode())

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system_prompt, prompt = self.resolve_prompt(data)
        servers = {name: {"url": url, "timeout": 60} for name, url in mcp_urls.items()}
        arguments = {
            "base-url": endpoint,
            "api-key": secret,
            "model": ctx.model,
            "system-prompt": system_prompt,
            "mcp-config": json.dumps({"mcpServers": servers}),
            "prompt": prompt,
        }
        given = (f"--{name}={value}" for name, value in arguments.items())
        return await runtime.run_program([sys.executable, "program.py", *given], {})


async def rollout(question: str, url: str, key: str) -> dict[str, Any]:
    variable = f"SESSION_{Path(url).parent.name}"
    os.environ[variable] = key
    agent = vf.Agent(
        vf.AgentConfig(
            harness=NullHarnessConfig(id="null"),
            runtime=vf.SubprocessConfig(),
            model="any",
            client=vf.EvalClientConfig(base_url=url, api_key_var=variable),
        )
    )
    agent.harness = InstalledHarness(agent.harness.config)
    data = vf.TaskData(prompt=question, system_prompt="You are a calculator.")
    async with agent:
        trace = await agent.run(Sums(data, vf.TaskConfig()))
    return {
        "reward": trace.reward,
        "output": trace.last_reply,
        "num_branches": len(trace.branches),
        "errors": [str(error) for error in trace.errors],
    }


async def main(question: str, *sessions: str) -> list[dict[str, Any]]:
    return await asyncio.gather(*(rollout(question, *each.split(",")) for each in sessions))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
