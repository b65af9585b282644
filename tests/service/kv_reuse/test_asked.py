"""Prompts made of spans: accepted and refused requests, and the order of exact ones."""

from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, PromptSegment, Reuse
from tests.fake_engine import FakeEngine
from tests.service.kv_reuse.asking import TALE, TOOL, answered, asked, reusing, segment
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
        group = await answered(served, asked(segment([1, 2]), segment([3], "x"), n=1))
    assert list(engine.submitted[0].prompt_token_ids) == [1, 2, 3]
    assert (group["exact"], group["reuse"]["mode"]) == (True, "off")
    assert (group["reuse"]["tokens_computed"], group["reuse"]["round_trips"]) == (3, 1)


async def test_other_prompts_have_no_reuse_fields(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        body = {"groups": [{"prompt": {"token_ids": [1]}}], "sampling": {"max_tokens": 1}}
        assert (await answered(served, body))["reuse"] is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv": {}}, "approximate"),
        ({"branching": TREE}, "branching excludes"),
        ({"adapter": "a"}, "base model"),
        ({"continue_from": {"samples": [UNFINISHED]}}, "continue_from"),
        ({"groups": [{"prompt": {"token_ids": [1]}}]}, "segments"),
        ({"reuse": {"mode": "recompute", "apply": True}}, "order"),
        ({"reuse": {"mode": "order", "first_tokens": 4}}, "recompute"),
        ({"reuse": {"mode": "guess"}}, "mode"),
        ({"reuse": {"mode": "anchors"}, "kv": {}}, "approximate"),
        ({"reuse": {"mode": "anchors"}, "branching": TREE}, "branching excludes"),
        ({"reuse": {"mode": "anchors"}, "adapter": "a"}, "base model"),
        (
            {"reuse": {"mode": "anchors"}, "continue_from": {"samples": [UNFINISHED]}},
            "continue_from",
        ),
        ({"reuse": {"mode": "anchors", "first_tokens": 4}}, "first_tokens"),
        ({"reuse": {"mode": "anchors", "threshold": 1.5}}, "threshold"),
        ({"reuse": {"mode": "recompute", "threshold": 0.5}}, "anchors"),
        ({"reuse": {"mode": "recompute", "first_tokens": -1}}, "first_tokens"),
        ({"groups": [{"prompt": {"segments": []}}]}, "segments"),
        ({"groups": [{"prompt": {"segments": [{"token_ids": []}]}}]}, "token_ids"),
        ({"groups": [{"prompt": {"segments": [{"token_ids": [1], "reuse": ""}]}}]}, "reuse"),
        (
            {"groups": [{"prompt": {"segments": [segment([1], "x"), segment([2], "x")]}}]},
            "differ within one prompt",
        ),
    ],
)
async def test_invalid_reuse_request_is_refused(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    body = asked(segment(TOOL, "tool"), segment([1]), reuse={"mode": "recompute"}) | change
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert word in answer.text


async def test_spans_follow_the_order_that_was_prefilled_before(tmp_path: Path) -> None:
    engine = FakeEngine()
    tool, tale = segment(TOOL, "tool"), segment(TALE, "tale")
    async with serving(engine, tmp_path) as served:
        first = await answered(served, asked(segment([1]), tool, tale, reuse={"mode": "order"}))
        second = await answered(served, asked(tale, segment([2]), tool, reuse={"mode": "order"}))
        told = {"mode": "order", "apply": False}
        third = await answered(served, asked(tale, segment([2]), tool, reuse=told))
    prompts = [list(request.prompt_token_ids) for request in engine.submitted[::2]]
    assert prompts == [[*TOOL, *TALE, 1], [*TOOL, *TALE, 2], [*TALE, 2, *TOOL]]
    assert [group["reuse"]["order"] for group in (first, second, third)] == [
        [1, 2, 0],
        [2, 0, 1],
        [2, 0, 1],
    ]
    assert [group["reuse"]["applied"] for group in (first, second, third)] == [True, True, False]
    assert first["exact"] and second["exact"] and third["exact"]


async def test_client_sends_spans(tmp_path: Path) -> None:
    prompt = [PromptSegment(token_ids=[1] * 40), PromptSegment(token_ids=TOOL, reuse="tool")]
    engine = FakeEngine(prompt_kv=True)
    async with reusing(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        result = await rollouts.rollout([prompt], max_tokens=3, reuse=Reuse(mode="recompute"))
    [group] = result.groups
    assert not group.exact
    assert group.reuse is not None
    assert (group.reuse.tokens_reused, group.reuse.tokens_computed) == (45, 65)
