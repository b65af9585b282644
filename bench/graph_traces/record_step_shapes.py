"""Records the shapes of an engine's steps, for planning CUDA graphs, and prints a plan.

    python -m bench.graph_traces.record_step_shapes

The workload is groups on the shipped model, which is its own drafter, with vLLM's dynamic schedule
of draft lengths. Its own answers have eight tokens, so lengths are drawn from a long-tailed
distribution, as those of reasoning models are: many samples at first, few for long. Nothing is
timed, so only the trace is written.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from engine.cudagraphs.allowed_shapes import CaptureLimits
from engine.cudagraphs.draft_lengths import DraftLengthTiers
from engine.cudagraphs.plan_report import compare, render
from engine.cudagraphs.plan_score import estimate_memory
from engine.cudagraphs.planner import plan
from engine.cudagraphs.shapes import ShapeRecorder, Trace
from engine.launch.plugin import install_patches
from engine.settings import EngineSettings

FILE = Path(__file__).with_name("seedling.json")
SCHEDULE, LENGTHS = [(1, 8, 4), (9, 32, 2), (33, 64, 0)], "8:4 32:2 0"
MAX_SEQUENCES, MAX_TOKENS, GROUP = 64, 2048, 8
MEDIAN_TOKENS, SPREAD = 40, 1.0
PROMPTS = ("Compute {}+{}.\n", "Compute {}*{}.\n", "Write {} and then {}, step by step.\n")


def limits() -> CaptureLimits:
    return CaptureLimits(
        lengths=DraftLengthTiers.parse(LENGTHS),
        max_sequences=MAX_SEQUENCES,
        max_batched_tokens=MAX_TOKENS,
    )


def engine(model: Path) -> Any:
    from vllm import LLM

    install_patches("EngineCore")
    return LLM(
        str(model),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=MAX_TOKENS,
        kv_cache_memory_bytes=2**27,
        enforce_eager=True,
        speculative_config={
            "method": "draft_model",
            "model": str(model),
            "num_speculative_tokens": max(drafts for _, _, drafts in SCHEDULE),
            "num_speculative_tokens_per_batch_size": SCHEDULE,
        },
    )


def recorded(model: Path, num_groups: int, max_tokens: int) -> Trace:
    from vllm import SamplingParams

    llm, recorder = engine(model), ShapeRecorder()
    recorder.attach(llm.llm_engine.engine_core.engine_core.scheduler)
    chance = np.random.default_rng(1)
    pairs = chance.integers(1, 1000, (num_groups, 2)).tolist()
    prompts = [PROMPTS[i % len(PROMPTS)].format(*pair) for i, pair in enumerate(pairs)]
    drawn = MEDIAN_TOKENS * np.exp(SPREAD * chance.standard_normal(GROUP * num_groups))
    lengths = drawn.astype(int).clip(1, max_tokens).tolist()
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    texts = [prompt for prompt in prompts for _ in range(GROUP)]
    llm.generate(texts, sampling, use_tqdm=False)
    return recorder.trace(
        model="examples/seedling/model",
        samples=len(lengths),
        lengths=LENGTHS,
        max_sequences=MAX_SEQUENCES,
        response_tokens={"median": int(np.median(lengths)), "longest": max(lengths)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    model = Path(EngineSettings().model)
    trace = recorded(model, arguments.groups, arguments.max_tokens)
    trace.write(arguments.out)
    memory = estimate_memory(model)
    made = plan(limits(), memory, budget_bytes=None, trace=trace)
    print(render(made, compare(made, limits(), memory, trace.counts())))


if __name__ == "__main__":
    main()
