"""GPU benchmark: planned CUDA graphs against graphs of all batch sizes and draft lengths.

    python -m bench.planned_graphs_gpu

Without a GPU it prints that and writes no record. Both arms are engines of the same model,
an 8B Llama with random weights and a drafter of one layer, on one GPU. Both capture their graphs
through the same patch and find them by length, so the ratio excludes what vLLM 0.32 loses by not
finding them. Steps are those of a recorded trace.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch

from bench.harness.graph_arms import Arm, Captured, Request
from bench.harness.paired_runs import Pairs, alternate
from bench.harness.record import Record, Row, add_out
from engine.cudagraphs.allowed_shapes import CaptureLimits, vllm_shapes
from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.cudagraphs.plan_score import GraphMemory, estimate_memory
from engine.cudagraphs.planner import Plan, plan
from engine.cudagraphs.shapes import GraphShape, Trace, read_trace

TRACE = Path(__file__).parent / "graph_traces" / "seedling.json"
MAX_TOKENS, MIB = 2048, 2**20
BYTES_GOAL, HIT_GOAL, TIME_GOAL = 0.4, 0.98, 0.99
TLT_GIGABYTES = (30.39, 10.69)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DRAFTER = LLAMA_8B | {"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 2816}


def capture_limits(trace: Trace) -> CaptureLimits:
    return CaptureLimits(
        lengths=DraftLengthTiers.parse(trace.about["lengths"]),
        max_sequences=trace.about["max_sequences"],
        max_batched_tokens=MAX_TOKENS,
    )


def plans(trace: Trace, memory: GraphMemory) -> tuple[Plan, Plan]:
    """A plan of all CUDA graphs, and one made for the trace with 40 % of the first one's memory."""
    limits = capture_limits(trace)
    shapes = tuple(sorted(vllm_shapes(limits), key=lambda s: (s.query_len is not None, -s.tokens)))
    total = memory.total_bytes(shapes)
    full = Plan(shapes=shapes, estimated_bytes=total, budget_bytes=None)
    budget = int(BYTES_GOAL * total)
    ours = plan(limits, memory, budget_bytes=budget, trace=trace)
    return full, ours


def decode_steps(trace: Trace, number: int) -> list[tuple[GraphShape, int]]:
    """The most frequent shapes of decode steps in the trace, with their counts."""
    counted = [(s, steps) for s, steps in trace.counts().items() if s.query_len]
    return sorted(counted, key=lambda pair: -pair[1])[:number]


def write_model(directory: Path, config: dict[str, object]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


async def measure(
    full: Arm, ours: Arm, steps: list[tuple[GraphShape, int]], rounds: int
) -> tuple[list[float], list[float]]:
    """Measure both plans; returns for each the mean seconds of a decode step, per round.

    The mean is weighted by the counts of the trace.
    """
    seconds: dict[str, list[float]] = {"full": [], "ours": []}

    def timed(name: str, arm: Arm) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            times = [(arm.seconds(Request(s.samples, (s.query_len or 1) - 1)), n) for s, n in steps]
            seconds[name].append(sum(t * n for t, n in times) / sum(n for _, n in times))

        return run

    await alternate([timed("full", full), timed("ours", ours)], rounds=rounds)
    return seconds["full"][1:], seconds["ours"][1:]


def table(
    full: Captured, ours: Captured, estimates: tuple[Plan, Plan], pairs: Pairs, covered: float
) -> list[Row]:
    share = ours.measured_bytes / full.measured_bytes
    hit_rate = ours.hits / max(ours.hits + ours.misses, 1)
    ratio = pairs.ratio()
    sizes = [plan.estimated_bytes / MIB for plan in estimates]
    naive, tlt_shapes = TLT_GIGABYTES
    return [
        Row(
            what=f"bytes of {ours.num_graphs} graphs to those of {full.num_graphs}",
            value=f"{share:.2f}: {full.measured_bytes / MIB:.0f} -> {ours.measured_bytes / MIB:.0f}"
            f" MiB; estimated {sizes[0]:.0f} -> {sizes[1]:.0f} MiB",
            goal=f"<= {BYTES_GOAL}",
            verdict="met" if share <= BYTES_GOAL else "missed",
        ),
        Row(
            what="TLT's, of its own, as published",
            value=f"{tlt_shapes / naive:.2f}: {naive} -> {tlt_shapes} GB",
        ),
        Row(
            what=f"hit rate, on the shapes of {100 * covered:.0f} % of the trace's decode steps",
            value=f"{hit_rate:.4f}",
            goal=f">= {HIT_GOAL}",
            verdict="met" if hit_rate >= HIT_GOAL else "missed",
        ),
        Row(
            what="decode time with the full product to that with the plan",
            value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
            goal=f">= {TIME_GOAL}",
            verdict=ratio.verdict(TIME_GOAL),
        ),
    ]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument(
        "--shapes", type=int, default=24, help="number of the trace's most frequent shapes"
    )
    parser.add_argument("--rounds", type=int, default=15)
    add_out(parser)
    arguments = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("no GPU: not run")
        return
    trace = read_trace(arguments.trace)
    steps = decode_steps(trace, arguments.shapes)
    decoded = sum(n for shape, n in trace.counts().items() if shape.query_len is not None)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model", dict(LLAMA_8B))
        drafter = write_model(Path(scratch) / "drafter", dict(DRAFTER))
        estimates = plans(trace, estimate_memory(model))
        limits = capture_limits(trace)
        with (
            Arm(model, drafter, limits, estimates[0]) as full,
            Arm(model, drafter, limits, estimates[1]) as ours,
        ):
            seconds = asyncio.run(measure(full, ours, steps, arguments.rounds))
            captured = (full.captured(), ours.captured())
    record = Record(
        name="graph_pool_gpu",
        bench="planned_graphs_gpu",
        claim="A planned pool of CUDA graphs: bytes, hits and decode time against every size with "
        "every draft length.",
        rows=table(
            *captured,
            estimates,
            Pairs(a=seconds[0], b=seconds[1]),
            sum(n for _, n in steps) / decoded,
        ),
        raw={"full": seconds[0], "ours": seconds[1]},
    )
    record.show()
    print(f"\nwrote {record.write(arguments.out).name}")


if __name__ == "__main__":
    main()
