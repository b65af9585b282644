"""Benchmark: overhead of rollouts over HTTP, against direct calls of vLLM's AsyncLLM.

Both arms use one engine in one service process, so threads, preloads and process layout are
identical. The HTTP client is a separate process, as a trainer is. The direct arm uses AsyncLLM as
documented: one call per group, n samples, only the final output, no detokenisation.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field

import uvloop
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.harness.in_process_service import running_service
from bench.harness.paired_runs import Pairs, alternate
from bench.harness.record import Record, Row, add_out
from bench.harness.rollout_client_process import GROUPS, SAMPLES, TOKENS, prompts, rollout_process
from engine.settings import EngineSettings
from engine.vllm_engine import VllmEngine

GOAL = 0.97


@dataclass(slots=True)
class Arm:
    """Throughput, CPU time of the service and response size of each run of one arm."""

    tokens_per_second: list[float] = field(default_factory=list)
    cpu_milliseconds: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def add(self, seconds: float, cpu_seconds: float, num_bytes: int = 0) -> None:
        thousands = GROUPS * SAMPLES * TOKENS / 1000
        self.tokens_per_second.append(1000 * thousands / seconds)
        self.cpu_milliseconds.append(1000 * cpu_seconds / thousands)
        self.num_bytes.append(round(num_bytes / thousands))


async def measure(model: str, rounds: int) -> tuple[Arm, Arm]:
    http, direct = Arm(), Arm()
    numbers = iter(range(1, 10**6))
    settings = EngineSettings(model=model, seed=0, max_sequences=GROUPS * SAMPLES)
    async with running_service(settings) as (engine, url), rollout_process(url) as trainer:

        async def over_http() -> None:
            cpu = time.process_time()
            seconds, num_bytes = await trainer.run(next(numbers))
            http.add(seconds, time.process_time() - cpu, num_bytes)

        async def straight() -> None:
            cpu, began = time.process_time(), time.perf_counter()
            groups = prompts(next(numbers))
            outputs = await asyncio.gather(*(generate(engine, group) for group in groups))
            direct.add(time.perf_counter() - began, time.process_time() - cpu)
            assert sum(outputs) == GROUPS * SAMPLES * TOKENS

        await alternate([over_http, straight], rounds=rounds)
    for arm in (http, direct):
        for values in (arm.tokens_per_second, arm.cpu_milliseconds, arm.num_bytes):
            del values[0]  # the warm-up
    return http, direct


async def generate(engine: VllmEngine, prompt: list[int]) -> int:
    params = SamplingParams(
        n=SAMPLES,
        max_tokens=TOKENS,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    request_id = f"direct-{time.monotonic_ns()}"
    outputs = engine.llm.generate({"prompt_token_ids": prompt}, params, request_id)
    (last,) = [output async for output in outputs]
    return sum(len(sample.token_ids) for sample in last.outputs)


def record(http: Arm, direct: Arm) -> Record:
    ratio = Pairs(a=http.tokens_per_second, b=direct.tokens_per_second).ratio()

    def both(what: str, values: tuple[list[float], list[float]], unit: str) -> Row:
        medians = [f"{statistics.median(side):,.1f}" for side in values]
        return Row(what=what, value=f"HTTP {medians[0]}, direct {medians[1]} {unit}")

    return Record(
        name="service_overhead",
        claim=f"{GROUPS} groups of {SAMPLES}, {TOKENS} tokens each, over HTTP and directly with "
        "AsyncLLM.",
        rows=[
            Row(
                what="throughput, HTTP / direct",
                value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                goal=f">= {GOAL}",
                verdict=ratio.verdict(GOAL),
            ),
            both("throughput", (http.tokens_per_second, direct.tokens_per_second), "tokens/s"),
            both(
                "service CPU time per 1,000 tokens",
                (http.cpu_milliseconds, direct.cpu_milliseconds),
                "ms",
            ),
            Row(
                what="response size per 1,000 tokens",
                value=f"{statistics.median(http.num_bytes):,} bytes",
            ),
        ],
        raw={"http": http.tokens_per_second, "direct": direct.tokens_per_second},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", metavar="URL", help="run as the client (internal)")
    parser.add_argument("--model", default=EngineSettings().model)
    parser.add_argument("--rounds", type=int, default=9)
    add_out(parser)
    arguments = parser.parse_args()
    result = record(*uvloop.run(measure(arguments.model, arguments.rounds)))
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
