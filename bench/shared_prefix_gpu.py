"""GPU benchmark: shared-prefix attention of one layer, against FlashAttention's paged decode.

    python -m bench.shared_prefix_gpu [--only NAME | --quick] [--rounds N]

Without a GPU it prints that and writes no record. The shape is 32 query and 8 KV heads of
128, blocks of 16 tokens, bfloat16. FlashAttention gets its scheduler metadata beforehand in either
arm, as in vLLM. Both are replayed from a CUDA graph, with a cold L2 cache. Shared-prefix attention
runs between the pieces of a piecewise graph, so it takes at least the time to launch it, which is
measured as well.

The possible gain is bounded by rho, the number of tokens that rows attend to over the number of
distinct tokens. Where FlashAttention takes 100 microseconds or more the goal is 85 % of rho, and
nowhere less than 0.98.
"""

import argparse
import asyncio
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from vllm.v1.attention.backends import fa_utils

from bench.harness.paired_runs import Pairs, alternate
from bench.harness.prefix_trees import Tree
from bench.harness.record import Record, Row, add_out
from engine.attention.cuda_calibration import CalibrationStep, LayerGeometry
from engine.attention.cuda_timing import graph_times, launch_times

BLOCK = 16
LONG_SECONDS, SHARE, FLOOR = 100e-6, 0.85, 0.98


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
QUICK_CASES = [
    *(groups(*sizes) for sizes in product((1, 4, 16, 32), (8, 16), (1024, 4096, 16384), (256,))),
    hydragen(512, 1024),
    pat([256], [1024]),
]


def step_of(case: Case) -> CalibrationStep:
    tree = case.tree
    _, table = tree.laid_out(BLOCK, torch.Generator().manual_seed(0))
    geometry = LayerGeometry(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        block_size=BLOCK,
        dtype=torch.bfloat16,
        fa_version=fa_utils.get_flash_attn_version(head_size=case.head_size),
    )
    lens = np.full(tree.num_rows, tree.length, np.int32)
    return CalibrationStep(geometry, table.numpy(), lens, torch.device("cuda"), fa_utils)


async def measure(case: Case, rounds: int) -> tuple[Row, dict[str, list[float]]]:
    step = step_of(case)
    seconds: dict[str, list[float]] = {"stock": [], "shared_graph": [], "shared": []}

    async def stock() -> None:
        seconds["stock"].append(min(graph_times(step.stock_call())))

    async def shared() -> None:
        seconds["shared_graph"].append(min(graph_times(step.shared_call())))
        launches = min(launch_times(step.shared_call()))
        seconds["shared"].append(max(seconds["shared_graph"][-1], launches))

    await alternate([stock, shared], rounds=rounds, warm_up=1)
    for values in seconds.values():
        del values[:1]
    ratio = Pairs(a=seconds["stock"], b=seconds["shared"]).ratio()
    long = sorted(seconds["stock"])[rounds // 2] >= LONG_SECONDS
    goal = round(max(FLOOR, SHARE * case.tree.ratio), 2) if long else FLOOR
    stock_us, graph_us, shared_us = (min(values) * 1e6 for values in seconds.values())
    row = Row(
        what=case.name,
        value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times of at most "
        f"{case.tree.ratio:.2f}; {stock_us:.0f} -> {shared_us:.0f} us ({graph_us:.0f} in a graph)",
        goal=f">= {goal}",
        verdict=ratio.verdict(goal),
    )
    return row, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="run the cases whose name contains this; writes no record"
    )
    parser.add_argument("--quick", action="store_true", help="run 26 of the cases")
    add_out(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: not run")
        return
    rows, raw = [], {}
    for case in QUICK_CASES if arguments.quick else CASES:
        if arguments.only in case.name:
            row, raw[case.name] = asyncio.run(measure(case, arguments.rounds))
            rows.append(row)
            print(f"{row.what:30} {row.value}  {row.verdict}", flush=True)
    record = Record(
        name="shared_prefix_gpu",
        claim="Decode attention of one layer with shared prefixes and by FlashAttention alone: "
        "prompts x rows at the prefix's tokens + the suffix's.",
        rows=rows,
        raw=raw,
    )
    if not arguments.only:
        print(f"\nwrote {record.write(arguments.out).name}")


if __name__ == "__main__":
    main()
