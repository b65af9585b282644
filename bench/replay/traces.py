"""Token ids of rollouts that were sampled without speculation, as traces for replays.

A lossless drafter changes the number of steps of a text, never its distribution. So a text sampled
without drafts is a valid sample of what speculation would have generated.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    model: str
    temperature: float
    epochs: tuple[tuple[Group, ...], ...]
    """The same prompts in each epoch, with responses of progressively trained weights."""
    entropies: tuple[float, ...]
    """Entropy of each epoch's text in nats per token, as the mean negative logprob."""

    @property
    def num_tokens(self) -> int:
        return sum(
            len(response)
            for groups in self.epochs
            for group in groups
            for response in group.responses
        )

    @property
    def num_responses(self) -> int:
        return sum(len(group.responses) for groups in self.epochs for group in groups)

    def save(self, path: Path) -> None:
        groups = [group for epoch in self.epochs for group in epoch]
        prompts = [group.prompt for group in self.epochs[0]]
        responses = [response for group in groups for response in group.responses]
        np.savez_compressed(
            path,
            model=np.array(self.model),
            temperature=np.array(self.temperature),
            entropies=np.array(self.entropies),
            shape=np.array([len(self.epochs), len(prompts), len(groups[0].responses)]),
            prompt_lengths=np.array([len(prompt) for prompt in prompts], np.uint16),
            prompts=np.concatenate([np.array(prompt, np.uint16) for prompt in prompts]),
            response_lengths=np.array([len(response) for response in responses], np.uint16),
            responses=np.concatenate([np.array(response, np.uint16) for response in responses]),
        )

    @classmethod
    def load(cls, path: Path) -> "Trace":
        with np.load(path) as open_store:
            num_epochs, num_prompts, n = open_store["shape"].tolist()
            prompts = _cut(open_store["prompts"], open_store["prompt_lengths"])
            responses = iter(_cut(open_store["responses"], open_store["response_lengths"]))
            return cls(
                model=str(open_store["model"]),
                temperature=float(open_store["temperature"]),
                entropies=tuple(open_store["entropies"].tolist()),
                epochs=tuple(
                    tuple(
                        Group(prompt=prompt, responses=tuple(next(responses) for _ in range(n)))
                        for prompt in prompts[:num_prompts]
                    )
                    for _ in range(num_epochs)
                ),
            )


def _cut(tokens: np.ndarray, lengths: np.ndarray) -> list[tuple[int, ...]]:
    ends = lengths.astype(np.int64).cumsum()
    return [
        tuple(tokens[end - length : end].tolist())
        for end, length in zip(ends, lengths.astype(np.int64), strict=True)
    ]
