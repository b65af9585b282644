"""A rollout of several turns, in which the model calls a tool and goes on with what that answers.

The row grows by token ids alone: what the model sampled is sent back as it came, and only the
tool's words are ever made into tokens. So every token that is trained on is one that was sampled,
with the log-probability that it was sampled with; the others are masked.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from examples.agent.calculator import call_calculator


class Tokenizer(Protocol):
    """The part of a tokenizer that is needed."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


@dataclass(slots=True, kw_only=True)
class Row:
    """Prompt and response. `sampled` tells the model's tokens from the tool's."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.response]

    def add(self, token_ids: list[int], logprobs: list[float], *, sampled: bool) -> None:
        self.response += token_ids
        self.logprobs += logprobs
        self.sampled += [sampled] * len(token_ids)


def rollout(
    http: httpx.Client, words: Tokenizer, problem: str, *, session: str, max_turns: int = 12
) -> Row:
    """One trajectory. All of its turns name the session: behind a router they meet one cache."""
    row = Row(prompt=words.encode(problem))
    [equals] = words.encode("=")
    for _ in range(max_turns):
        drawn, usage = _turn(http, row.tokens, stop=equals, session=session)
        content = drawn["logprobs"]["content"]
        row.add(drawn["token_ids"], [entry["logprob"] for entry in content], sampled=True)
        row.cached_tokens.append(usage["prompt_tokens_details"]["cached_tokens"])
        row.finish_reason = drawn["finish_reason"]
        answer = call_calculator(words.decode(row.response).rpartition("\n")[2])
        if answer is None:
            break
        told = words.encode(answer)
        row.add(told, [0.0] * len(told), sampled=False)
    return row


def _turn(http: httpx.Client, tokens: list[int], *, stop: int, session: str) -> tuple[Any, Any]:
    asked = {
        "token_ids": tokens,
        "sampling_params": {"max_tokens": 64, "stop_token_ids": [stop], "logprobs": 0},
    }
    answer = http.post("/inference/v1/generate", json=asked, headers={"X-Session-ID": session})
    answer.raise_for_status()
    body = answer.json()
    return body["choices"][0], body["usage"]
