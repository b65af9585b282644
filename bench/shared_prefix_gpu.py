"""GPU benchmark: the Triton attention kernel alone, against FlashAttention's paged decode.

    python -m bench.shared_prefix_gpu

Not run yet: without a GPU it says so and writes no record. The shape is 32 query and 8 KV heads of
128, blocks of 16 tokens, bfloat16. The L2 cache is overwritten before each run of either arm; both
are replayed from a CUDA graph, as in vLLM's decode.

The possible gain is bounded by rho, the number of tokens that rows attend to over the number of
distinct tokens. Where FlashAttention takes 100 microseconds or more the goal is 85 % of rho, and
nowhere less than 0.98.
"""

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from bench.harness.paired_runs import Pairs, alternate
from bench.harness.prefix_trees import Tree
from bench.harness.record import Record, Row
from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.gpu_work_list import WorkList, WorkShape

BLOCK = 16
LONG_SECONDS, SHARE, FLOOR = 100e-6, 0.85, 0.98
FLUSHED_ELEMENTS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    tree: Tree
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128


def groups(prompts: int, rows: int, prefix: int, suffix: int) -> Case:
    tree = Tree(levels=((prompts, prefix),), rows_per_leaf=rows, suffix=suffix)
    return Case(name=f"{prompts} x {rows} at {prefix} + {suffix}", tree=tree)


def hydragen(rows: int, prefix: int) -> Case:
    """A batch of Hydragen's micro-benchmark, as on one of eight ranks of CodeLlama-34b."""
    tree = Tree(levels=((1, prefix),), rows_per_leaf=rows, suffix=256)
    return Case(name=f"Hydragen {rows} at {prefix}", tree=tree, num_heads=8, num_kv_heads=1)


def pat(counts: list[int], tokens: list[int]) -> Case:
    """A batch of PAT's benchmark grid, such as `8,16,32,256_512,512,256,32`.

    The name lists the prefix tree's nodes per level and their tokens; the last level are the rows.
    """
    widths = [below // above for above, below in zip([1, *counts], counts, strict=False)]
    *shared, rows = widths
    levels = tuple(zip(shared, tokens, strict=False))
    tree = Tree(levels=levels, rows_per_leaf=rows, suffix=tokens[-1])
    name = ",".join(map(str, counts)) + "_" + ",".join(map(str, tokens))
    return Case(name=f"PAT {name}", tree=tree)


CASES = [
    *(
        groups(*sizes)
        for sizes in product((1, 4, 16, 32), (4, 8, 16), (512, 1024, 4096, 16384), (32, 256, 1024))
    ),
    *(hydragen(rows, 2 * rows) for rows in (512, 1024, 2048, 4096)),
    pat([8, 16, 32, 256], [512, 512, 256, 32]),
    pat([256], [1024]),
]


class Inputs:
    """Inputs of a case's decode step on the GPU; both kernels are captured as CUDA graphs."""

    def __init__(self, case: Case) -> None:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )

        device = torch.device("cuda")
        self.case, tree = case, case.tree
        plan, table = tree.laid_out(BLOCK, torch.Generator().manual_seed(0))
        heads, size = case.num_kv_heads, case.head_size
        cache = torch.randn(2, int(table.max()) + 1, BLOCK, heads, size, device=device).bfloat16()
        keys, values = cache
        query = torch.randn(tree.num_rows, case.num_heads, size, device=device).bfloat16()
        table = table.to(device)
        lengths = torch.full((tree.num_rows,), tree.length, dtype=torch.int32, device=device)
        starts = torch.arange(tree.num_rows + 1, dtype=torch.int32, device=device)
        self.stock_out, self.our_out = torch.empty_like(query), torch.empty_like(query)
        work = WorkList(self._shape(len(plan.node_blocks)), device)
        assert work.fill(plan, lengths.cpu().numpy() - plan.suffix_starts)
        self.flushed = torch.empty(FLUSHED_ELEMENTS, dtype=torch.int32, device=device)

        def stock() -> None:
            flash_attn_varlen_func(
                q=query,
                k=keys,
                v=values,
                out=self.stock_out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=tree.length,
                softmax_scale=size**-0.5,
                causal=True,
                block_table=table,
                fa_version=get_flash_attn_version(),
            )

        def ours() -> None:
            cuda.decode(
                work,
                query=query,
                key_cache=keys,
                value_cache=values,
                block_table=table,
                seq_lens=lengths,
                query_start_loc=starts,
                scale=size**-0.5,
                out=self.our_out,
            )

        self.stock, self.ours = captured(stock), captured(ours)

    def _shape(self, num_node_blocks: int) -> WorkShape:
        return WorkShape(
            num_heads=self.case.num_heads,
            num_kv_heads=self.case.num_kv_heads,
            head_size=self.case.head_size,
            block_size=BLOCK,
            max_rows=self.case.tree.num_rows,
            max_query_tokens=1,
            max_node_blocks=num_node_blocks,
            num_processors=torch.cuda.get_device_properties(0).multi_processor_count,
        )

    def seconds(self, graph: torch.cuda.CUDAGraph) -> float:
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self.flushed.zero_()
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def apart(self) -> float:
        """Largest difference of the two kernels' outputs, relative to the largest output."""
        return float((self.stock_out - self.our_out).abs().max() / self.stock_out.abs().max())


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


async def measure(case: Case, rounds: int) -> tuple[Row, dict[str, list[float]]]:
    inputs = Inputs(case)
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}

    async def stock() -> None:
        seconds["stock"].append(inputs.seconds(inputs.stock))

    async def ours() -> None:
        seconds["ours"].append(inputs.seconds(inputs.ours))

    await alternate([stock, ours], rounds=rounds, warm_up=3)
    for values in seconds.values():
        del values[:3]
    ratio = Pairs(a=seconds["stock"], b=seconds["ours"]).ratio()
    long = sorted(seconds["stock"])[rounds // 2] >= LONG_SECONDS
    goal = round(max(FLOOR, SHARE * case.tree.ratio), 2) if long else FLOOR
    row = Row(
        what=case.name,
        value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times of at most "
        f"{case.tree.ratio:.2f}; {min(seconds['stock']) * 1e6:.0f} -> "
        f"{min(seconds['ours']) * 1e6:.0f} us; apart {inputs.apart():.1e}",
        goal=f">= {goal}",
        verdict=ratio.verdict(goal),
    )
    return row, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--only", default="", help="run the cases whose name contains this; writes no record"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: not run")
        return
    rows, raw = [], {}
    for case in CASES:
        if arguments.only in case.name:
            row, raw[case.name] = asyncio.run(measure(case, arguments.rounds))
            rows.append(row)
            print(f"{row.what:30} {row.value}  {row.verdict}", flush=True)
    record = Record(
        name="shared_prefix_gpu",
        claim="Decode attention over shared prefixes by our Triton kernel and by FlashAttention, "
        "alone: prompts x rows at the prefix's tokens + the suffix's.",
        rows=rows,
        raw=raw,
    )
    if not arguments.only:
        print(f"\nwrote {record.write().name}")


if __name__ == "__main__":
    main()
