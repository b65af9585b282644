"""Benchmark: whole groups of samples from this server, and from `vllm serve`, in turn.

Both servers run the same wheel, model, block size and KV cache on one machine; all others are idle
while one is measured. Requests are one per group: `/v1/completions` with `n` on both, and
`/v1/rollouts` on this server. All prompts are new, and all responses have their full length.

vLLM's server runs as its users start it, and with as many threads as this one: by default it leaves
one processor to its scheduler. A third one, in the case without shared prompts, has one process for
EngineCore and the worker, as this server.

In bfloat16, a processor with AMX runs vLLM's own attention in this server too, because
shared-prefix attention does not support the layout of its KV cache.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from bench.harness.group_requests import Arm, Case
from bench.harness.paired_runs import Pairs, Ratio, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from bench.harness.server_process import coppice_server, vllm_server
from engine.settings import EngineSettings

MAX_SEQUENCES, BATCHED_TOKENS, CACHE_BYTES, BLOCK = 64, 2048, 2**30, 32
SHARED_GOAL, UNSHARED_GOAL = 1.9, 1.5

CASES = {
    case.name: case
    for case in (
        Case(name="8 x 8 at 512", num_groups=8, group_size=8, prompt_tokens=512),
        Case(name="8 x 8 at 4096", num_groups=8, group_size=8, prompt_tokens=4096),
        Case(name="1 x 32 at 2048", num_groups=1, group_size=32, prompt_tokens=2048),
        Case(name="64 x 1 at 512", num_groups=64, group_size=1, prompt_tokens=512),
        Case(
            name="8 x 8 at 512, one group of 512 tokens",
            num_groups=8,
            group_size=8,
            prompt_tokens=512,
            num_long=1,
            long_tokens=512,
        ),
    )
}
UNSHARED: Final = "64 x 1 at 512"
STOCK: Final = "vllm serve"
EQUAL: Final = "vllm serve with our threads"


def coppice_options(settings: EngineSettings) -> dict[str, object]:
    names = ("model", "dtype", "seed", "block_size", "max_sequences", "max_batched_tokens")
    fields = (*names, "max_context_tokens", "cache_bytes")
    return {f"--engine.{name.replace('_', '-')}": getattr(settings, name) for name in fields}


def vllm_options(settings: EngineSettings) -> dict[str, object]:
    """Arguments of vLLM's server that correspond to these settings; the others are its defaults."""
    return {
        "--model": settings.model,
        "--dtype": settings.dtype,
        "--seed": settings.seed,
        "--block-size": settings.block_size,
        "--max-num-seqs": settings.max_sequences,
        "--max-num-batched-tokens": settings.max_batched_tokens,
        "--max-model-len": settings.max_context_tokens,
        "--kv-cache-memory-bytes": settings.cache_bytes,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }


def vllm_environments(settings: EngineSettings) -> dict[str, dict[str, str]]:
    """Variables of vLLM's servers. The second one has one thread per processor, as this server."""
    cpus = sorted(os.sched_getaffinity(0))
    return {
        STOCK: {},
        EQUAL: {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))},
    }


async def measure(settings: EngineSettings, cases: Sequence[Case], rounds: int) -> list[Arm]:
    async with AsyncExitStack() as stack:
        arms = await _start(stack, settings)
        for case in cases:
            runs: list[Callable[[], Awaitable[None]]] = [partial(arm.run, case) for arm in arms]
            await alternate(runs, rounds=rounds)
            print(case.name, {arm.name: arm.measured[case.name][-1] for arm in arms}, flush=True)
    return arms


async def _start(stack: AsyncExitStack, settings: EngineSettings) -> list[Arm]:
    model = settings.model
    url = await stack.enter_async_context(coppice_server(coppice_options(settings)))
    arms = [Arm(name="native", url=url, model=model, is_native=True)]
    arms.append(Arm(name="openai", url=url, model=model))
    for name, variables in vllm_environments(settings).items():
        server = vllm_server(vllm_options(settings), variables)
        arms.append(Arm(name=name, url=await stack.enter_async_context(server), model=model))
    return arms


def against(arm: Arm, baseline: Arm, case: str, quantity: str = "tokens_per_second") -> Ratio:
    return Pairs(a=arm.values(case, quantity), b=baseline.values(case, quantity)).ratio()


def _text(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def goal_of(case: Case) -> float:
    return SHARED_GOAL if case.group_size > 1 else UNSHARED_GOAL


def case_rows(case: Case, arms: Sequence[Arm]) -> list[Row]:
    native, openai, *servers = arms
    goal = goal_of(case)
    return [
        *(
            Row(
                what=f"{case.name}: tokens/s, {name} / {server.name}",
                value=_text(ratio := against(arm, server, case.name)),
                goal=f">= {goal}",
                verdict=ratio.verdict(goal),
            )
            for server in servers
            for name, arm in (("rollouts", native), ("our OpenAI route", openai))
        ),
        *(
            Row(
                what=f"{case.name}: time to a whole group, {server.name} / rollouts",
                value=_text(against(server, native, case.name, "group_seconds")),
            )
            for server in servers
        ),
        *(_medians(case, arm) for arm in arms),
    ]


def _medians(case: Case, arm: Arm) -> Row:
    rate, group, used = (
        statistics.median(arm.values(case.name, quantity))
        for quantity in ("tokens_per_second", "group_seconds", "processor_seconds")
    )
    return Row(
        what=f"{case.name}: {arm.name}",
        value=f"{rate:,.0f} tokens/s, a group in {group:.2f} s, {used:.1f} s of processor time",
    )


def threads_row(arms: Sequence[Arm]) -> Row:
    """Row that compares vLLM's server with itself, with as many threads as this server."""
    *_, stock, equal = arms
    return Row(
        what=f"{UNSHARED}: tokens/s, {equal.name} / {stock.name}",
        value=_text(against(equal, stock, UNSHARED)),
    )


def record(cases: Sequence[Case], arms: Sequence[Arm], dtype: str) -> Record:
    return Record(
        name="against_vllm_serve",
        claim="Whole groups over HTTP from this server and from `vllm serve`, with the same wheel, "
        f"model of 25M parameters in {dtype}, block size and KV cache. Groups x samples at prompt "
        "tokens, responses of 64 tokens.",
        rows=[
            *(row for case in cases for row in case_rows(case, arms)),
            *(threads_row(arms) for case in cases if case.name == UNSHARED),
        ],
        raw={
            arm.name: {name: list(map(asdict, runs[1:])) for name, runs in arm.measured.items()}
            for arm in arms
        },
    )


def with_context(model: Path, num_tokens: int) -> Path:
    """Set the context length in the model's config; positions have rotary embeddings."""
    file = model / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": num_tokens})
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each server and case, after one"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    add_out(parser)
    arguments = parser.parse_args()
    cases = [CASES[name] for name in arguments.cases]
    context = 1024 + max(case.prompt_tokens for case in cases)
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineSettings(
            model=str(with_context(enlarged_seedling(Path(folder)), context)),
            dtype=arguments.dtype,
            seed=0,
            block_size=BLOCK,
            max_sequences=MAX_SEQUENCES,
            max_batched_tokens=BATCHED_TOKENS,
            max_context_tokens=context,
            cache_bytes=CACHE_BYTES,
        )
        result = record(
            cases, uvloop.run(measure(settings, cases, arguments.rounds)), arguments.dtype
        )
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
