"""The loop in docs/concepts/training.md runs as printed, and learns."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coppice import Group, RolloutResult, Sample, Support, Usage, VersionSpan
from coppice.train import TrainingGroup
from tests.train.models import VOCABULARY, tiny_model

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs" / "concepts" / "training.md"
WANTED = 7


class LocalRollouts:
    """Samples from a local model, whose weights change only by publish_weights."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.version = "initial"
        self.rewards: list[float] = []

    def rollout(self, prompts: list[Tensor], *, n: int, max_tokens: int) -> RolloutResult:
        groups = tuple(self._group(index, prompt, n) for index, prompt in enumerate(prompts))
        tokens = [sample.token_ids for group in groups for sample in group.samples]
        self.rewards.append(float(sum((ids == WANTED).mean() for ids in tokens) / len(tokens)))
        usage = Usage(num_prompt_tokens=0, num_generated_tokens=0, num_samples=len(tokens))
        return RolloutResult(id="r", outcome="done", groups=groups, usage=usage)

    def publish_weights(self, version: str, state: dict[str, Tensor]) -> None:
        self.version = version
        self.model.load_state_dict(state)

    def _group(self, index: int, prompt: Tensor, n: int) -> Group:
        return Group(
            id=str(index),
            index=index,
            outcome="done",
            exact=True,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=0,
            samples=self._samples(prompt, n),
        )

    @torch.no_grad()
    def _samples(self, prompt: Tensor, n: int) -> tuple[Sample, ...]:
        """Samples of 4 to 6 tokens."""
        tokens, logprobs = prompt.repeat(n, 1), []
        for _ in range(6):
            logits = self.model(input_ids=tokens, use_cache=False).logits[:, -1]
            token = torch.multinomial(logits.softmax(-1), 1)
            logprobs.append(logits.log_softmax(-1).gather(1, token))
            tokens = torch.cat([tokens, token], 1)
        return tuple(
            self._sample(row, tokens[row, len(prompt) :], torch.cat(logprobs, 1)[row])
            for row in range(n)
        )

    def _sample(self, index: int, tokens: Tensor, logprobs: Tensor) -> Sample:
        length = 4 + index % 3
        return Sample(
            index=index,
            token_ids=tokens[:length].numpy(),
            logprobs=logprobs[:length].numpy(),
            text=None,
            finish_reason="length",
            versions=(VersionSpan(version=self.version, start=0, end=length),),
        )


def loop() -> Any:
    [block] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, DOCUMENT, "exec"), names)
    return names["train"]


def test_loop_has_twenty_lines() -> None:
    [block] = re.findall(r"def train.*?```", DOCUMENT.read_text(), re.DOTALL)
    assert len(block.splitlines()) - 1 <= 20


def test_loop_learns() -> None:
    model = tiny_model(initializer_range=0.05)
    rollouts = LocalRollouts(tiny_model(initializer_range=0.05))
    torch.manual_seed(0)
    loop()(
        rollouts,
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        draw_prompts=lambda: [torch.randint(0, 97, (5 + row,)) for row in range(3)],
        reward=lambda prompt, response: float((response == WANTED).double().mean()),
        steps=16,
    )
    assert rollouts.version == "step-15"
    assert sum(rollouts.rewards[-4:]) > sum(rollouts.rewards[:4]) + 1


def test_training_group_is_made_from_the_answer_of_a_rollout() -> None:
    rollouts = LocalRollouts(tiny_model())
    prompt = torch.arange(5)
    result = rollouts.rollout([prompt], n=3, max_tokens=8)
    group = TrainingGroup.of(prompt.tolist(), result.groups[0])
    assert group.lengths == (4, 5, 6)
    assert group.logprobs is not None
    for sample, response, logprobs in zip(
        result.groups[0].samples, group.responses, group.logprobs, strict=True
    ):
        assert response.tolist() == sample.token_ids.tolist()
        assert logprobs.tolist() == sample.logprobs.tolist()


def test_prompt_of_another_length_than_on_the_server_is_refused() -> None:
    rollouts = LocalRollouts(tiny_model())
    result = rollouts.rollout([torch.arange(5)], n=1, max_tokens=8)
    with pytest.raises(ValueError, match="counted 5 prompt tokens, not 4"):
        TrainingGroup.of([1, 2, 3, 4], result.groups[0])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"prompt": torch.zeros(0)}, "prompt must have at least one token"),
        ({"responses": ()}, "group must have at least one response"),
        ({"logprobs": (torch.zeros(2),)}, "differs from the number of tokens"),
    ],
)
def test_inconsistent_group_is_refused(parts: dict[str, Any], why: str) -> None:
    known: dict[str, Any] = {"prompt": torch.zeros(2), "responses": (torch.zeros(3),)}
    with pytest.raises(ValueError, match=why):
        TrainingGroup(**known | parts)


class ConstrainedRollouts(LocalRollouts):
    """Samples whose tokens have the whole vocabulary as support, at temperature 1."""

    def rollout(
        self, prompts: list[Tensor], *, n: int, max_tokens: int, **options: Any
    ) -> RolloutResult:
        assert options.pop("return_support")
        result = super().rollout(prompts, n=n, max_tokens=max_tokens)
        [group] = result.groups
        samples = tuple(
            replace(sample, support=Support((b"\x00",) * len(sample.token_ids), VOCABULARY))
            for sample in group.samples
        )
        return replace(result, groups=(replace(group, samples=samples),))


def test_support_example_runs() -> None:
    document = DOCUMENT.parents[1] / "reference" / "sampling-support.md"
    [block] = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    neutral = block.replace("0.8", "1.0").replace("0.7", "1.0").replace("1.5", "0.0")
    model = tiny_model()
    names = {"model": model, "rollouts": ConstrainedRollouts(model), "prompt": torch.arange(9)}
    exec(compile(neutral, document, "exec"), names)
    ratios: Any = names["ratios"]
    assert torch.allclose(ratios, torch.ones_like(ratios), atol=1e-4)
