"""Rollouts that export prompt KV, and their groups and handles."""

from typing import Any

from coppice.wire.prompt_kv import KvHandle
from coppice.wire.rollouts import GroupAnswer, RolloutAnswer
from tests.serving import Served

PROMPT = list(range(10, 30))


def rollout_body(*prompts: list[int], lease_seconds: float = 60.0, **rest: Any) -> dict[str, Any]:
    return {
        "groups": [{"prompt": {"token_ids": prompt}, "n": 2} for prompt in prompts or [PROMPT]],
        "sampling": {"max_tokens": 4},
        "kv": {"lease_seconds": lease_seconds},
        **rest,
    }


async def export_groups(served: Served, *prompts: list[int], **rest: Any) -> list[GroupAnswer]:
    answer = await served.http.post("/v1/rollouts", json=rollout_body(*prompts, **rest))
    assert answer.status_code == 200, answer.text
    served.server.prompt_kv.check()
    return RolloutAnswer.model_validate_json(answer.content).groups


async def export_handle(served: Served, prompt: list[int] = PROMPT, **rest: Any) -> KvHandle:
    (group,) = await export_groups(served, prompt, **rest)
    assert group.kv is not None, group.kv_reason
    return group.kv
