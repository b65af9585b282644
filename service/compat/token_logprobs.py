"""Top-k logprobs of response and prompt tokens, as clients of OpenAI and vLLM request them.

The number per token is limited by `engine.max_logprobs`. Prompt logprobs are computed once for all
samples of a prompt, by scoring it: computing them in the samples' requests would keep these from
sharing the cached prefix. They are computed before the samples, so that a rejection, or a drain
that begins meanwhile, costs no sample.
"""

from typing import Annotated, Any

from pydantic import Field

from engine.types import TopLogprobs
from service.auth.keys import ApiKey
from service.compat.rollout_adapter import SamplingJob
from service.http.errors import InvalidRequest
from service.rollouts.rollout import Rollout
from service.rollouts.scoring import ScoringOptions
from service.server import Server

Count = Annotated[int, Field(ge=0, le=1024)]
MAX_PROMPT_LOGPROBS = 2**20
"""Limit per response, counting each repetition; a value takes about 50 bytes of JSON."""
PromptLogprobs = list[list[TopLogprobs]] | None


def check(server: Server, **counts: int | None) -> None:
    limit = server.engine.info.max_logprobs
    for name, count in counts.items():
        if (count or 0) > limit:
            raise InvalidRequest.of_parameter(name, f"at most {limit} (engine.max_logprobs)")


def sample_logprobs(rollout: Rollout, group: int, index: int) -> list[TopLogprobs]:
    """Top logprobs of a sample's tokens; empty if none were requested."""
    return rollout.groups[group].top_logprobs.get(index, [])


async def compute_prompt_logprobs(
    server: Server, caller: ApiKey, job: SamplingJob, count: int | None
) -> PromptLogprobs:
    if count is None:
        return None
    _check_size(job, count)
    options = ScoringOptions(job.policy, job.adapter)
    return await server.scoring.prompts(job.prompts, count, owner=caller.name, options=options)


def _check_size(job: SamplingJob, count: int) -> None:
    """Reject a request whose response would be too large.

    Every choice repeats the logprobs of its prompt, so a small request could produce a response of
    gigabytes.
    """
    num_values = sum(map(len, job.prompts)) * (count + 1) * job.n
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest.of_parameter(
            "prompt_logprobs",
            f"{num_values} log-probabilities, over all choices; at most {MAX_PROMPT_LOGPROBS}: "
            "send fewer prompts, n: 1, or POST /v1/score",
        )


def as_chat_logprobs(candidates: TopLogprobs) -> list[dict[str, Any]]:
    """Top-k logprobs in vLLM's chat format, with or without the sampled token.

    The sampled token is the first candidate, and is left out unless it is one of the top k.
    """
    return [
        {"token": f"token_id:{r.token_id}", "token_id": r.token_id, "logprob": r.logprob}
        for r in candidates[1:]
    ]


def as_prompt_logprobs(prompts: PromptLogprobs, index: int) -> list[dict[str, Any] | None] | None:
    """Prompt logprobs in vLLM's format: None for the first token."""
    if prompts is None:
        return None
    return [
        {f"{r.token_id}": {"logprob": r.logprob, "rank": r.rank} for r in candidates} or None
        for candidates in prompts[index]
    ]
