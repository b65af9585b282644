"""Logprobs of the top k and of given token ids in the answers of /v1/rollouts and /v1/score."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from coppice.rollout_results import result_of, result_of_packed
from coppice.wire.columns.logprobs import TokenLogprobs
from coppice.wire.columns.routed_experts import RoutedExperts
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import unpack
from coppice.wire.packed.scores import unpack_scores
from coppice.wire.rollouts import RolloutAnswer
from service.rollouts.groups import logprob_tables
from tests.fake_engine import FakeEngine
from tests.serving import Served, serving

VERSION_SPAN = {"version": "v0", "start": 0, "end": 1}
PACKED = {"Accept": PACKED_MEDIA_TYPE}
TOP_2 = [3, 4, 4, 5]
"""The fake engine's top 2 at tokens 3 and 4."""


async def rollout(
    served: Served, headers: dict[str, str] | None = None, **options: Any
) -> httpx.Response:
    prompt = {"token_ids": [1, 2, 9]}
    body = {"groups": [{"prompt": prompt, "n": 2}], "sampling": {"max_tokens": 2}, **options}
    return await served.http.post("/v1/rollouts", json=body, headers=headers or {})


async def score(
    served: Served, headers: dict[str, str] | None = None, given: Any = None, **options: Any
) -> httpx.Response:
    item = {"prompt": {"token_ids": [1, 2]}, "responses": [[5, 6], [7]], "logprob_token_ids": given}
    return await served.http.post(
        "/v1/score", json={"items": [item], **options}, headers=headers or {}
    )


async def test_every_format_returns_the_same_top_logprobs(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        whole = (await rollout(served, top_logprobs=2)).json()["groups"][0]["samples"]
        lines = (await rollout(served, top_logprobs=2, stream=True)).text.splitlines()
        packed = unpack((await rollout(served, PACKED, top_logprobs=2)).content)
    streamed = [json.loads(line)["sample"] for line in lines if '"type":"sample"' in line]
    expected = {"offsets": [0, 2, 4], "token_ids": TOP_2, "logprobs": [-0.5, -1.5, -0.5, -1.5]}
    for samples in (whole, streamed):
        assert [sample["top_logprobs"] for sample in samples] == [expected] * 2
    for columns in packed.columns:
        assert columns.top_logprobs is not None
        assert json.loads(columns.top_logprobs.model_dump_json()) == expected


async def test_every_format_returns_the_logprobs_of_given_tokens(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"logprob_token_ids": [7, 0, 5, 7], "top_logprobs": 2}
    async with serving(FakeEngine(), tmp_path) as served:
        whole = (await rollout(served, **asked)).json()["groups"][0]["samples"]
        lines = (await rollout(served, **asked, stream=True)).text.splitlines()
        packed = unpack((await rollout(served, PACKED, **asked)).content)
    streamed = [json.loads(line)["sample"] for line in lines if '"type":"sample"' in line]
    expected = {
        "offsets": [0, 3, 6],
        "token_ids": [7, 5, 7] * 2,
        "logprobs": [-7.0, -5.0, -7.0] * 2,
    }
    for samples in (whole, streamed):
        assert [sample["given_logprobs"] for sample in samples] == [expected] * 2
        assert all(sample["top_logprobs"]["token_ids"] == TOP_2 for sample in samples)
        assert all("raw_logprobs" not in sample for sample in samples)
    for columns in packed.columns:
        assert columns.given_logprobs is not None and columns.raw_logprobs is None
        assert json.loads(columns.given_logprobs.model_dump_json()) == expected


async def test_every_format_returns_raw_logprobs(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"logprobs_mode": "raw_logprobs"}
    async with serving(FakeEngine(), tmp_path) as served:
        whole = (await rollout(served, **asked)).json()["groups"][0]["samples"]
        lines = (await rollout(served, **asked, stream=True)).text.splitlines()
        packed = (await rollout(served, PACKED, **asked)).content
    streamed = [json.loads(line)["sample"] for line in lines if '"type":"sample"' in line]
    for sample in [*whole, *streamed]:
        assert (sample["logprobs"], sample["raw_logprobs"]) == ([-0.5] * 2, [-0.25] * 2)
    for found in result_of_packed(unpack(packed)).groups[0].samples:
        assert found.raw_logprobs is not None
        assert found.raw_logprobs.tolist() == [-0.25] * 2


async def test_segments_and_flattened_trees_have_further_logprobs(tmp_path: Path) -> None:
    tree = {"mode": "interval", "interval": 32, "max_depth": 2, "max_leaves": 4, "flatten": True}
    asked = {"logprob_token_ids": [5], "logprobs_mode": "raw_logprobs"}
    body = {
        "groups": [{"prompt": {"token_ids": [1, 2, 9]}}],
        "sampling": {"max_tokens": 64},
        "branching": tree,
        **asked,
    }
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", json=body)
        packed = await served.http.post("/v1/rollouts", json=body, headers=PACKED)
    [group] = answer.json()["groups"]
    [unpacked] = result_of_packed(unpack(packed.content)).groups
    for part in [*group["segments"], *group["samples"]]:
        number = len(part["token_ids"])
        assert part["given_logprobs"]["logprobs"] == [-5.0] * number
        assert part["raw_logprobs"] == [-0.25] * number
    assert unpacked.tree is not None
    for found in [*unpacked.samples, *unpacked.tree.rows()]:
        assert found.given_logprobs is not None and found.raw_logprobs is not None
        assert found.given_logprobs.num_positions == len(found.raw_logprobs) == 64


async def test_resumed_sample_keeps_its_raw_logprobs(tmp_path: Path) -> None:
    prior = {"token_ids": [7], "logprobs": [-1.0], "versions": [VERSION_SPAN]}
    mode: dict[str, Any] = {"logprobs_mode": "raw_logprobs"}
    async with serving(FakeEngine(), tmp_path) as served:
        given = {"samples": [{**prior, "raw_logprobs": [-2.0]}]}
        answer = await rollout(served, continue_from=given, **mode)
        missing = await rollout(served, continue_from={"samples": [prior]}, **mode)
        unused = await rollout(served, continue_from=given)
    samples = answer.json()["groups"][0]["samples"]
    assert [sample["raw_logprobs"] for sample in samples] == [[-2.0, -0.25], [-0.25, -0.25]]
    for refused in (missing, unused):
        assert refused.status_code == 422 and "raw_logprobs" in refused.text


@pytest.mark.parametrize("given", [[256], list(range(21))])
async def test_given_tokens_are_bounded(tmp_path: Path, given: list[int]) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await rollout(served, logprob_token_ids=given)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["location"] == "logprob_token_ids"


async def test_answers_have_no_tables_unless_they_are_requested(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        plain = (await rollout(served)).json()["groups"][0]
        packed = unpack((await rollout(served, PACKED)).content)
        scored = (await score(served)).json()["items"][0]["responses"]
    assert "top_logprobs" not in plain["samples"][0] and "prompt_logprobs" not in plain
    assert packed.columns[0].top_logprobs is None
    assert "top_logprobs" not in scored[0] and "given_logprobs" not in scored[0]


async def test_segments_of_a_tree_and_its_rows_have_top_logprobs(tmp_path: Path) -> None:
    branching = {
        "mode": "interval",
        "interval": 32,
        "max_depth": 2,
        "max_leaves": 4,
        "flatten": True,
    }
    options: dict[str, Any] = {
        "branching": branching,
        "sampling": {"max_tokens": 99},
        "top_logprobs": 1,
        "groups": [{"prompt": {"token_ids": [1, 2, 9]}}],
    }
    async with serving(FakeEngine(), tmp_path) as served:
        plain = (await rollout(served, **options)).json()["groups"][0]
        packed = unpack((await rollout(served, PACKED, **options)).content)
    assert len(plain["segments"]) > 1
    for part in (*plain["segments"], *plain["samples"]):
        assert part["top_logprobs"]["token_ids"] == part["token_ids"]
    [group] = result_of_packed(packed).groups
    for row in group.samples:
        assert row.top_logprobs is not None and row.top_logprobs.num_positions == 99


@pytest.mark.parametrize("accepted", [{}, PACKED])
async def test_prompt_logprobs_start_at_the_second_token(
    tmp_path: Path, accepted: dict[str, str]
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await rollout(served, accepted, prompt_logprobs=1)
    if accepted:
        found = unpack(answer.content).answer.groups[0].prompt_logprobs
        assert found is not None
        prompt = json.loads(found.model_dump_json())
    else:
        prompt = answer.json()["groups"][0]["prompt_logprobs"]
    assert prompt == {
        "logprobs": [-1.0, -2.0],
        "top_logprobs": {"offsets": [0, 1, 2], "token_ids": [2, 9], "logprobs": [-1.0, -2.0]},
        "version": "v0",
    }


async def test_tokens_of_a_resumed_sample_have_no_entries(tmp_path: Path) -> None:
    given = {
        "token_ids": [7],
        "logprobs": [-1.0],
        "versions": [{"version": "v0", "start": 0, "end": 1}],
    }
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await rollout(served, top_logprobs=1, continue_from={"samples": [given]})
    resumed, _ = answer.json()["groups"][0]["samples"]
    assert resumed["token_ids"] == [7, 4]
    assert resumed["top_logprobs"] == {"offsets": [0, 0, 1], "token_ids": [4], "logprobs": [-0.5]}


@pytest.mark.parametrize("accepted", [{}, PACKED])
async def test_scores_have_the_top_logprobs_of_each_response(
    tmp_path: Path, accepted: dict[str, str]
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await score(served, accepted, top_logprobs=2)
    if accepted:
        packed = unpack_scores(answer.content)
        assert [array.tolist() for array in packed.logprobs] == [[-2.0, -3.0], [-2.0]]
        found = [json.loads(r.model_dump_json()) for r in packed.answer.items[0].responses]
    else:
        found = answer.json()["items"][0]["responses"]
    assert [response["top_logprobs"]["token_ids"] for response in found] == [[5, 6, 6, 7], [7, 8]]
    assert found[0]["top_logprobs"]["logprobs"] == [-2.0, -3.0, -3.0, -4.0]


@pytest.mark.parametrize("accepted", [{}, PACKED])
async def test_scores_have_the_logprobs_of_given_tokens(
    tmp_path: Path, accepted: dict[str, str]
) -> None:
    given = [[[11], [12, 13, 14]], [[15]]]
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await score(served, accepted, given)
    if accepted:
        responses = unpack_scores(answer.content).answer.items[0].responses
        found = [json.loads(response.model_dump_json()) for response in responses]
    else:
        found = answer.json()["items"][0]["responses"]
    assert found[0]["given_logprobs"] == {
        "offsets": [0, 1, 4],
        "token_ids": [11, 12, 13, 14],
        "logprobs": [-11.0, -12.0, -13.0, -14.0],
    }
    assert found[1]["given_logprobs"]["token_ids"] == [15]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"top_logprobs": 21}, "engine.max_logprobs"),
        ({"given": [[[1], [2]]]}, "one list per token of each response"),
        ({"given": [[[1]], [[2]]]}, "one list per token of each response"),
        ({"given": [[[1], [256]], [[2]]]}, "below 256"),
        ({"given": [[[1], list(range(21))], [[2]]]}, "engine.max_logprobs"),
        ({"given": [[[1], [2]], [[2]]], "top_logprobs": 1}, "either"),
    ],
)
async def test_invalid_requests_for_scores_are_refused(
    tmp_path: Path, options: dict[str, Any], part: str
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await score(served, **options)
    assert refused.status_code == 422 and part in refused.json()["detail"]


@pytest.mark.parametrize("name", ["top_logprobs", "prompt_logprobs"])
async def test_rollouts_with_too_many_logprobs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        too_many: dict[str, Any] = {name: 21}
        one_token = await rollout(served, **too_many)
        monkeypatch.setattr(logprob_tables, "MAX_REQUEST_LOGPROBS", 5)
        too_many[name] = 2
        in_all = await rollout(served, **too_many)
    assert one_token.status_code == in_all.status_code == 422
    assert "engine.max_logprobs" in one_token.json()["detail"]
    assert "at most 5 in all" in in_all.json()["detail"]


@pytest.mark.parametrize("accepted", [{}, PACKED])
async def test_routed_experts_begin_at_the_first_token_that_was_not_read_before(
    tmp_path: Path, accepted: dict[str, str]
) -> None:
    given = {
        "token_ids": [7, 8],
        "logprobs": [-1.0, -1.0],
        "versions": [{"version": "v0", "start": 0, "end": 2}],
    }
    options: dict[str, Any] = {
        "return_routed_experts": True,
        "continue_from": {"samples": [given]},
        "sampling": {"max_tokens": 4},
    }
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await rollout(served, accepted, **options)
        plain = (await rollout(served)).json()["groups"][0]["samples"][0]
    json_answer = None if accepted else RolloutAnswer.model_validate_json(answer.content)
    result = (
        result_of_packed(unpack(answer.content)) if json_answer is None else result_of(json_answer)
    )
    resumed, fresh = (sample.routed_experts for sample in result.groups[0].samples)
    assert resumed is not None and fresh is not None and "routed_experts" not in plain
    assert (resumed.start, resumed.array.ravel().tolist()) == (4, [4, 5])
    assert (fresh.start, fresh.array.ravel().tolist()) == (0, [0, 1, 2, 3, 4, 5])
    before = RoutedExperts.of(0, np.zeros((4, 1, 1), np.uint8))
    assert RoutedExperts.joined([before, resumed]).shape == (6, 1, 1)


async def test_routed_experts_of_a_tree_are_refused(tmp_path: Path) -> None:
    branching = {"mode": "interval", "interval": 32, "max_depth": 2, "max_leaves": 4}
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await rollout(
            served,
            return_routed_experts=True,
            branching=branching,
            groups=[{"prompt": {"token_ids": [1]}}],
        )
    assert refused.status_code == 422 and "branching" in refused.json()["detail"]


def test_tables_are_padded() -> None:
    table = TokenLogprobs(
        offsets=np.array([0, 2, 2, 3]), token_ids=np.array([5, 6, 7]), logprobs=-np.arange(3.0)
    )
    token_ids, logprobs = table.padded()
    assert token_ids.tolist() == [[5, 6], [0, 0], [7, 0]]
    assert np.isneginf(logprobs).tolist() == [[False, False], [True, True], [False, True]]


@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2], [0, 3, 2, 3], [[0, 3]]])
def test_inconsistent_tables_are_refused(offsets: list[Any]) -> None:
    with pytest.raises(ValueError):
        TokenLogprobs.model_validate(
            {"offsets": offsets, "token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0, -3.0]}
        )


@pytest.mark.parametrize("is_given", [True, False])
async def test_logprobs_at_prompts_of_all_responses_are_limited(
    tmp_path: Path, is_given: bool
) -> None:
    prompt, responses = {"token_ids": [1] * 2**18}, [[5]] * 14
    rows = [[[7] * 20]] * 14 if is_given else None
    item = {"prompt": prompt, "responses": responses, "logprob_token_ids": rows}
    asked = {"items": [item], "top_logprobs": None if is_given else 20}
    async with serving(FakeEngine(max_context_tokens=2**20), tmp_path) as served:
        response = await served.http.post("/v1/score", json=asked)
    assert response.status_code == 422
    assert "at the positions of the prompts" in response.json()["detail"]


async def test_tables_of_flattened_trees_are_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branching = {"mode": "interval", "interval": 32, "max_depth": 2, "max_leaves": 4}
    options: dict[str, Any] = {
        "sampling": {"max_tokens": 40},
        "top_logprobs": 2,
        "groups": [{"prompt": {"token_ids": [1]}}],
    }
    monkeypatch.setattr(logprob_tables, "MAX_REQUEST_LOGPROBS", 4 * 40 * 2)
    async with serving(FakeEngine(), tmp_path) as served:
        tree = await rollout(served, branching=branching, **options)
        flat = await rollout(served, branching={**branching, "flatten": True}, **options)
    assert (tree.status_code, flat.status_code) == (200, 422)
