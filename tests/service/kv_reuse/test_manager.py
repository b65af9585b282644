"""Prompts made of spans: accepted and refused requests."""

from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, KvReuse, PromptSpan
from tests.fake_engine import FakeEngine
from tests.service.kv_reuse.span_requests import (
    TOOL,
    post_rollout,
    request_with_spans,
    reusing,
    span,
)
from tests.serving import serving

TREE = {"mode": "interval", "interval": 2, "max_depth": 2, "max_leaves": 4}
UNFINISHED = {
    "token_ids": [3],
    "logprobs": [-0.5],
    "versions": [{"version": "v0", "start": 0, "end": 1}],
}


async def test_spans_are_concatenated_and_exact_by_default(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        group = await post_rollout(served, request_with_spans(span([1, 2]), span([3], "x"), n=1))
    assert list(engine.submitted[0].prompt_token_ids) == [1, 2, 3]
    assert (group["exact"], group["kv_reuse"]["mode"]) == (True, "off")
    assert (group["kv_reuse"]["num_computed_tokens"], group["kv_reuse"]["num_round_trips"]) == (
        3,
        1,
    )


async def test_other_prompts_have_no_reuse_fields(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        body = {"groups": [{"prompt": {"token_ids": [1]}}], "sampling": {"max_tokens": 1}}
        assert (await post_rollout(served, body))["kv_reuse"] is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv": {}}, "approximate"),
        ({"branching": TREE}, "branching needs kv_reuse"),
        ({"adapter": "a"}, "base model"),
        ({"continue_from": {"samples": [UNFINISHED]}}, "continue_from"),
        ({"groups": [{"prompt": {"token_ids": [1]}}]}, "spans"),
        ({"kv_reuse": {"mode": "guess"}}, "mode"),
        ({"kv_reuse": {"mode": "predict"}, "kv": {}}, "approximate"),
        ({"kv_reuse": {"mode": "predict"}, "branching": TREE}, "branching needs kv_reuse"),
        ({"kv_reuse": {"mode": "predict"}, "adapter": "a"}, "base model"),
        (
            {"kv_reuse": {"mode": "predict"}, "continue_from": {"samples": [UNFINISHED]}},
            "continue_from",
        ),
        ({"kv_reuse": {"mode": "predict", "recompute_tokens": 4}}, "recompute_tokens"),
        ({"kv_reuse": {"mode": "predict", "max_entropy": 1.5}}, "max_entropy"),
        ({"kv_reuse": {"mode": "splice", "max_entropy": 0.5}}, "predict"),
        ({"kv_reuse": {"mode": "splice", "recompute_tokens": -1}}, "recompute_tokens"),
        ({"groups": [{"prompt": {"spans": []}}]}, "spans"),
        ({"groups": [{"prompt": {"spans": [{"token_ids": []}]}}]}, "token_ids"),
        ({"groups": [{"prompt": {"spans": [{"token_ids": [1], "cache_key": ""}]}}]}, "cache_key"),
        (
            {"groups": [{"prompt": {"spans": [span([1], "x"), span([2], "x")]}}]},
            "differ within one prompt",
        ),
    ],
)
async def test_invalid_reuse_request_is_refused(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    body = request_with_spans(span(TOOL, "tool"), span([1]), kv_reuse={"mode": "splice"}) | change
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert word in answer.text


async def test_client_sends_spans(tmp_path: Path) -> None:
    prompt = [PromptSpan(token_ids=[1] * 40), PromptSpan(token_ids=TOOL, cache_key="tool")]
    engine = FakeEngine(prompt_kv=True)
    async with reusing(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        result = await rollouts.rollout([prompt], max_tokens=3, kv_reuse=KvReuse(mode="splice"))
    [group] = result.groups
    assert not group.exact
    assert group.kv_reuse is not None
    assert (group.kv_reuse.num_reused_tokens, group.kv_reuse.num_computed_tokens) == (45, 65)
