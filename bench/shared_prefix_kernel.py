"""Benchmark: the compiled CPU attention kernel alone, against vLLM's own.

Both use the same cache, queries and threads. The shape is that of the end-to-end benchmark: 8 query
and 4 KV heads of 64, blocks of 32 tokens, bfloat16. Both arms write the same outputs from the same
cache, layer after layer, so that no layer finds its data in the processor's caches. vLLM's
scheduling of a step is included; the sharing plan is the planner's and not included.

Each case is compared with the roofline's nearer bound: the peak matmul throughput from registers,
or, where the KV of all layers far exceeds the processor's caches, memory bandwidth. On a machine
with other work, one thread is used and its processor time measured.

With `COPPICE_SHARED_PREFIX_ISA=avx2` in the environment both use AVX2 only, and the record is
another one.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from bench.harness.machine_peak import Peak, measure_peak, peak_rows
from bench.harness.paired_runs import Pairs, alternate
from bench.harness.prefix_trees import Tree
from bench.harness.record import Record, Row, add_out
from kernels.shared_prefix_attention import cpu
from tests.kernels.attention_reference import Step, full_attention

HEADS, KV_HEADS, SIZE, BLOCK = 8, 4, 64, 32
SCALE, SUFFIX = SIZE**-0.5, 48
LAYERS, MOST_BYTES, CHECKED_ROWS = 8, 2**29, 8
PEAK_FLAGS = {
    cpu.Isa.AVX2: ["-mavx2", "-mfma"],
    cpu.Isa.AVX512_BF16: ["-mavx512f", "-mavx512vl", "-mavx512bf16"],
}
INSTRUCTIONS = {cpu.Isa.AVX2: "AVX2", cpu.Isa.AVX512_BF16: "AVX-512"}
AVX2_PROCESSOR = Path(__file__).parents[1] / "tests" / "processors" / "avx2"
FAR_MORE_THAN_CACHES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    tree: Tree
    query_tokens: int = 1
    goal: float = 0


def one_level(groups: int, rows: int, prefix: int, goal: float, query_tokens: int = 1) -> Case:
    tokens = f", {query_tokens} query tokens" if query_tokens > 1 else ""
    tree = Tree(levels=((groups, prefix),), rows_per_leaf=rows, suffix=SUFFIX)
    name = f"{groups} x {rows} at {prefix}{tokens}"
    return Case(name=name, tree=tree, query_tokens=query_tokens, goal=goal)


def alone(rows: int, tokens: int) -> Case:
    tree = Tree(levels=(), rows_per_leaf=rows, suffix=tokens)
    return Case(name=f"{rows} alone, {tokens} tokens", tree=tree, goal=1.0)


# Goals: speedups of the first prototype with AVX-512, on an AMD EPYC.
CASES = [
    one_level(1, 8, 4096, 3.7),
    one_level(1, 32, 1024, 3.2),
    one_level(1, 32, 4096, 3.4),
    one_level(1, 32, 16384, 4.2),
    one_level(1, 128, 4096, 3.4),
    one_level(8, 8, 4096, 3.4),
    one_level(64, 8, 512, 3.0),
    one_level(1, 32, 64, 2.5),
    one_level(8, 8, 64, 2.0),
    one_level(64, 8, 64, 1.9),
    one_level(8, 2, 4096, 2.3),
    one_level(8, 4, 4096, 2.7),
    one_level(1, 32, 4096, 0, query_tokens=5),
    one_level(8, 8, 4096, 0, query_tokens=5),
    Case(
        name="1024, then 8 of 1024, x 8",
        tree=Tree(levels=((1, 1024), (8, 1024)), rows_per_leaf=8, suffix=SUFFIX),
    ),
    alone(256, 1024),
    alone(256, 64),
]


def cases(isa: cpu.Isa) -> list[Case]:
    """Cases for a kernel variant; the AVX2 variant has to be no slower than vLLM's kernel."""
    if isa is cpu.Isa.AVX512_BF16:
        return CASES
    return [replace(case, goal=min(case.goal, 1.0)) for case in CASES]


class Inputs:
    """Inputs of both attention kernels for a case's decode step, with the sharing plan."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        self.case = case
        self.plan, self.block_table = case.tree.laid_out(BLOCK, generator)
        self.num_blocks = int(self.block_table.max()) + 1
        num_rows = case.tree.num_rows
        self.seq_lens = torch.full((num_rows,), case.tree.length, dtype=torch.int32)
        starts = torch.arange(num_rows + 1) * case.query_tokens
        self.query_start_loc = starts.to(torch.int32)
        size = (num_rows * case.query_tokens, HEADS, SIZE)
        self.query = torch.randn(size, generator=generator).bfloat16()
        self.caches = self._caches(generator)
        self.stock_out, self.our_out = torch.empty_like(self.query), torch.empty_like(self.query)

    def _caches(self, generator: torch.Generator) -> list[Tensor]:
        """Fill random KV caches for all layers.

        The first is written by vLLM's own operation; the others are copies.
        """
        self.keys, self.values = (
            torch.randn(self.num_blocks * BLOCK, KV_HEADS, SIZE, generator=generator).bfloat16()
            for _ in range(2)
        )
        first = torch.zeros(self.num_blocks, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
        slots = torch.arange(self.num_blocks * BLOCK)
        ops.cpu_attn_reshape_and_cache(self.keys, self.values, *halves(first), slots, "vec")
        layers = max(1, min(LAYERS, MOST_BYTES // first.nbytes))
        return [first, *(first.clone() for _ in range(layers - 1))]

    def stock(self) -> None:
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.seq_lens),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=SIZE,
            seq_lens=self.seq_lens,
            dtype=torch.bfloat16,
            query_start_loc=self.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa="vec",
            enable_kv_split=True,
        )
        for cache in self.caches:
            keys, values = halves(cache)
            ops.cpu_attention_with_kv_cache(
                query=self.query,
                key_cache=keys,
                value_cache=values,
                output=self.stock_out,
                query_start_loc=self.query_start_loc,
                seq_lens=self.seq_lens,
                scale=SCALE,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self.block_table,
                softcap=0,
                scheduler_metadata=metadata,
                s_aux=None,
            )

    def ours(self) -> None:
        step = cpu.DecodeStep(
            self.plan,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
        )
        for cache in self.caches:
            step.layer(query=self.query, cache=cache, scale=SCALE, out=self.our_out)

    def errors(self) -> tuple[float, float]:
        """Relative RMS errors of vLLM's and of our outputs against float64, for some rows."""
        chosen = range(0, len(self.seq_lens), -(-len(self.seq_lens) // CHECKED_ROWS))
        tokens = self.case.query_tokens
        at = torch.cat([torch.arange(row * tokens, (row + 1) * tokens) for row in chosen])
        size = (self.num_blocks, BLOCK, KV_HEADS, SIZE)
        rows = torch.tensor(list(chosen))
        blocks = self.block_table[rows]
        used, places = map(torch.from_numpy, np.unique(blocks.numpy(), return_inverse=True))
        want, _ = full_attention(
            Step(
                query=self.query[at].double(),
                keys=self.keys.view(size)[used.long()].double(),
                values=self.values.view(size)[used.long()].double(),
                block_table=places,
                seq_lens=self.seq_lens[rows],
                query_start_loc=torch.arange(len(rows) + 1) * tokens,
                scale=SCALE,
            )
        )
        stock, ours = ((x[at] - want).norm() / want.norm() for x in (self.stock_out, self.our_out))
        return float(stock), float(ours)

    def flops(self) -> float:
        """Floating-point operations of a layer's attention.

        There are two products of every query with every position it attends to.
        """
        return 4.0 * len(self.query) * HEADS * SIZE * float(self.seq_lens[0])

    def share(self, seconds: float, peak: Peak) -> str:
        """Utilisation of the roofline bound (compute or memory) that a layer comes closer to."""
        tokens = self.case.tree.num_rows * self.case.tree.length / self.case.tree.ratio
        moved = 2 * tokens * KV_HEADS * SIZE * self.query.itemsize + 2 * self.query.nbytes
        of_products = self.flops() / seconds / peak.flops_per_second
        of_memory = moved / seconds / peak.bytes_per_second
        if of_memory > of_products and moved * len(self.caches) > FAR_MORE_THAN_CACHES:
            return f"{of_memory:.0%} of peak memory bandwidth"
        return f"{of_products:.0%} of peak matmul throughput"


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the keys and of the values of a KV cache, as split by vLLM's CPU backend."""
    keys, values = cache.view(len(cache), KV_HEADS, 2 * BLOCK, SIZE).chunk(2, dim=2)
    return keys, values


async def measure(
    case: Case, peak: Peak, rounds: int, clock: Callable[[], float]
) -> tuple[Row, dict[str, list[float]]]:
    inputs = Inputs(case)
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}

    async def timed(arm: str) -> None:
        began = clock()
        (inputs.stock if arm == "stock" else inputs.ours)()
        seconds[arm].append((clock() - began) / len(inputs.caches))

    await alternate([lambda: timed("stock"), lambda: timed("ours")], rounds=rounds)
    for values in seconds.values():
        del values[0]  # the warm-up
    ratio = Pairs(a=seconds["stock"], b=seconds["ours"]).ratio()
    stock, ours = (statistics.median(seconds[arm]) for arm in seconds)
    speed = inputs.flops() / ours
    stock_error, our_error = inputs.errors()
    row = Row(
        what=case.name,
        value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times; "
        f"{stock * 1e3:.3f} -> {ours * 1e3:.3f} ms per layer; "
        f"{inputs.flops() / stock / 1e9:.0f} -> "
        f"{speed / 1e9:.0f} GFLOP/s, {inputs.share(ours, peak)}; "
        f"error {stock_error:.1e} -> {our_error:.1e}",
        goal=f">= {case.goal}" if case.goal else "",
        verdict=ratio.verdict(case.goal) if case.goal else "",
    )
    return row, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", default="", help="run the cases whose name contains this; writes no record"
    )
    parser.add_argument("--machine", choices=("alone", "shared"), default="alone")
    add_out(parser)
    arguments = parser.parse_args()
    alone = arguments.machine == "alone"
    isa = cpu.best_isa()
    if isa is None:
        print("the kernel was not built, or not for this processor: not run")
        return
    if isa is cpu.Isa.AVX2:
        limit_vllm_to_avx2()
    current_platform.import_kernels()
    clock = time.perf_counter if alone else time.thread_time
    if not alone:
        torch.set_num_threads(1)
    peak = measure_peak(PEAK_FLAGS[isa], num_threads=torch.get_num_threads())
    rows, raw = [], {}
    for case in cases(isa):
        if arguments.only in case.name:
            row, raw[case.name] = asyncio.run(measure(case, peak, arguments.rounds, clock))
            rows.append(row)
            print(f"{row.what:30} {row.value}  {row.verdict}", flush=True)
    rows += peak_rows(peak, INSTRUCTIONS[isa])
    if not arguments.only:
        written = record(rows, raw, isa=isa, alone=alone).write(arguments.out)
        print(f"\nwrote {written.name}")


def limit_vllm_to_avx2() -> None:
    """Start this benchmark again with AVX-512 hidden from vLLM and torch, if they would use it."""
    if torch.cpu.get_capabilities()["avx512_f"]:
        environment = os.environ | {"PYTHONPATH": str(AVX2_PROCESSOR)}
        os.execve(sys.executable, sys.orig_argv, environment)


def record(rows: list[Row], raw: dict[str, Any], *, isa: cpu.Isa, alone: bool) -> Record:
    name = "shared_prefix_kernel" if isa is cpu.Isa.AVX512_BF16 else "shared_prefix_kernel_avx2"
    how = "" if alone else " One thread on a machine with other work, its own time."
    return Record(
        name=name if alone else f"{name}_shared",
        bench="shared_prefix_kernel",
        claim="Decode attention over shared prefixes by our CPU kernel and vLLM's `vec` kernel, "
        f"both with {INSTRUCTIONS[isa]}: groups x samples at the tokens of the prefix, and 48 more "
        f"tokens per sample; 8 query and 4 KV heads of 64, bfloat16.{how}",
        rows=rows,
        raw=raw,
    )


if __name__ == "__main__":
    main()
