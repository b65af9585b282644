"""The tools of verifiers_rollout, which verifiers serves over MCP in a process of their own."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    @vf.tool  # type: ignore[untyped-decorator]
    async def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


if __name__ == "__main__":
    Calculator.run()
