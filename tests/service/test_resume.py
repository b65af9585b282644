"""`continue_from`: samples that continue from the tokens of an earlier rollout."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, WeightsConstraint
from tests.fake_engine import FakeEngine, Running
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import serving


def started(*token_ids: int, **rest: Any) -> dict[str, Any]:
    num = len(token_ids)
    return {
        "token_ids": list(token_ids),
        "logprobs": [-0.25] * num,
        "versions": [{"version": "v0", "start": 0, "end": num}],
        **rest,
    }


def resume_request(*samples: dict[str, Any], **rest: Any) -> dict[str, Any]:
    options = {"sampling": {"max_tokens": 8}, **rest}
    return {**body(group(1, 2, n=2), group(3)), "continue_from": {"samples": [*samples]}, **options}


async def test_sample_continues_from_its_tokens_and_keeps_their_data(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        given = [started(90, 91, 92), started(80, group=1)]
        answer = (await served.http.post("/v1/rollouts", json=resume_request(*given))).json()
    first, fresh = answer["groups"][0]["samples"]
    assert first["token_ids"] == [90, 91, 92, 5, 6, 7, 8, 9]
    assert first["logprobs"] == [-0.25] * 3 + [-0.5] * 5
    assert first["versions"] == [{"version": "v0", "start": 0, "end": 8}]
    assert fresh["token_ids"] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert answer["groups"][1]["samples"][0]["token_ids"][:2] == [80, 2]
    assert [g["num_continued_tokens"] for g in answer["groups"]] == [3, 1]
    assert answer["usage"]["num_generated_tokens"] == 24 - 4


async def test_sample_continued_under_other_weights_reports_both_versions(tmp_path: Path) -> None:
    """Through the client, as a trainer would: cut by a deadline, trained, continued."""
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        cut = asyncio.create_task(rollouts.rollout([[1, 2]], n=2, max_tokens=10))
        await running_samples(served, 2)
        engine.step(4)
        await served.server.rollouts.cancel(next(iter(served.server.rollouts._running.values())))
        [before] = (await cut).groups
        assert [len(sample.token_ids) for sample in before.unfinished] == [4, 4]
        await served.http.put("/v1/weights/v1", content=b"x")
        await served.http.post("/v1/weights/v1/activate", json={})
        engine.instant = True
        result = await rollouts.rollout(
            [[1, 2]], n=3, max_tokens=10, continue_from=[before.unfinished]
        )
    first, second, fresh = result.groups[0].samples
    assert first.token_versions() == second.token_versions() == ["v0"] * 4 + ["v1"] * 6
    assert fresh.token_versions() == ["v1"] * 10
    assert first.logprobs.tolist() == [-0.5] * 10
    assert result.groups[0].unfinished == ()


async def test_continued_sample_does_not_repeat_its_random_numbers(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        seeds = []
        for samples in ([started(5)], [started(5, 6)], [started(5, 6)]):
            request = resume_request(*samples)
            request["groups"] = [group(1, seed=7)]
            post = asyncio.create_task(served.http.post("/v1/rollouts", json=request))
            await running_samples(served, 1)
            seeds.append(next(iter(engine.running.values())).request.seed)
            engine.step(8)
            await post
    assert seeds[0] != seeds[1] == seeds[2]


SPANS = [{"version": "v0", "start": 0, "end": 1}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    (resume_request(started(5, group=2)), "a group that is not in the request"),
    (resume_request(*[started(5)] * 3), "more samples of a group than its n"),
    (resume_request(started(5, 6, logprobs=[-0.1])), "one logprob per token"),
    (resume_request(started(5, 6, versions=SPANS)), "must cover its tokens"),
    (
        resume_request(started(5, versions=[{"version": "v0", "start": 1, "end": 2}])),
        "must be consecutive",
    ),
    (resume_request(started(300)), "below 256"),
    (resume_request(started(*range(8))), "already has max_tokens tokens"),
    (
        resume_request(
            started(5, versions=[{"version": "v9", "start": 0, "end": 1}]),
            weights={"exact_version": "v0"},
        ),
        "other versions than 'v0'",
    ),
    (resume_request(started(5), branching={"mode": "interval"}), "n = 1"),
]


@pytest.mark.parametrize(("request_body", "said"), REFUSED)
async def test_invalid_continuation_is_refused(
    tmp_path: Path, request_body: dict[str, Any], said: str
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await served.http.post("/v1/rollouts", json=request_body)
        assert served.server.admission.num_samples == 0
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
    assert said in refused.json()["detail"]


async def test_tree_cannot_be_continued(tmp_path: Path) -> None:
    request = resume_request(started(5), branching={"mode": "interval"})
    request["groups"] = [group(1)]
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await served.http.post("/v1/rollouts", json=request)
    assert "cannot be combined with branching" in refused.json()["detail"]


async def test_continuation_leaves_room_for_a_token(tmp_path: Path) -> None:
    async with serving(FakeEngine(max_context_tokens=8), tmp_path) as served:
        request = resume_request(started(*range(6)), sampling={})
        refused = await served.http.post("/v1/rollouts", json=request)
    assert refused.json()["code"] == "prompt_too_long"


async def test_continued_tokens_count_as_prompt_tokens(tmp_path: Path) -> None:
    limits = {"max_prompt_tokens_per_key": 6}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        refused = await served.http.post("/v1/rollouts", json=resume_request(started(5, 6, 7, 8)))
        assert refused.status_code == 422
        taken = await served.http.post("/v1/rollouts", json=resume_request(started(5, 6, 7)))
        assert taken.status_code == 200


async def test_exact_version_may_continue_its_own_tokens(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        first = await rollouts.rollout([[1]], max_tokens=2)
        sample = first.groups[0].samples[0]
        result = await rollouts.rollout(
            [[1]],
            max_tokens=4,
            weights=WeightsConstraint(exact_version="v0"),
            continue_from=[[sample]],
        )
    assert len(result.groups[0].samples[0].token_ids) == 4


class Remembering(FakeEngine):
    """All prompt tokens but the last are cached, as while the same weights serve."""

    def _compute_prompt(self, sample: Running) -> None:
        super()._compute_prompt(sample)
        sample.num_cached = len(sample.request.prompt_token_ids) - 1


async def test_cached_tokens_are_at_most_the_prompt_tokens(tmp_path: Path) -> None:
    """Sampled tokens are cached after the prompt. No count may become negative."""
    prompt = {"spans": [{"token_ids": [1, 2]}, {"token_ids": [3], "cache_key": "tool"}]}
    request = resume_request(started(90, 91, 92, 93), groups=[{"prompt": prompt, "n": 1}])
    async with serving(Remembering(), tmp_path) as served:
        for headers in ({}, {"prefer": "respond-async", "idempotency-key": "k"}):
            answer = await served.http.post("/v1/rollouts", json=request, headers=headers)
        whole = await served.http.get(answer.headers["location"], params={"wait": 30})
        again = await served.http.post("/v1/rollouts", json=request, headers=headers)
        text = (await served.http.get("/metrics")).text
    [told] = whole.json()["groups"]
    assert (told["num_prompt_tokens"], told["num_cached_tokens"]) == (3, 3)
    assert told["kv_reuse"]["num_computed_tokens"] == 0
    assert again.json()["id"] == whole.json()["id"]
    assert "coppice_prompt_tokens_cached_total 6.0" in text
