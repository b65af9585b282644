"""Log-probabilities of other tokens than the sampled one, as OpenAI's and vLLM's clients read them.

They are counted against `engine.max_logprobs`. A prompt's are computed once for all of its samples,
as a score is: carried by a sample they would keep its siblings from their prefix. They come before
the samples: a refusal, or a drain that begins meanwhile, then costs no sample.
"""

from typing import Annotated, Any

from pydantic import Field

from engine.protocol import Place
from service.auth.keys import Key
from service.compat.rollout_adapter import Work
from service.http.errors import InvalidRequest
from service.rollouts.rollout import Rollout
from service.rollouts.scoring import Terms
from service.server import Server

Count = Annotated[int, Field(ge=0, le=1024)]
Prompts = list[list[Place]] | None


def check(server: Server, **counts: int | None) -> None:
    limit = server.engine.facts.max_logprobs
    for name, count in counts.items():
        if (count or 0) > limit:
            raise InvalidRequest.of_parameter(name, f"at most {limit} (engine.max_logprobs)")


def of_sample(rollout: Rollout, group: int, index: int) -> list[Place]:
    """None at any token where none were asked for."""
    return rollout.groups[group].likeliest.get(index, [])


async def of_prompts(server: Server, caller: Key, work: Work, count: int | None) -> Prompts:
    if count is None:
        return None
    terms = Terms(work.policy, work.adapter)
    return await server.scoring.prompts(work.prompts, count, owner=caller.name, terms=terms)


def listed(place: Place) -> list[dict[str, Any]]:
    """Its way for chats: the likeliest, whether the sampled one is among them or not."""
    return [
        {"token": f"token_id:{r.token_id}", "token_id": r.token_id, "logprob": r.logprob}
        for r in place[1:]
    ]


def numbered(prompts: Prompts, index: int) -> list[dict[str, Any] | None] | None:
    """vLLM's way for prompts: nothing for the first token."""
    if prompts is None:
        return None
    return [
        {f"{r.token_id}": {"logprob": r.logprob, "rank": r.rank} for r in place} or None
        for place in prompts[index]
    ]
