"""Client process of a benchmark: runs one rollout for each number it reads from stdin.

    python -m bench.harness.rollout_client_process URL

It imports neither torch nor vLLM, as a trainer's HTTP client would not.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

GROUPS, SAMPLES, TOKENS, PROMPT_TOKENS = 32, 8, 128, 64


class RolloutProcess:
    """Handle by which a benchmark requests rollouts from its client process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, number: int) -> tuple[float, int]:
        """Run one rollout; returns its seconds, measured in the client, and its response bytes."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{number}\n".encode())
        await self._process.stdin.drain()
        seconds, num_bytes = (await self._process.stdout.readline()).split()
        return float(seconds), int(num_bytes)


@asynccontextmanager
async def rollout_process(url: str) -> AsyncIterator[RolloutProcess]:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "bench.harness.rollout_client_process", url],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield RolloutProcess(process)
    finally:
        process.kill()
        await process.wait()


def prompts(number: int) -> list[list[int]]:
    """Prompts that differ in each run, so that none of them hits the prefix cache."""
    tail = [12] * (PROMPT_TOKENS - 2)
    return [[5 + (number + i) % 64, 5 + (number // 64) % 64, *tail] for i in range(GROUPS)]


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=None) as http:
        for line in sys.stdin:
            sampling = {"max_tokens": TOKENS, "ignore_eos": True}
            groups = [{"prompt": {"token_ids": p}, "n": SAMPLES} for p in prompts(int(line))]
            began = time.perf_counter()
            answer = http.post("/v1/rollouts", json={"groups": groups, "sampling": sampling})
            usage = answer.raise_for_status().json()["usage"]
            seconds = time.perf_counter() - began
            assert usage["num_generated_tokens"] == GROUPS * SAMPLES * TOKENS
            print(seconds, len(answer.content), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
