"""Trees on the real engine: the prefill cost of a fork, and the accuracy of logprobs."""

import asyncio
from typing import Any

import pytest
import torch

from coppice import KvSource, PromptKV
from coppice.wire.prompt_kv import KvHandle
from tests.e2e.prompt_kv_checks import assert_matches_model
from tests.engine.default_engine.test_vllm_engine import computed_prompt_tokens, prompt_of
from tests.engine.seedling import BLOCK, reference
from tests.service.trees import check_cuts, check_tree, path
from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

LENGTHS = [BLOCK + 1, 3 * BLOCK + 7]


def body(prompt: list[int], branching: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    return {
        "groups": [{"prompt": {"token_ids": prompt}}],
        "sampling": {"max_tokens": 160, "ignore_eos": True, **sampling},
        "branching": {"flatten": True, **branching},
    }


async def grown(served: Served, asked: dict[str, Any]) -> dict[str, Any]:
    answered = await served.http.post("/v1/rollouts", json=asked)
    assert answered.status_code == 200, answered.text
    [group] = answered.json()["groups"]
    check_tree(group)
    check_cuts(group, len(asked["groups"][0]["prompt"]["token_ids"]))
    found: dict[str, Any] = group
    return found


def tail_of(length: int) -> int:
    """Tokens of a prompt that siblings prefill again."""
    return length - BLOCK * ((length - 1) // BLOCK)


@pytest.mark.parametrize("length", LENGTHS)
async def test_tree_prefills_its_prompt_once_and_one_token_per_fork(
    served: Served, length: int
) -> None:
    before = computed_prompt_tokens()
    interval = {"mode": "interval", "interval": 40, "max_depth": 3, "max_leaves": 8}
    group = await grown(served, body(prompt_of(length, first=length % 40), interval))
    forks = [s for s in group["segments"] if s.get("parent")]
    assert len(forks) == 4 + 8
    assert computed_prompt_tokens() - before == length + tail_of(length) + len(forks)


@pytest.mark.parametrize("length", LENGTHS)
async def test_cut_at_an_earlier_position_costs_one_token_too(served: Served, length: int) -> None:
    before = computed_prompt_tokens()
    entropy = {"mode": "entropy", "first_split": 8, "max_depth": 3, "max_leaves": 7}
    group = await grown(served, body(prompt_of(length, first=length % 40 + 1), entropy))
    others = len(group["leaves"]) - 1
    assert others >= 3
    assert computed_prompt_tokens() - before == length + others


async def test_search_costs_one_prefilled_token_per_branch(served: Served) -> None:
    asked = body(prompt_of(50, first=3), {"mode": "external", "max_leaves": 6})
    opened = await served.http.post("/v1/rollouts", json=asked, headers={"Prefer": "respond-async"})
    address = opened.headers["location"]
    branched = await served.http.post(f"{address}/branch", json={"max_tokens": 20})
    [trunk] = branched.json()["segments"]
    before = computed_prompt_tokens()
    more = {"segment": trunk["id"], "n": 6, "max_tokens": 20}
    assert (await served.http.post(f"{address}/branch", json=more)).status_code == 200
    assert computed_prompt_tokens() - before == 6
    closed = (await served.http.delete(address)).json()
    assert closed["outcome"] == "done"


@pytest.mark.parametrize(
    "branching",
    [
        {"mode": "interval", "interval": 32, "entropy": {"k": 12}},
        {"mode": "entropy", "first_split": 20},
        {"mode": "positions", "positions": [0, 70], "factor": 3},
    ],
    ids=lambda branching: str(branching["mode"]),
)
async def test_segment_logprobs_equal_those_of_their_rows_scored_alone(
    served: Served, branching: dict[str, Any]
) -> None:
    prompt = prompt_of(45, first=9)
    group = await grown(served, body(prompt, branching))
    responses = [row["token_ids"] for row in group["samples"]]
    item = {"prompt": {"token_ids": prompt}, "responses": responses}
    scored = (await served.http.post("/v1/score", json={"items": [item]})).json()["items"][0]
    for row, alone in zip(group["samples"], scored["responses"], strict=True):
        pairs = zip(row["logprobs"], alone["logprobs"], strict=True)
        assert max(abs(ours - theirs) for ours, theirs in pairs) < 1e-3


@pytest.mark.parametrize(
    "branching",
    [
        {"mode": "interval", "interval": 40, "max_depth": 3, "max_leaves": 8},
        {"mode": "entropy", "first_split": 8, "max_depth": 3, "max_leaves": 7},
    ],
    ids=lambda branching: str(branching["mode"]),
)
async def test_kv_of_a_path_equals_that_of_hugging_face(
    served: Served, branching: dict[str, Any]
) -> None:
    prompt, model = prompt_of(45, first=21), reference()
    group = await grown(served, {**body(prompt, branching), "kv": {"lease_seconds": 60}})
    inner = [segment for segment in group["segments"] if segment["id"] not in group["leaves"]]
    assert len(inner) >= 3
    for segment in inner:
        above = [token for each in path(group, segment["id"]) for token in each["token_ids"]]
        handle, source = KvHandle.model_validate(segment["kv"]), KvSource(served.url)
        kv = await asyncio.to_thread(PromptKV.fetch, handle, source)
        assert kv is not None, source.counts
        assert_matches_model(kv, prompt + above, model)
        await asyncio.to_thread(kv.release)


async def test_entropy_is_that_of_the_top_tokens_alone(served: Served) -> None:
    prompt, k = prompt_of(20, first=11), 6
    asked = body(prompt, {"mode": "interval", "entropy": {"k": k}, "max_leaves": 1})
    group = await grown(served, asked)
    [segment] = group["segments"]
    with torch.inference_mode():
        ids = torch.tensor([prompt + segment["token_ids"]])
        logits = reference()(ids).logits[0, len(prompt) - 1 : -1].double()
    likeliest = logits.topk(k, dim=-1).values.log_softmax(-1)
    wanted = -(likeliest.exp() * likeliest).sum(-1)
    assert torch.tensor(segment["entropy"]).double().sub(wanted).abs().max() < 1e-3
