"""Benchmark: length bias if a group finishes after k of its n samples, by finish policy.

The lengths are those of the seedling's samples, drawn with Hugging Face; nothing is timed. The
finish policy is the service's. Samples run concurrently, one token per step, so they finish in the
order of their lengths.
"""

import argparse
import statistics
from collections.abc import Sequence

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from bench.harness.record import Record, Row, add_out
from examples.seedling.measure import (
    SAMPLES_PER_PROMPT,
    SEED,
    SEEDLING,
    held_out_problems,
    sample_groups,
)
from service.rollouts.groups.finish_policy import FinishPolicy, FinishPolicyName

POLICIES: Sequence[FinishPolicyName] = ("first", "random", "balanced_length")
NEEDED = (4, 6)


def recorded_lengths(num_prompts: int) -> list[list[int]]:
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(SEEDLING, padding_side="left")
    groups = sample_groups(model, words, held_out_problems(SEED, num_prompts))
    return [[sample.num_tokens for sample in group] for group in groups]


def simulate_policy(
    policy: FinishPolicyName, lengths: Sequence[int], *, num_required: int, seed: int
) -> tuple[float, int]:
    """Mean length of the samples that a policy selects, and number of steps until it finishes."""
    rule = FinishPolicy(policy, num_required=num_required, n=len(lengths), seed=seed)
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if rule.on_sample_end(index, lengths[index]):
            assert rule.selected is not None
            return statistics.mean(lengths[i] for i in rule.selected), lengths[index]
    raise AssertionError("a group that ended whole had never enough")


def row(policy: FinishPolicyName, num_required: int, groups: Sequence[Sequence[int]]) -> Row:
    found = [
        simulate_policy(policy, each, num_required=num_required, seed=i)
        for i, each in enumerate(groups)
    ]
    mean = statistics.mean(length for lengths in groups for length in lengths)
    longest = statistics.mean(max(lengths) for lengths in groups)
    bias = statistics.mean(length for length, _ in found) / mean - 1
    wait = statistics.mean(tokens for _, tokens in found) / longest
    return Row(
        what=f"{policy}, {num_required} of {SAMPLES_PER_PROMPT}",
        value=f"mean length {bias:+.1%}, finished after {wait:.0%} of the tokens of the longest",
    )


def record(groups: Sequence[Sequence[int]]) -> Record:
    mean = statistics.mean(length for lengths in groups for length in lengths)
    return Record(
        name="length_bias",
        claim="The mean length of the samples that a finish policy takes against that of all, "
        f"over {len(groups)} held-out problems (mean {mean:.1f} tokens).",
        rows=[row(policy, num_required, groups) for num_required in NEEDED for policy in POLICIES],
        raw={"lengths": groups},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    add_out(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = record(recorded_lengths(arguments.prompts))
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
