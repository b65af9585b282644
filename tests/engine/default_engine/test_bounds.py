"""Every numeric field of a rollout at and past its bounds, against the real engine.

vLLM has crashed on parameter values before (CVE-2026-34756, CVE-2026-114051), with /health still
reporting healthy. So after each request it must still sample.
"""

import json
import math
from typing import Any

import httpx
import pytest

from coppice.wire.base import MAX_TOKENS
from coppice.wire.rollouts import MAX_GROUPS, MAX_SAMPLES_PER_GROUP
from tests.engine.seedling import settings
from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

CONTEXT = settings().max_context_tokens or 0
LEAST = 5e-324  # the smallest positive float


def make_request(
    prompt: Any = None, sampling: Any = None, finish: Any = None, *, groups: int = 1, **rest: Any
) -> dict[str, Any]:
    """A small rollout with one change; `rest` belongs to its groups."""
    group = {"prompt": {"token_ids": [12, 13, 14]} if prompt is None else prompt, **rest}
    return {
        "groups": [group] * groups,
        "sampling": {"max_tokens": 2, **(sampling or {})},
        "finish": finish,
    }


def ids(*token_ids: int) -> dict[str, list[int]]:
    return {"token_ids": list(token_ids)}


ACCEPTED = {
    "n=1": make_request(n=1),
    "n at its bound": make_request(n=MAX_SAMPLES_PER_GROUP, sampling={"max_tokens": 1}),
    "groups at their bound": make_request(groups=MAX_GROUPS, sampling={"max_tokens": 1}),
    "seed=0": make_request(seed=0),
    "seed=2^62-1": make_request(seed=2**62 - 1, n=2),
    "token id 0": make_request(ids(0)),
    "a prompt that leaves one token": make_request(ids(*[12] * (CONTEXT - 1))),
    "max_tokens=1": make_request(sampling={"max_tokens": 1}),
    "max_tokens at its bound": make_request(sampling={"max_tokens": MAX_TOKENS}),
    "max_tokens at its bound without end": make_request(
        ids(*[12] * (CONTEXT - 40)), {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    ),
    "max_tokens=null": make_request(sampling={"max_tokens": None}),
    "temperature=0": make_request(sampling={"temperature": 0}),
    "temperature=-0.0": make_request(sampling={"temperature": -0.0}),
    "temperature least": make_request(sampling={"temperature": LEAST}),
    "temperature=1e-30": make_request(sampling={"temperature": 1e-30}),
    "temperature=1e-6": make_request(sampling={"temperature": 1e-6}),
    "temperature=2": make_request(sampling={"temperature": 2}),
    "temperature=0 with top_k and top_p": make_request(
        sampling={"temperature": 0, "top_k": 1, "top_p": LEAST}
    ),
    "top_p least": make_request(sampling={"top_p": LEAST}),
    "top_p=1": make_request(sampling={"top_p": 1}),
    "top_k=0": make_request(sampling={"top_k": 0}),
    "top_k=1": make_request(sampling={"top_k": 1}),
    "top_k at its bound": make_request(sampling={"top_k": 2**31 - 1}),
    "stop token id 0": make_request(sampling={"stop_token_ids": [0]}),
    "many stop token ids": make_request(sampling={"stop_token_ids": [20] * 256}),
    "priority at its lower bound": make_request() | {"priority": -(2**31)},
    "priority at its upper bound": make_request() | {"priority": 2**31 - 1},
    "finish.num_samples=1": make_request(n=4, finish={"num_samples": 1}),
    "finish.num_samples at its bound": make_request(
        n=MAX_SAMPLES_PER_GROUP,
        sampling={"max_tokens": 1},
        finish={"num_samples": MAX_SAMPLES_PER_GROUP},
    ),
    "finish.deadline_seconds least": make_request(finish={"deadline_seconds": LEAST}),
    "finish.deadline_seconds at its bound": make_request(finish={"deadline_seconds": 86_400}),
}

REJECTED = {
    "n=0": make_request(n=0),
    "n past its bound": make_request(n=MAX_SAMPLES_PER_GROUP + 1),
    "n=-1": make_request(n=-1),
    "n=2^64": make_request(n=2**64),
    "n=1.5": make_request(n=1.5),
    "n=true": make_request(n=True),
    "n='1'": make_request(n="1"),
    "n=1e400": make_request(n=10**400),
    "no group": make_request(groups=0),
    "groups past their bound": make_request(groups=MAX_GROUPS + 1),
    "seed=-1": make_request(seed=-1),
    "seed=2^62": make_request(seed=2**62),
    "no token": make_request(ids()),
    "token id -1": make_request(ids(-1)),
    "token id 2^31-1": make_request(ids(2**31 - 1)),
    "token id 2^31": make_request(ids(2**31)),
    "token id 2^63": make_request(ids(2**63)),
    "a prompt that leaves no token": make_request(ids(*[12] * CONTEXT)),
    "token ids past their bound": make_request(ids(*[12] * (MAX_TOKENS + 1))),
    "max_tokens=0": make_request(sampling={"max_tokens": 0}),
    "max_tokens past its bound": make_request(sampling={"max_tokens": MAX_TOKENS + 1}),
    "temperature below": make_request(sampling={"temperature": -LEAST}),
    "temperature above": make_request(sampling={"temperature": math.nextafter(2, 3)}),
    "temperature=nan": make_request(sampling={"temperature": math.nan}),
    "temperature=inf": make_request(sampling={"temperature": math.inf}),
    "top_p=0": make_request(sampling={"top_p": 0}),
    "top_p above": make_request(sampling={"top_p": math.nextafter(1, 2)}),
    "top_p=nan": make_request(sampling={"top_p": math.nan}),
    "top_k=-1": make_request(sampling={"top_k": -1}),
    "top_k past its bound": make_request(sampling={"top_k": 2**31}),
    "stop token id -1": make_request(sampling={"stop_token_ids": [-1]}),
    "stop token id 2^31": make_request(sampling={"stop_token_ids": [2**31]}),
    "stop token ids past their bound": make_request(sampling={"stop_token_ids": [20] * 257}),
    "priority below": make_request() | {"priority": -(2**31) - 1},
    "priority above": make_request() | {"priority": 2**31},
    "finish.num_samples=0": make_request(finish={"num_samples": 0}),
    "finish.num_samples past its bound": make_request(
        finish={"num_samples": MAX_SAMPLES_PER_GROUP + 1}
    ),
    "finish.num_samples past n": make_request(n=2, finish={"num_samples": 3}),
    "finish.deadline_seconds=0": make_request(finish={"deadline_seconds": 0}),
    "finish.deadline_seconds past": make_request(
        finish={"deadline_seconds": math.nextafter(86_400, 1e9)}
    ),
    "finish.deadline_seconds=nan": make_request(finish={"deadline_seconds": math.nan}),
}


REFUSALS = {"invalid_request", "invalid_json", "prompt_too_long", "body_too_large"}


async def post(served: Served, request: dict[str, Any]) -> httpx.Response:
    return await served.http.post("/v1/rollouts", content=json.dumps(request))


def check(answer: httpx.Response) -> None:
    """Asserts the number of samples, and a finite log-probability per token."""
    assert answer.status_code == 200, answer.text
    for group in answer.json()["groups"]:
        for sample in group["samples"]:
            assert len(sample["token_ids"]) == len(sample["logprobs"])
            assert all(math.isfinite(p) and p <= 0 for p in sample["logprobs"])


async def check_samples(served: Served) -> None:
    answer = await post(served, make_request(n=2))
    check(answer)
    assert all(s["token_ids"] for s in answer.json()["groups"][0]["samples"])
    assert (await served.http.get("/livez")).status_code == 200


@pytest.mark.parametrize("request_", ACCEPTED.values(), ids=ACCEPTED)
async def test_value_within_its_bounds_is_answered(
    served: Served, request_: dict[str, Any]
) -> None:
    answer = await post(served, request_)
    check(answer)
    wanted = [group.get("n", 1) for group in request_["groups"]]
    assert [len(group["samples"]) for group in answer.json()["groups"]] == wanted
    await check_samples(served)


@pytest.mark.parametrize("request_", REJECTED.values(), ids=REJECTED)
async def test_value_past_its_bounds_is_refused(served: Served, request_: dict[str, Any]) -> None:
    answer = await post(served, request_)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["code"] in REFUSALS
    await check_samples(served)


LOGPROB_FIELDS = ("top_logprobs", "prompt_logprobs")


@pytest.mark.parametrize("field", LOGPROB_FIELDS)
async def test_logprobs_of_the_whole_vocabulary(served: Served, field: str) -> None:
    vocabulary = served.server.engine.info.vocab_size
    check(await post(served, make_request() | {field: vocabulary}))
    refused = await post(served, make_request() | {field: vocabulary + 1})
    assert refused.status_code == 422
    assert f"at most {vocabulary}" in refused.text
    await check_samples(served)


@pytest.mark.parametrize("k", [0, 1])
async def test_scores_of_the_whole_vocabulary(served: Served, k: int) -> None:
    vocabulary = served.server.engine.info.vocab_size
    item = {"prompt": ids(12, 13), "responses": [[14, 15]]}
    wanted = {"items": [item], "top_logprobs": vocabulary + k}
    answer = await served.http.post("/v1/score", json=wanted)
    assert answer.status_code == (422 if k else 200), answer.text
    await check_samples(served)


@pytest.mark.parametrize("beyond", [0, 1, 2**31 - 1])
async def test_token_ids_at_the_end_of_the_vocabulary(served: Served, beyond: int) -> None:
    """IDs within the wire's bounds but outside the vocabulary are refused, not looked up."""
    vocabulary = served.server.engine.info.vocab_size
    last = await post(served, make_request(ids(vocabulary - 1)))
    check(last)
    past = min(vocabulary + beyond, 2**31 - 1)
    assert (await post(served, make_request(ids(past)))).status_code == 422
    stop = await post(served, make_request(sampling={"stop_token_ids": [past]}))
    assert stop.status_code in {200, 422}
    await check_samples(served)
