"""Benchmark: agent sessions, against recording each turn as a row.

Scripted agents talk to this server through sessions, and to vLLM's server through a recorder. The
rows count the tokens that the engines prefill and that a trainer forwards. Two further parts
measure the time to first token after a tool pause, with and without retained KV, and the throughput
of the session route.
"""

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.harness.conversations import SCRIPTS
from bench.harness.paired_runs import Pairs, Ratio, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from bench.harness.server_process import coppice_server, vllm_server
from bench.harness.session_agents import TOKENS, Bench, Pauses, Routes
from bench.harness.session_trees import num_forwarded_tokens, num_sampled_of_longest
from coppice import AsyncRollouts, SessionResult

GOAL, TREE_GOAL = 0.97, 1.05
AGENTS = 4
CONTEXT_TOKENS, MAX_SEQUENCES, BLOCK_SIZE, CACHE_BYTES = 4096, 32, 32, 2**28


@dataclass(slots=True)
class Counts:
    """Tokens of one script, in all of its conversations."""

    prefilled: int = 0
    rows: int = 0
    unique: int = 0
    forwarded: int = 0
    sampled: int = 0
    longest: int = 0


async def count_session_tokens(bench: Bench, script: str) -> Counts:
    counts = Counts()

    async def play(number: int) -> SessionResult:
        return await bench.session(lambda ask: SCRIPTS[script](ask, f"{script} {number}"))

    for result in await asyncio.gather(*map(play, range(AGENTS))):
        usage = result.usage
        counts.prefilled += usage.num_prompt_tokens - usage.num_cached_tokens
        counts.rows += usage.num_prompt_tokens + usage.num_sampled_tokens
        counts.sampled += usage.num_sampled_tokens
        counts.unique += usage.num_context_tokens + usage.num_sampled_tokens
        counts.forwarded += sum(map(num_forwarded_tokens, result.groups))
        counts.longest += max(map(num_sampled_of_longest, result.groups))
    return counts


async def count_proxy_tokens(bench: Bench, url: str, script: str) -> Counts:
    """Tokens of vLLM's server; its recorder has one row per turn."""
    counts, record = Counts(), list[dict[str, Any]]()
    ask = bench.asking(url, "none", record)
    await asyncio.gather(*(SCRIPTS[script](ask, f"{script} {n}") for n in range(AGENTS)))
    for usage in (answer["usage"] for answer in record):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts.prefilled += usage["prompt_tokens"] - cached
        counts.rows += usage["prompt_tokens"] + usage["completion_tokens"]
    return counts


@dataclass(slots=True)
class Results:
    sessions: dict[str, Counts]
    proxy: dict[str, Counts]
    pauses: Pauses
    routes: Routes


async def measure(model: str, rounds: int) -> Results:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=300))
        bench, plain = [
            await start_server(stack, http, model, **changes)
            for changes in ({}, {"--engine.session-kv-fraction": 0})
        ]
        sessions = {script: await count_session_tokens(bench, script) for script in SCRIPTS}
        pauses, routes = Pauses(bench, plain), Routes(bench)
        await pauses.start()
        arms = [pauses.after_kept, pauses.after_retention, pauses.after_eviction]
        await alternate(arms, rounds=rounds)
        await alternate([routes.over_sessions, routes.over_chat], rounds=rounds)
    for values in (*vars(pauses).values(), routes.sessions, routes.chat):
        if isinstance(values, list):
            del values[0]  # the warm-up
    async with vllm_server(vllm_options(model)) as url, httpx.AsyncClient(timeout=300) as http:
        bench.http = http
        proxy = {script: await count_proxy_tokens(bench, url, script) for script in SCRIPTS}
    return Results(sessions, proxy, pauses, routes)


async def start_server(
    stack: AsyncExitStack, http: httpx.AsyncClient, model: str, **changes: object
) -> Bench:
    url = await stack.enter_async_context(coppice_server(coppice_options(model) | changes))
    rollouts = await stack.enter_async_context(AsyncRollouts(url))
    return Bench(model=model, http=http, url=url, rollouts=rollouts)


def coppice_options(model: str) -> dict[str, object]:
    return {
        "--model": model,
        "--engine.max-context-tokens": CONTEXT_TOKENS,
        "--engine.max-sequences": MAX_SEQUENCES,
        "--engine.block-size": BLOCK_SIZE,
        "--engine.cache-bytes": CACHE_BYTES,
        "--engine.dtype": "float32",
        "--engine.seed": 0,
    }


def vllm_options(model: str) -> dict[str, object]:
    return {
        "--model": model,
        "--max-model-len": CONTEXT_TOKENS,
        "--max-num-seqs": MAX_SEQUENCES,
        "--block-size": BLOCK_SIZE,
        "--kv-cache-memory-bytes": CACHE_BYTES,
        "--dtype": "float32",
        "--enable-prompt-tokens-details": None,
    }


def record(results: Results) -> Record:
    pauses, routes = results.pauses, results.routes
    rows = [row for script in SCRIPTS for row in token_rows(results, script)]
    throughput = Pairs(a=routes.sessions, b=routes.chat).ratio()
    rows += [
        *pause_rows(pauses),
        Row(
            what="throughput, sessions / chat route",
            value=text(throughput),
            goal=f">= {GOAL}",
            verdict=throughput.verdict(GOAL),
        ),
    ]
    return Record(
        name="sessions",
        claim=f"Scripted agents, {AGENTS} at once per script and {TOKENS} tokens per turn, through "
        "sessions and through vLLM's server behind a recorder.",
        rows=rows,
        raw={
            "sessions": {script: asdict(counts) for script, counts in results.sessions.items()},
            "proxy": {script: asdict(counts) for script, counts in results.proxy.items()},
            "kept": pauses.kept,
            "retained": pauses.retained,
            "evicted": pauses.evicted,
            "retaining_throughput": pauses.retaining_throughput,
            "plain_throughput": pauses.plain_throughput,
            "session_route": routes.sessions,
            "chat_route": routes.chat,
        },
    )


def pause_rows(pauses: Pauses) -> list[Row]:
    loss = Pairs(a=pauses.evicted, b=pauses.kept).ratio()
    gain = Pairs(a=pauses.evicted, b=pauses.retained).ratio()
    others = Pairs(a=pauses.retaining_throughput, b=pauses.plain_throughput).ratio()
    kept, retained, evicted = (
        f"{1000 * statistics.median(values):.0f}"
        for values in (pauses.kept, pauses.retained, pauses.evicted)
    )
    return [
        Row(what="TTFT after a tool pause, KV evicted / kept", value=text(loss)),
        Row(what="TTFT after a tool pause, KV evicted / retained", value=text(gain)),
        Row(
            what="TTFT after a tool pause",
            value=f"kept {kept}, retained {retained}, evicted {evicted} ms",
        ),
        Row(
            what="throughput of other callers, retention / none",
            value=text(others),
            goal=f">= {GOAL}",
            verdict=others.verdict(GOAL),
        ),
    ]


def text(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def token_rows(results: Results, script: str) -> list[Row]:
    ours, proxy = results.sessions[script], results.proxy[script]
    forwarded = ours.forwarded / ours.unique
    return [
        Row(
            what=f"{script}: tokens forwarded by the trainer / unique tokens",
            value=f"{forwarded:.3f}",
            goal=f"<= {TREE_GOAL}",
            verdict="met" if forwarded <= TREE_GOAL else "missed",
        ),
        Row(
            what=f"{script}: tokens forwarded, one row per turn / tree",
            value=f"{ours.rows / ours.forwarded:.2f}",
        ),
        Row(
            what=f"{script}: sampled tokens lost by the longest trajectory only",
            value=f"{1 - ours.longest / ours.sampled:.1%}",
        ),
        Row(
            what=f"{script}: tokens prefilled, vLLM's server / sessions",
            value=f"{proxy.prefilled / ours.prefilled:.2f} "
            f"({proxy.prefilled:,} / {ours.prefilled:,})",
        ),
        Row(
            what=f"{script}: tokens forwarded, rows of the recorder / tree",
            value=f"{proxy.rows / ours.forwarded:.2f}",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the seedling, enlarged to 25M parameters")
    parser.add_argument("--rounds", type=int, default=8)
    add_out(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(enlarged_seedling(Path(folder)))
        result = record(asyncio.run(measure(model, arguments.rounds)))
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
