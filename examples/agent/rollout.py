"""Multi-turn rollout in which the model calls a tool and continues after its output.

The conversation is kept as token ids: sampled tokens are sent back unchanged, and only the tool's
output is tokenized. Every token in the loss is therefore one that was sampled, with its sampling
logprob; the other tokens are masked.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from examples.agent.calculator import call_calculator


class Tokenizer(Protocol):
    """Interface of the tokenizer that a rollout needs, as in transformers."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str: ...


@dataclass(slots=True, kw_only=True)
class Row:
    """Training data of one trajectory: prompt, response, and logprobs of the response tokens.

    `sampled` is False for tokens of the tool, which are masked in the loss. `cached_tokens` has the
    number of cached prompt tokens of each turn.
    """

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
    """Runs one multi-turn trajectory: generates, calls the tool, and continues with its output.

    All turns have the same session id, so a load balancer routes them to the replica that has
    cached the earlier turns.
    """
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
