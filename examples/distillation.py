"""On-policy distillation: `python -m examples.distillation STUDENT_URL TEACHER_URL`.

The teacher serves the bundled small model. The student starts as a copy of it with noise in its
weights. It samples responses, and the teacher returns its logprobs of the tokens that were most
probable for the student. The loss is the reverse KL divergence over these candidates.
"""

import random
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from coppice import Group, Rollouts, Score, WeightsConstraint
from examples.seedling import arithmetic
from examples.seedling.enlarge import SEEDLING

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS, TOP_K, NOISE = 10, 8, 4, 48, 16, 0.3
TOKENIZER = AutoTokenizer.from_pretrained(SEEDLING)


def make_student() -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data += NOISE * weight.std() * torch.randn_like(weight)
    return model


def draw_prompts(rng: random.Random, *, held_out: bool) -> list[list[int]]:
    problems = [arithmetic.draw(rng, held_out=held_out) for _ in range(NUM_PROMPTS)]
    return [TOKENIZER.encode(problem.prompt) for problem in problems]


def sample_and_score(
    student: Rollouts, teacher: Rollouts, prompts: list[list[int]], version: str, seed: int
) -> list[tuple[list[int], Group, Score]]:
    """Samples of the student, with the teacher's logprobs of the student's candidates."""
    on_policy = WeightsConstraint(exact_version=version)
    options: Any = {"n": NUM_SAMPLES, "max_tokens": MAX_TOKENS, "seed": seed, "weights": on_policy}
    result = student.rollout(prompts, top_logprobs=TOP_K, **options)
    items: list[Any] = []
    for prompt, group in zip(prompts, result.groups, strict=True):
        tables = [sample.top_logprobs for sample in group.samples]
        candidates = [table.padded()[0] for table in tables if table is not None]
        items.append((prompt, [sample.token_ids for sample in group.samples], candidates))
    return list(zip(prompts, result.groups, teacher.score(items), strict=True))


def divergences(model: Any, prompt: list[int], group: Group, score: Score) -> Tensor:
    """KL(student || teacher) over the candidates, at every sampled token of a group."""
    found = []
    for sample, table in zip(group.samples, score.given_logprobs or (), strict=True):
        tokens = torch.tensor([*prompt, *sample.token_ids[:-1]])
        candidates, teacher = map(torch.from_numpy, table.padded())
        logits = model(input_ids=tokens.unsqueeze(0)).logits[0, len(prompt) - 1 :]
        own, its = logits.gather(1, candidates).log_softmax(-1), teacher.log_softmax(-1)
        found.append((own.exp() * (own - its)).sum(-1))
    return torch.cat(found)


def main(student_url: str, teacher_url: str) -> None:
    rng, model = random.Random(1), make_student()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    held_out = draw_prompts(random.Random(2), held_out=True)
    with Rollouts(student_url) as student, Rollouts(teacher_url) as teacher:
        first = student.status().weights_sequence
        for step in range(NUM_STEPS + 1):
            version = f"student-{first + step}"
            student.publish_weights(version, model.state_dict())
            drawn = held_out if step in (0, NUM_STEPS) else draw_prompts(rng, held_out=False)
            scored = sample_and_score(student, teacher, drawn, version, seed=step)
            loss = torch.cat([divergences(model, *each) for each in scored]).mean()
            print(f"{'held-out' if drawn is held_out else f'step {step}'}: KL {loss.item():.3f}")
            if drawn is not held_out:
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
