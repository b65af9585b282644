"""Benchmark: cost of sampling controls, and throughput against vLLM's own server with the same.

Each control runs on three arms in turn: this service without the control, with it, and vLLM's
OpenAI server with it. Both servers have the same model, dtype, block size and limits, and return
the token ids and the log-probability of each token. Every response has the same number of tokens.
"""

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop

from bench.harness.in_process_service import running_service
from bench.harness.paired_runs import Pairs, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from bench.harness.server_process import vllm_server
from engine.settings import EngineSettings

GOAL = 0.97
GROUPS, SAMPLES, PROMPT_TOKENS, TOKENS = 4, 8, 128, 64
CONTROLS: dict[str, dict[str, Any]] = {
    "no control": {},
    "stop": {"stop": ["<never>", "<also never>"]},
    "min_p": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {str(token): 0.5 for token in range(20, 60)}},
    "allowed_token_ids": {"allowed_token_ids": list(range(10, 200))},
    "bad_words": {"bad_words": ["alpha", "beta", "gamma"]},
    "regex": {"structured_outputs": {"regex": "[0-9a-z +=-]{64,}"}},
    "json": {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
}
NUMBERS = itertools.count()
COMMON = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 1.0}


def prompts() -> list[list[int]]:
    """Prompts that no earlier run has used, so that none is cached."""
    draw = random.Random(next(NUMBERS))
    return [[draw.randrange(10, 200) for _ in range(PROMPT_TOKENS)] for _ in range(GROUPS)]


async def run_here(http: httpx.AsyncClient, control: dict[str, Any]) -> float:
    """Sampled tokens per second of one rollout."""
    groups = [{"prompt": {"token_ids": ids}, "n": SAMPLES} for ids in prompts()]
    began = time.perf_counter()
    answer = await http.post("/v1/rollouts", json={"groups": groups, "sampling": COMMON | control})
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    return int(answer.json()["usage"]["num_generated_tokens"]) / seconds


async def run_vllm(http: httpx.AsyncClient, model: Path, control: dict[str, Any]) -> float:
    rest = {"model": str(model), "n": SAMPLES, "logprobs": 0, "return_token_ids": True}
    bodies = [{"prompt": ids, **rest, **COMMON, **control} for ids in prompts()]
    began = time.perf_counter()
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    seconds = time.perf_counter() - began
    for answer in answers:
        answer.raise_for_status()
    return sum(int(a.json()["usage"]["completion_tokens"]) for a in answers) / seconds


def vllm_options(model: Path, settings: EngineSettings) -> dict[str, object]:
    """Arguments of vLLM's server that correspond to these settings."""
    return {
        "--model": model,
        "--dtype": settings.dtype,
        "--seed": settings.seed,
        "--block-size": settings.block_size,
        "--max-model-len": settings.max_context_tokens,
        "--max-num-seqs": settings.max_sequences,
        "--kv-cache-memory-bytes": settings.cache_bytes,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--structured-outputs-config.backend": "xgrammar",
        "--enforce-eager": None,
    }


async def measure(
    model: Path, names: list[str], rounds: int
) -> dict[str, tuple[list[float], list[float], list[float]]]:
    settings = EngineSettings(
        model=str(model),
        dtype="float32",
        seed=0,
        block_size=32,
        max_sequences=GROUPS * SAMPLES,
        max_context_tokens=PROMPT_TOKENS + 2 * TOKENS,
        cache_bytes=2**28,
    )
    async with (
        running_service(settings) as (_, url),
        vllm_server(vllm_options(model, settings)) as vllm_url,
        httpx.AsyncClient(base_url=url, timeout=600) as ours,
        httpx.AsyncClient(base_url=vllm_url, timeout=600) as theirs,
    ):
        return {name: await _arms(ours, theirs, model, CONTROLS[name], rounds) for name in names}


async def _arms(
    ours: httpx.AsyncClient,
    theirs: httpx.AsyncClient,
    model: Path,
    control: dict[str, Any],
    rounds: int,
) -> tuple[list[float], list[float], list[float]]:
    """Tokens per second without the control, with it, and of vLLM's server with it."""
    without, within, vllm = list[float](), list[float](), list[float]()

    async def plain() -> None:
        without.append(await run_here(ours, {}))

    async def controlled() -> None:
        within.append(await run_here(ours, control))

    async def baseline() -> None:
        vllm.append(await run_vllm(theirs, model, control))

    await alternate([plain, controlled, baseline], rounds=rounds)
    return without[1:], within[1:], vllm[1:]


def record(measured: dict[str, tuple[list[float], list[float], list[float]]]) -> Record:
    rows = list[Row]()
    for name, (without, within, vllm) in measured.items():
        cost, against = Pairs(a=within, b=without).ratio(), Pairs(a=within, b=vllm).ratio()
        rows += [
            Row(
                what=f"{name}: throughput with it / without",
                value=f"{cost.median:.3f} [{cost.low:.3f}, {cost.high:.3f}]",
            ),
            Row(
                what=f"{name}: throughput / that of vLLM's server",
                value=f"{against.median:.3f} [{against.low:.3f}, {against.high:.3f}]",
                goal=f"at least {GOAL}",
                verdict=against.verdict(GOAL),
            ),
        ]
    return Record(
        name="sampling_controls",
        claim=f"{GROUPS} groups of {SAMPLES}, prompts of {PROMPT_TOKENS} and responses of {TOKENS} "
        "tokens over HTTP, in float32 on a CPU: the cost of sampling controls, and throughput "
        "against vLLM's OpenAI server with the same control in the same run.",
        rows=rows,
        raw={name: list(arms) for name, arms in measured.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="default: the seedling, enlarged to 25M parameters"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--controls", nargs="+", choices=CONTROLS, default=list(CONTROLS))
    add_out(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or enlarged_seedling(Path(folder))
        measured = uvloop.run(measure(model, arguments.controls, arguments.rounds))
    result = record(measured)
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
