"""Benchmark: `vllm bench serve` against this server, and against vLLM's own server, in turn.

Both servers run on the same machine with the same model, context, batch, KV cache and threads; one
is idle while the other is measured. The client is vLLM's benchmark, with its prefix repetition
dataset over the OpenAI routes: by default no two prompts share a prefix. It measures the time to
first token and the times between tokens of streams.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.paired_runs import Pairs, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from bench.harness.server_process import coppice_server, vllm_server

GOAL, ITL_GOAL = 0.98, 0.91
CONTEXT_TOKENS, MAX_SEQUENCES, CACHE_BYTES = 1024, 64, 2**28
METRICS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
CLIENT = "bench.vllm_bench_serve"
OUR_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one run of the benchmark."""

    model: str
    num_prompts: int
    num_prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    concurrency: int
    backend: str

    def arguments(self, url: str, result: Path) -> list[str]:
        path = "/v1/chat/completions" if self.backend == "openai-chat" else "/v1/completions"
        options: dict[str, object] = {
            "backend": self.backend,
            "endpoint": path,
            "base-url": url,
            "model": self.model,
            "dataset-name": "prefix_repetition",
            "num-prompts": self.num_prompts,
            "prefix-repetition-num-prefixes": self.num_prefixes,
            "prefix-repetition-prefix-len": self.prefix_tokens,
            "prefix-repetition-suffix-len": self.suffix_tokens,
            "prefix-repetition-output-len": self.output_tokens,
            "max-concurrency": self.concurrency,
            "temperature": 0,
            "seed": 0,
            "percentile-metrics": "ttft,tpot,itl",
            "result-dir": result.parent,
            "result-filename": result.name,
        }
        named = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [*named, "--ignore-eos", "--save-result", "--disable-tqdm"]


@dataclass(slots=True)
class Arm:
    """One server and the benchmark's results."""

    url: str
    results: list[dict[str, Any]] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        return [float(result[metric]) for result in self.results]

    async def run(self, load: Load) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            await run_client(load.arguments(self.url, result))
            self.results.append(json.loads(result.read_text()))
        failed = self.results[-1]["failed"]
        assert not failed, f"{failed} requests failed"


def coppice_options(model: str, *, eager: bool) -> dict[str, object]:
    return {
        "--model": model,
        "--engine.max-context-tokens": CONTEXT_TOKENS,
        "--engine.max-sequences": MAX_SEQUENCES,
        "--engine.cache-bytes": CACHE_BYTES,
        "--engine.dtype": "float32",
        "--engine.seed": 0,
        "--engine.eager": str(eager).lower(),
    }


def vllm_options(model: str, *, eager: bool) -> dict[str, object]:
    return {
        "--model": model,
        "--max-model-len": CONTEXT_TOKENS,
        "--max-num-seqs": MAX_SEQUENCES,
        "--kv-cache-memory-bytes": CACHE_BYTES,
        "--dtype": "float32",
        **({"--enforce-eager": None} if eager else {}),
    }


async def run_client(arguments: Sequence[str]) -> None:
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CLIENT, "--client", *arguments)
    )
    assert await client.wait() == 0, "the benchmark failed"


def run_vllm_bench(arguments: Sequence[str]) -> None:
    """`vllm bench serve`, whose command needs the metadata of a distribution named vllm."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    bench_serve(parser.parse_args(list(arguments)))


async def measure(load: Load, rounds: int, *, eager: bool) -> tuple[Arm, Arm]:
    async with (
        coppice_server(coppice_options(load.model, eager=eager)) as our_url,
        vllm_server(vllm_options(load.model, eager=eager), OUR_THREADS) as their_url,
    ):
        coppice, vllm = Arm(our_url), Arm(their_url)
        await alternate([partial(coppice.run, load), partial(vllm.run, load)], rounds=rounds)
    for arm in (coppice, vllm):
        del arm.results[0]  # the warm-up
    return coppice, vllm


def record(load: Load, coppice: Arm, vllm: Arm) -> Record:
    pairs = Pairs(a=coppice.values("output_throughput"), b=vllm.values("output_throughput"))
    ratio = pairs.ratio()
    itl = Pairs(a=vllm.values("p99_itl_ms"), b=coppice.values("p99_itl_ms")).ratio()

    def both(metric: str) -> Row:
        medians = [f"{statistics.median(arm.values(metric)):,.2f}" for arm in (coppice, vllm)]
        return Row(what=metric, value=f"Coppice {medians[0]}, vLLM {medians[1]}")

    return Record(
        name="vllm_bench_serve",
        claim=f"`vllm bench serve` ({load.backend}, prefix_repetition, {load.num_prompts} prompts, "
        f"{load.concurrency} at once) against Coppice and against vLLM's server.",
        rows=[
            Row(
                what="output throughput, Coppice / vLLM",
                value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                goal=f">= {GOAL}",
                verdict=ratio.verdict(GOAL),
            ),
            Row(
                what="p99 of the time between tokens, vLLM / Coppice",
                value=f"{itl.median:.3f} [{itl.low:.3f}, {itl.high:.3f}]",
                goal=f">= {ITL_GOAL}",
                verdict=itl.verdict(ITL_GOAL),
            ),
            *map(both, METRICS),
        ],
        raw={
            name: {metric: arm.values(metric) for metric in METRICS}
            for name, arm in (("coppice", coppice), ("vllm", vllm))
        },
    )


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        return run_vllm_bench(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", action="store_true", help="run as the client (internal)")
    parser.add_argument("--model", help="default: the seedling, enlarged to 25M parameters")
    parser.add_argument("--backend", default="openai", choices=("openai", "openai-chat"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--num-prefixes", type=int, default=256)
    parser.add_argument("--prefix-tokens", type=int, default=256)
    parser.add_argument("--suffix-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--eager", action="store_true", help="compile neither server's model")
    add_out(parser)
    given = vars(parser.parse_args())
    out, rounds, eager = given.pop("out"), given.pop("rounds"), given.pop("eager")
    del given["client"]
    with tempfile.TemporaryDirectory() as folder:
        given["model"] = given["model"] or str(enlarged_seedling(Path(folder)))
        load = Load(**given)
        result = record(load, *asyncio.run(measure(load, rounds, eager=eager)))
    result.show()
    print(f"\nwrote {result.write(out).name}")


if __name__ == "__main__":
    main()
