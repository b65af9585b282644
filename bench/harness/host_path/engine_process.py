"""Process with an engine alone, which generates the samples of a load itself, without HTTP.

    python -m bench.harness.host_path.engine_process SIDE ARGUMENTS

SIDE is `vllm` for AsyncLLM, `ours` for this project's engine, or `ours-null` for the latter with
the null executor. ARGUMENTS are vLLM's engine arguments or the engine settings in JSON. It reads
and prints what `client_process` does.

AsyncLLM is used as documented: a call per group, token ids without text, only the final output.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from bench.harness.host_path.loads import Load

Generate = Callable[[Load, list[int]], Awaitable[int]]
"""Generates the samples of a group; returns the number of their tokens."""
NAMES = itertools.count()


async def run(generate: Generate, job: dict[str, Any]) -> None:
    load = Load(**job["load"])
    waves = [load.prompts() for _ in range(load.num_waves)]
    print(flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began, num_tokens = time.perf_counter(), 0
    for prompts in waves:
        num_tokens += sum(await asyncio.gather(*(generate(load, each) for each in prompts)))
    seconds = time.perf_counter() - began
    assert num_tokens == load.num_tokens, f"{num_tokens} tokens instead of {load.num_tokens}"
    print(json.dumps({"seconds": seconds, "num_bytes": 0, "p99_gap_seconds": None}), flush=True)


async def serve(side: str, arguments: dict[str, Any]) -> None:
    start = _async_llm if side == "vllm" else _our_engine
    generate, stop = await start(arguments)
    print(flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await run(generate, json.loads(line))
    await stop()


async def _async_llm(arguments: dict[str, Any]) -> tuple[Generate, Callable[[], Awaitable[None]]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(load: Load, prompt: list[int]) -> int:
        params = SamplingParams(
            n=load.group_size,
            max_tokens=load.max_tokens,
            ignore_eos=True,
            logprobs=load.logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(next(NAMES))
        [last] = [each async for each in llm.generate({"prompt_token_ids": prompt}, params, name)]
        return sum(len(sample.token_ids) for sample in last.outputs)

    async def stop() -> None:
        llm.shutdown()

    return generate, stop


async def _our_engine(arguments: dict[str, Any]) -> tuple[Generate, Callable[[], Awaitable[None]]]:
    from engine.settings import EngineSettings
    from engine.types.samples import SampleRequest, Sampling
    from engine.vllm_engine import VllmEngine

    engine = VllmEngine(EngineSettings(**arguments))
    await engine.start("v0")

    async def generate(load: Load, prompt: list[int]) -> int:
        sampling = Sampling(max_tokens=load.max_tokens, ignore_eos=True)
        samples = [
            SampleRequest(
                id=str(next(NAMES)),
                prompt_token_ids=prompt,
                sampling=sampling,
                num_top_logprobs=load.logprobs or 0,
                returns_logprobs=load.logprobs is not None,
                support=load.has_support,
            )
            for _ in range(load.group_size)
        ]
        completions = await asyncio.gather(*await engine.submit(samples))
        return sum(len(each.token_ids) for each in completions)

    return generate, engine.stop


def main() -> None:
    side, arguments = sys.argv[1:]
    if side == "ours-null":
        from bench.harness.host_path.null_server import use_null_executor

        use_null_executor()
    uvloop.run(serve(side, json.loads(arguments)))
    os._exit(0)  # without the reports of extension modules about leaked objects


if __name__ == "__main__":
    main()
