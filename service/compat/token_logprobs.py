"""Log-probabilities of other tokens than the sampled one, as OpenAI's and vLLM's clients read them.

They are counted against `engine.max_logprobs`. A prompt's are computed once for all of its samples,
as a score is: carried by a sample they would keep its siblings from their prefix. They come before
the samples: a refusal, or a drain that begins meanwhile, then costs no sample.
"""

from typing import Annotated, Any

from pydantic import Field

from engine.protocol import TopLogprobs
from service.auth.keys import ApiKey
from service.compat.rollout_adapter import SamplingJob
from service.http.errors import InvalidRequest
from service.rollouts.rollout import Rollout
from service.rollouts.scoring import ScoringOptions
from service.server import Server

Count = Annotated[int, Field(ge=0, le=1024)]
MAX_PROMPT_LOGPROBS = 2**20
"""In one response, as many times as it repeats them. About 50 bytes of JSON each."""
PromptLogprobs = list[list[TopLogprobs]] | None


def check(server: Server, **counts: int | None) -> None:
    limit = server.engine.info.max_logprobs
    for name, count in counts.items():
        if (count or 0) > limit:
            raise InvalidRequest.of_parameter(name, f"at most {limit} (engine.max_logprobs)")


def sample_logprobs(rollout: Rollout, group: int, index: int) -> list[TopLogprobs]:
    """None at any token where none were asked for."""
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
    """Every choice repeats its prompt's, so a small request could make a response of gigabytes."""
    num_values = sum(map(len, job.prompts)) * (count + 1) * job.n
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest.of_parameter(
            "prompt_logprobs",
            f"{num_values} log-probabilities, over all choices; at most {MAX_PROMPT_LOGPROBS}: "
            "send fewer prompts, n: 1, or POST /v1/score",
        )


def as_chat_logprobs(candidates: TopLogprobs) -> list[dict[str, Any]]:
    """Its way for chats: the likeliest, whether the sampled one is among them or not."""
    return [
        {"token": f"token_id:{r.token_id}", "token_id": r.token_id, "logprob": r.logprob}
        for r in candidates[1:]
    ]


def as_prompt_logprobs(prompts: PromptLogprobs, index: int) -> list[dict[str, Any] | None] | None:
    """vLLM's way for prompts: nothing for the first token."""
    if prompts is None:
        return None
    return [
        {f"{r.token_id}": {"logprob": r.logprob, "rank": r.rank} for r in candidates} or None
        for candidates in prompts[index]
    ]
