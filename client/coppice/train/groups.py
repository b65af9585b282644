"""A prompt and its responses as tensors of token ids."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coppice.results import Group


# Tensor's == is elementwise, so these dataclasses compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingGroup:
    """One prompt and its responses.

    `logprobs`, if given, are those that the responses were sampled with. A response may be empty,
    for example if it was aborted; it does not contribute to the loss.
    """

    prompt: Tensor
    responses: tuple[Tensor, ...]
    logprobs: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("a prompt has at least one token")
        if not self.responses:
            raise ValueError("a group has at least one response")
        if self.logprobs and self.lengths != tuple(len(logprobs) for logprobs in self.logprobs):
            raise ValueError("the logprobs are not as many as the tokens of the responses")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens per response."""
        return tuple(len(response) for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all responses."""
        return sum(self.lengths)

    @classmethod
    def of(cls, prompt: Any, group: Group) -> "TrainingGroup":
        """Builds it from the prompt's token ids (list, array or tensor) and a rollout's group."""
        return cls(
            prompt=prompt_of(prompt, group),
            responses=tuple(torch.from_numpy(sample.token_ids) for sample in group.samples),
            logprobs=tuple(torch.from_numpy(sample.logprobs) for sample in group.samples),
        )


def prompt_of(prompt: Any, group: Group) -> Tensor:
    """Returns the token ids. Raises ValueError if the server counted another number of them."""
    prompt_ids = torch.as_tensor(prompt, dtype=torch.int64)
    if len(prompt_ids) != group.num_prompt_tokens:
        raise ValueError(
            f"the server saw {group.num_prompt_tokens} prompt tokens, not {len(prompt_ids)}"
        )
    return prompt_ids
