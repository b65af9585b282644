"""Requests for whole groups of samples, to this server or to vLLM's, and what they take."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.harness.server_process import processor_seconds

NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Groups of one run. The first `num_long` groups have responses of `long_tokens` tokens."""

    name: str
    num_groups: int
    group_size: int
    prompt_tokens: int
    max_tokens: int = 64
    num_long: int = 0
    long_tokens: int = 0

    def lengths(self) -> list[int]:
        short = self.num_groups - self.num_long
        return [self.long_tokens] * self.num_long + [self.max_tokens] * short

    def prompts(self) -> list[list[int]]:
        """Prompts that no earlier run has used, so that none is cached."""
        draw = random.Random(next(NUMBERS))
        return [
            [draw.randrange(10, 200) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_groups)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of a case. `group_seconds` is the median time until a group has all its samples."""

    tokens_per_second: float
    group_seconds: float
    processor_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One server and one of its routes."""

    name: str
    url: str
    model: str
    is_native: bool = False
    measured: dict[str, list[Measurement]] = field(default_factory=dict)

    async def run(self, case: Case) -> None:
        requests = zip(case.prompts(), case.lengths(), strict=True)
        path = "/v1/rollouts" if self.is_native else "/v1/completions"
        bodies = [self.body(prompt, case.group_size, length) for prompt, length in requests]
        used = processor_seconds(self.url)
        async with httpx.AsyncClient(base_url=self.url, timeout=600) as http:
            began = time.perf_counter()
            groups = await asyncio.gather(*(_timed(http, path, body) for body in bodies))
        seconds = time.perf_counter() - began
        num_tokens = sum(map(generated_tokens, (answer for answer, _ in groups)))
        assert num_tokens == case.group_size * sum(case.lengths()), "responses have full length"
        self.measured.setdefault(case.name, []).append(
            Measurement(
                tokens_per_second=num_tokens / seconds,
                group_seconds=statistics.median(took for _, took in groups),
                processor_seconds=processor_seconds(self.url) - used,
            )
        )

    def body(self, prompt: Sequence[int], n: int, length: int) -> dict[str, Any]:
        sampling = {"max_tokens": length, "min_tokens": length, "temperature": 1.0}
        if self.is_native:
            return {"groups": [{"prompt": {"token_ids": prompt}, "n": n}], "sampling": sampling}
        named = {"model": self.model, "prompt": prompt, "n": n}
        return {**named, "logprobs": 0, "return_token_ids": True, **sampling}

    def values(self, case: str, quantity: str) -> list[float]:
        """Values of all runs but the first, which is the warm-up."""
        return [float(getattr(run, quantity)) for run in self.measured[case][1:]]


async def _timed(http: httpx.AsyncClient, path: str, body: Any) -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    answer = await http.post(path, json=body)
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    return answer.json(), seconds


def generated_tokens(answer: Mapping[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage.get("num_generated_tokens") or usage["completion_tokens"])
