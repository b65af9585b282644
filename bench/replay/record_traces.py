"""Records traces for replays: rollouts of the seedling (test model) over training epochs.

    python -m bench.replay.record_traces --out bench/replay/traces

Between two epochs the weights take ten small training steps towards writing solutions out, as
reinforcement learning does too. vLLM runs in this process, without speculation.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.replay.traces import Group, Trace
from examples.seedling.arithmetic import draw
from examples.seedling.measure import SEED, SEEDLING

NUM_PROMPTS, SAMPLES, NUM_EPOCHS, MAX_TOKENS, MIN_TERMS = 16, 16, 3, 512, 3
TEMPERATURES = (1.0, 0.6)
LEARNING = ("--steps", "10", "--learning-rate", "2e-3", "--at-once-share", "0.05")


def prompts() -> list[str]:
    """Prompts to sample: held-out problems of several terms, which have long responses."""
    rng = random.Random(SEED)
    drawn = (draw(rng, held_out=True) for _ in range(10_000))
    return [p.prompt for p in drawn if len(p.terms) >= MIN_TERMS][:NUM_PROMPTS]


def policies(folder: Path) -> Iterator[Path]:
    yield (policy := SEEDLING)
    for number in range(1, NUM_EPOCHS):
        out = folder / f"epoch-{number}"
        command = [sys.executable, "-m", "examples.seedling.train", *LEARNING]
        subprocess.run([*command, "--start", str(policy), "--out", str(out)], check=True)
        yield (policy := out)


def sampled(model: Path, texts: Sequence[str]) -> dict[float, tuple[tuple[Group, ...], float]]:
    """Sample a model at all temperatures; returns the groups and the entropy of their texts."""
    from vllm import LLM

    llm = LLM(
        str(model),
        dtype="float32",
        max_num_seqs=256,
        max_model_len=1024,
        block_size=32,
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )
    try:
        return {each: _sampled(llm, texts, each) for each in TEMPERATURES}
    finally:
        llm.llm_engine.engine_core.shutdown()


def _sampled(llm: Any, texts: Sequence[str], temperature: float) -> tuple[tuple[Group, ...], float]:
    from vllm import SamplingParams

    params = SamplingParams(n=SAMPLES, temperature=temperature, max_tokens=MAX_TOKENS, logprobs=0)
    answers = llm.generate(list(texts), params, use_tqdm=False)
    surprises = [
        -one[token].logprob
        for answer in answers
        for sample in answer.outputs
        for token, one in zip(sample.token_ids, sample.logprobs, strict=True)
    ]
    groups = tuple(
        Group(
            prompt=tuple(answer.prompt_token_ids),
            responses=tuple(tuple(sample.token_ids) for sample in answer.outputs),
        )
        for answer in answers
    )
    return groups, statistics.mean(surprises)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        epochs = [sampled(policy, prompts()) for policy in policies(Path(folder))]
    for temperature in TEMPERATURES:
        trace = Trace(
            model="seedling",
            temperature=temperature,
            epochs=tuple(epoch[temperature][0] for epoch in epochs),
            entropies=tuple(epoch[temperature][1] for epoch in epochs),
        )
        trace.save(out / f"seedling-{temperature}.npz")
        print(f"{trace.num_responses} responses, {trace.num_tokens} tokens, {trace.entropies}")


if __name__ == "__main__":
    main()
