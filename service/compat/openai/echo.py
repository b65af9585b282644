"""Option `echo` of OpenAI's completions: the prompt and its logprobs before each response."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.types.samples import TopLogprobs
from service.compat import logprobs
from service.errors import InvalidRequest
from service.server import Server

MAX_ECHOED_TOKENS = 2**20
"""Maximum number of prompt tokens in a response, over all choices if there are several per prompt.

A short request could return its prompt a thousand times.
"""


def check_echo(prompts: Sequence[Sequence[int]], *, n: int) -> None:
    num_tokens = n * sum(map(len, prompts))
    if n > 1 and num_tokens > MAX_ECHOED_TOKENS:
        raise InvalidRequest.of_parameter(
            "echo",
            f"the response would hold {num_tokens} prompt tokens over all choices, and the limit "
            f"is {MAX_ECHOED_TOKENS}: send fewer prompts, or n: 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEcho:
    """Texts of a request's prompts, and the logprobs of their tokens if they were requested."""

    texts: Sequence[str]
    prompts: Sequence[list[int]]
    scores: logprobs.PromptLogprobs

    def token_ids(self, group: int) -> Iterator[int]:
        """Token ids that the logprobs of a prompt name."""
        if self.scores is not None:
            yield from self.prompts[group]
            yield from logprobs.top_token_ids(self.scores[group])

    def logprobs(
        self,
        group: int,
        token_ids: Sequence[int],
        sampled: Sequence[float],
        per_token: Sequence[TopLogprobs],
        name: logprobs.TokenName,
    ) -> dict[str, Any]:
        """Logprobs of a prompt and of the first sampled tokens, in one list."""
        assert self.scores is not None, "logprobs of what is echoed were computed"
        prompt, before = self.prompts[group], self.scores[group]
        return logprobs.completion_logprobs(
            [*prompt, *token_ids],
            [*_prompt_token_logprobs(prompt, before), *sampled],
            [*before, *(per_token or [[]] * len(token_ids))],
            name,
        )


async def prompt_echo(
    server: Server,
    given: Any,
    prompts: Sequence[list[int]],
    scores: logprobs.PromptLogprobs,
    *,
    is_truncated: bool,
) -> PromptEcho:
    """Prompts as the client sent them, or decoded if it sent token ids or truncates them."""
    texts = [given] if isinstance(given, str) else given
    if is_truncated or not isinstance(texts[0], str):
        texts = [await server.tokenizer.whole_text(prompt) for prompt in prompts]
    return PromptEcho(texts=texts, prompts=prompts, scores=scores)


def _prompt_token_logprobs(
    prompt: Sequence[int], per_token: Sequence[TopLogprobs]
) -> list[float | None]:
    """Logprob of each prompt token; None for the first token."""
    found = [{r.token_id: r.logprob for r in candidates} for candidates in per_token]
    return [
        logprob_by_token.get(token) for token, logprob_by_token in zip(prompt, found, strict=True)
    ]
