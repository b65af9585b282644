"""`echo` of completions: the prompt before the response, with logprobs; used by lm-eval.

Only one sample per prompt is allowed, since a short request could otherwise return its prompt a
thousand times.
"""

from collections.abc import Sequence
from typing import Any

from engine.types import TopLogprobs
from service.compat import token_logprobs
from service.compat.bodies import CompatModel, Flag
from service.http.errors import InvalidRequest
from service.server import Server


class EchoFields(CompatModel):
    """Fields of a completion request that concern the prompt."""

    echo: Flag = False
    logprobs: token_logprobs.Count | None = None
    prompt_logprobs: token_logprobs.Count | None = None

    @property
    def num_of_prompts(self) -> int | None:
        """Number of top logprobs per prompt token; None: the prompts are not scored."""
        return self.logprobs if self.echo else self.prompt_logprobs


def check(fields: EchoFields, *, n: int, stream: bool, max_tokens: int | None) -> None:
    if not fields.echo:
        if max_tokens == 0:
            raise InvalidRequest.of_parameter("max_tokens", "0 is served with echo only")
        return
    if n > 1:
        raise InvalidRequest.of_parameter("echo", "n must be 1: send the prompt itself elsewhere")
    if stream:
        raise InvalidRequest.of_parameter("echo", "not in a stream")
    if fields.prompt_logprobs is not None:
        raise InvalidRequest.of_parameter("prompt_logprobs", "not with echo: use logprobs")


async def prompt_texts(server: Server, given: Any, prompts: Sequence[list[int]]) -> list[str]:
    """Texts of the prompts: as they were sent, or decoded from the token ids that were sent."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return list(given)
    return [await server.tokenizer.whole_text(prompt) for prompt in prompts]


def prompt_token_logprobs(
    prompt: Sequence[int], per_token: Sequence[TopLogprobs]
) -> list[float | None]:
    """Logprob of each prompt token; None for the first token."""
    found = [{r.token_id: r.logprob for r in candidates} for candidates in per_token]
    return [
        logprob_by_token.get(token) for token, logprob_by_token in zip(prompt, found, strict=True)
    ]
