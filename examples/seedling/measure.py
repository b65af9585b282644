"""Measures reward and response length of the small test model (seedling) on held-out problems.

Prints a table and writes the same values to measured.json next to the weights. The length of a
response includes its end token, as in a server's answer.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, quantiles

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.seedling import arithmetic

SEEDLING = Path(__file__).parent / "model"
SEED = 11
NUM_PROMPTS = 256
SAMPLES_PER_PROMPT = 8
MAX_TOKENS = 512
PROMPTS_PER_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    num_tokens: int
    reward: float
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    pass_at_1: float
    mixed_groups: float
    """Fraction of prompts with both right and wrong samples."""
    p50_tokens: float
    p95_tokens: float
    p95_over_p50: float
    truncated: float


def figures(groups: Sequence[Sequence[Sample]]) -> Figures:
    samples = [sample for group in groups for sample in group]
    cuts = quantiles([sample.num_tokens for sample in samples], n=20)
    p50, p95 = cuts[9], cuts[18]
    return Figures(
        pass_at_1=round(mean(sample.reward for sample in samples), 4),
        mixed_groups=round(mean(len({s.reward for s in group}) == 2 for group in groups), 4),
        p50_tokens=p50,
        p95_tokens=p95,
        p95_over_p50=round(p95 / p50, 2),
        truncated=round(mean(not sample.ended for sample in samples), 4),
    )


def held_out_problems(seed: int, num_prompts: int) -> list[arithmetic.Problem]:
    rng = random.Random(seed)
    return [arithmetic.draw(rng, held_out=True) for _ in range(num_prompts)]


def sample_groups(
    model: Qwen3ForCausalLM,
    words: PreTrainedTokenizerFast,
    problems: Sequence[arithmetic.Problem],
) -> list[list[Sample]]:
    # Sorted, so that short prompts do not share a batch with a single long response.
    prompts = sorted((problem.prompt for problem in problems), key=len)
    groups = []
    for start in range(0, len(prompts), PROMPTS_PER_BATCH):
        groups += _sample_batch(model, words, prompts[start : start + PROMPTS_PER_BATCH])
    return groups


def _sample_batch(
    model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast, prompts: list[str]
) -> list[list[Sample]]:
    batch = words(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    rows = model.generate(
        **batch, max_new_tokens=MAX_TOKENS, num_return_sequences=SAMPLES_PER_PROMPT
    )
    responses = rows[:, batch["input_ids"].shape[1] :].tolist()
    return [
        [
            _judge(words, prompt, response)
            for response in responses[i * SAMPLES_PER_PROMPT : (i + 1) * SAMPLES_PER_PROMPT]
        ]
        for i, prompt in enumerate(prompts)
    ]


def _judge(words: PreTrainedTokenizerFast, prompt: str, response: list[int]) -> Sample:
    ended = words.eos_token_id in response
    num_tokens = response.index(words.eos_token_id) + 1 if ended else len(response)
    text = words.decode(response[:num_tokens], skip_special_tokens=True)
    return Sample(
        num_tokens=num_tokens,
        reward=arithmetic.reward(prompt, text) if ended else 0.0,
        ended=ended,
    )


def table(measured: Figures) -> str:
    return "\n".join(f"{name:<14}{value:>9}" for name, value in asdict(measured).items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the seedling on held-out problems.")
    parser.add_argument("--model", type=Path, default=SEEDLING)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    words = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    measured = figures(sample_groups(model, words, held_out_problems(SEED, NUM_PROMPTS)))
    print(table(measured))
    record = {
        **asdict(measured),
        "num_prompts": NUM_PROMPTS,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "max_tokens": MAX_TOKENS,
        "seed": SEED,
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -m examples.seedling.measure",
    }
    (args.model / "measured.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
