"""A state that no replica would send is refused with a clear error, and changes nothing."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from tests.service.cluster.test_handoff import (
    LONG,
    PROMPT,
    engine_of,
    offered_state,
    replicas,
    see_each_other,
)
from tests.service.cluster.test_handoff_results import KEY
from tests.service.test_rollouts import body, group
from tests.serving import Served

pytestmark = pytest.mark.slow

State = dict[str, Any]
GIVEN = ("token_ids", "logprobs", "versions")
FINISHED: State = {
    "index": 1,
    "token_ids": [3, 4],
    "logprobs": [-1.0, -1.0],
    "finish_reason": "stop",
    "versions": [{"version": "v0", "start": 0, "end": 2}],
}
HEAD: State = {
    "id": "1",
    "index": 1,
    "outcome": "done",
    "num_prompt_tokens": 3,
    "num_cached_tokens": 0,
}
SEGMENT: State = FINISHED | {"id": "1.0", "depth": 0, "finish_reason": "length"}
TABLE: State = {"offsets": [0, 1], "token_ids": [3], "logprobs": [-1.0]}
EXPERTS: State = {"start": 0, "shape": [3, 1, 1], "dtype": "uint8", "data": "AAAA"}
SUPPORT: State = {"vocab_size": 256, "lengths": [1], "data": "AA=="}


def unfinished(state: State) -> State:
    sample: State = state["groups"][0]["samples"][0]
    return sample


def finished(state: State, **change: Any) -> None:
    """Add a finished sample of the group that has not ended."""
    state["records"].append({"type": "sample", "group": 0, "sample": FINISHED | change})


def ended(state: State, *later: State, **change: Any) -> None:
    """Add a second group, which has ended, and `later` records."""
    state["request"]["groups"] *= 2
    state["records"] += [{"type": "group", "group": HEAD | change}, *later]


def segment(state: State, **change: Any) -> None:
    """Make the state that of a tree that has ended."""
    state["records"].append({"type": "segment", "group": 0, "segment": SEGMENT | change})
    state["records"].append({"type": "group", "group": HEAD | {"index": 0, "leaves": ["0.0"]}})
    state.update(request=None, groups=[])


FORGED: dict[str, Callable[[State], object]] = {
    "NaN as a logprob": lambda s: unfinished(s).update(logprobs=[math.nan]),
    "too few logprobs": lambda s: unfinished(s).update(logprobs=[]),
    "unwanted raw logprobs": lambda s: unfinished(s).update(raw_logprobs=[-1.0]),
    "NaN as a raw logprob": lambda s: unfinished(s).update(raw_logprobs=[math.nan]),
    "a token outside the vocabulary": lambda s: unfinished(s).update(token_ids=[256]),
    "a huge token": lambda s: unfinished(s).update(token_ids=[2**70]),
    "a negative token": lambda s: unfinished(s).update(token_ids=[-1]),
    "more tokens than max_tokens": lambda s: unfinished(s).update(
        token_ids=[3] * 12,
        logprobs=[-1.0] * 12,
        versions=[{"version": "v0", "start": 0, "end": 12}],
    ),
    "versions of too few tokens": lambda s: unfinished(s).update(versions=[]),
    "versions of too many tokens": lambda s: unfinished(s)["versions"][0].update(end=2),
    "a version that is no label": lambda s: unfinished(s)["versions"][0].update(version="/"),
    "an endless version": lambda s: unfinished(s)["versions"][0].update(version="v" * 10_000),
    "KV versions after the tokens": lambda s: unfinished(s).update(
        kv_versions=[{"version": "v0", "start": 0, "end": 1, "first_token": 5}]
    ),
    "unwanted supports": lambda s: unfinished(s).update(support=SUPPORT),
    "missing supports": lambda s: s["request"].update(return_support=True),
    "a sample twice": lambda s: s["groups"][0]["samples"].append(unfinished(s)),
    "an index beyond n": lambda s: unfinished(s).update(index=1),
    "a huge index": lambda s: unfinished(s).update(index=2**70),
    "a negative index": lambda s: unfinished(s).update(index=-1),
    "another prompt": lambda s: s["groups"][0].update(prompt_token_ids=[1, 2]),
    "a prompt beyond the context": lambda s: (
        s["groups"][0].update(prompt_token_ids=[1] * 100_000),
        s["request"]["groups"][0]["prompt"].update(token_ids=[1] * 100_000),
    ),
    "durations of no sample": lambda s: s["groups"][0].update(sample_seconds=[1.0]),
    "an infinite duration": lambda s: s["groups"][0].update(elapsed_seconds=1e999),
    "a group twice": lambda s: s["groups"].append(s["groups"][0]),
    "a group of another request": lambda s: s["groups"][0].update(index=4095),
    "a huge group": lambda s: s["groups"][0].update(index=2**70),
    "too many samples": lambda s: s["request"]["groups"][0].update(n=1024),
    "continue_from": lambda s: s["request"].update(
        continue_from={"samples": [{key: unfinished(s)[key] for key in GIVEN}]}
    ),
    "branching": lambda s: s["request"].update(
        branching={"mode": "interval", "interval": 32, "max_leaves": 2, "max_depth": 1}
    ),
    "no request": lambda s: s.update(request=None),
    "no groups": lambda s: s.update(groups=[]),
    "more finished samples than n": finished,
    "a finished sample of no group": lambda s: s["records"].append(
        {"type": "sample", "group": 7, "sample": FINISHED}
    ),
    "an unfinished sample that has finished": lambda s: finished(s, index=0),
    "an ended group of no request": lambda s: s["records"].append({"type": "group", "group": HEAD}),
    "an ended group with negative counts": lambda s: ended(s, num_prompt_tokens=-1),
    "an ended group with huge counts": lambda s: ended(s, num_prompt_tokens=2**70),
    "an ended group with a token outside": lambda s: ended(s, prompt_token_ids=[256]),
    "a sample after the end of its group": lambda s: ended(
        s, {"type": "sample", "group": 1, "sample": FINISHED}
    ),
    "a group that ends twice": lambda s: ended(s, {"type": "group", "group": HEAD}),
    "segments of a running rollout": lambda s: s["records"].append(
        {"type": "segment", "group": 0, "segment": SEGMENT | {"id": "0.0"}}
    ),
    "a segment of another tree": segment,
    "a segment without a parent": lambda s: segment(s, id="0.0", parent="0.1"),
    "a segment with a token outside": lambda s: segment(s, id="0.0", token_ids=[3, 256]),
    "a segment with NaN": lambda s: segment(s, id="0.0", entropy=[1.0, math.nan]),
    "a key with another digest": lambda s: s.update(key={"key": "k", "fingerprint": "0"}),
    "a key with a line break": lambda s: s.update(key={"key": "move\nx", "fingerprint": "0" * 64}),
    "no version of the state": lambda s: s.pop("state_version"),
    "unwanted top logprobs": lambda s: unfinished(s).update(top_logprobs=TABLE),
    "missing top logprobs": lambda s: s["request"].update(top_logprobs=1),
    "missing given logprobs": lambda s: s["request"].update(logprob_token_ids=[1]),
    "unwanted experts": lambda s: unfinished(s).update(routed_experts=EXPERTS),
    "experts of other positions": lambda s: (
        s["request"].update(return_routed_experts=True),
        unfinished(s).update(routed_experts=EXPERTS | {"start": 1}),
    ),
    "an id of no replica": lambda s: s.update(id="x"),
    "a source that is not registered": lambda s: s.update(source="0" * 12),
}
FINISHED_CHANGES: dict[str, State] = {
    "NaN": {"logprobs": [-1.0, math.nan]},
    "too few logprobs": {"logprobs": [-1.0]},
    "a token outside": {"token_ids": [3, 256]},
    "a negative token": {"token_ids": [3, -1]},
    "a huge token": {"token_ids": [3, 2**70]},
    "too few raw logprobs": {"raw_logprobs": [-1.0]},
    "a gap of versions": {"versions": [{"version": "v0", "start": 1, "end": 2}]},
    "supports of other tokens": {"support": SUPPORT},
    "supports without data": {"support": SUPPORT | {"lengths": [1, 1], "data": ""}},
    "supports of another vocabulary": {"support": SUPPORT | {"vocab_size": 1}},
    "a huge index": {"index": 2**70},
    "an index beyond n": {"index": 2},
}


async def refused(a: Served, b: Served, state: State) -> httpx.Response:
    """Response to a state that leaves nothing on the replica, so that the true one is accepted."""
    headers = {"content-type": "application/json"}
    response = await b.http.post("/v1/handoff/rollouts", content=json.dumps(state), headers=headers)
    assert (b.server.rollouts.num_running, b.server.admission.num_samples) == (0, 0)
    assert (len(b.server.idempotency_keys), engine_of(b).submitted) == (0, [])
    assert b.server.idempotency_keys.held == set()
    true = offered_state(a)
    assert (await b.http.post("/v1/handoff/rollouts", json=true)).status_code == 201
    return response


@pytest.mark.parametrize("name", FORGED)
async def test_forged_state_is_refused(tmp_path: Path, name: str) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        state = offered_state(a)
        FORGED[name](state)
        response = await refused(a, b, state)
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["detail"] or response.json()["errors"]


@pytest.mark.parametrize("name", FINISHED_CHANGES)
async def test_forged_result_is_refused(tmp_path: Path, name: str) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        state = offered_state(a)
        moved = state["groups"][0]
        state["request"] = body(group(1, 2, 3, n=2), **LONG)
        moved |= {"sample_seconds": [1.0]}
        finished(state, **FINISHED_CHANGES[name])
        response = await refused(a, b, state)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")


async def test_key_of_another_rollout_stays_with_it(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        accepted = await b.http.post(
            "/v1/rollouts", json=body(PROMPT, **LONG), headers=KEY | {"prefer": "respond-async"}
        )
        key = {"key": KEY["idempotency-key"], "fingerprint": "0" * 64}
        assert (
            await b.http.post("/v1/handoff/rollouts", json=offered_state(a) | {"key": key})
        ).status_code == 201
        again = await b.http.post(
            "/v1/rollouts", json=body(PROMPT, **LONG), headers=KEY | {"prefer": "respond-async"}
        )
    assert again.headers["location"] == accepted.headers["location"]
