"""POST and DELETE /v1/rollouts over a real socket and the fake engine."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine
from tests.serving import Served, serving


def body(*groups: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"groups": list(groups), "sampling": {"max_tokens": 4}, **rest}


def group(*token_ids: int, **rest: Any) -> dict[str, Any]:
    return {"prompt": {"token_ids": list(token_ids)}, **rest}


async def running_samples(served: Served, count: int) -> None:
    async with asyncio.timeout(30):
        while served.server.rollouts.num_samples_running != count:
            await asyncio.sleep(0.001)


async def lines(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in response.aiter_lines()]


async def test_every_prompt_becomes_a_group_of_n_samples(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(group(1, 2, n=3, id="first"), group(5, n=1))
        answer = (await served.http.post("/v1/rollouts", json=asked)).json()
    assert answer["outcome"] == "done"
    first, second = answer["groups"]
    assert (first["id"], first["index"], len(first["samples"])) == ("first", 0, 3)
    assert (second["id"], second["index"], len(second["samples"])) == ("1", 1, 1)
    sample = first["samples"][2]
    assert sample["index"] == 2
    assert sample["token_ids"] == [2, 3, 4, 5]
    assert sample["logprobs"] == [-0.5] * 4
    assert sample["finish_reason"] == "length"
    assert sample["versions"] == [{"version": "v0", "start": 0, "end": 4}]
    assert answer["usage"] == {"num_prompt_tokens": 3, "num_generated_tokens": 16, "num_samples": 4}


async def test_text_and_messages_return_text_and_token_ids_do_not(tmp_path: Path) -> None:
    prompts = [
        {"text": "ab"},
        {"messages": [{"role": "user", "content": "abc"}]},
        {"token_ids": [97]},
    ]
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(*({"prompt": prompt} for prompt in prompts))
        answer = (await served.http.post("/v1/rollouts", json=asked)).json()
    texts = [answered["samples"][0]["text"] for answered in answer["groups"]]
    assert texts == ["\x02\x03\x04\x05", "\x03\x04\x05\x06", None]


async def test_max_tokens_defaults_to_the_context_limit(tmp_path: Path) -> None:
    async with serving(FakeEngine(max_context_tokens=64), tmp_path) as served:
        for sampling in ({}, {"max_tokens": 1000}):
            asked = {"groups": [group(*range(60))], "sampling": sampling}
            answer = (await served.http.post("/v1/rollouts", json=asked)).json()
            assert len(answer["groups"][0]["samples"][0]["token_ids"]) == 4


async def test_stream_begins_with_its_id_and_ends_with_its_outcome(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(group(1, n=2), group(2))
        headers = {"accept": "application/x-ndjson"}
        async with served.http.stream("POST", "/v1/rollouts", json=asked, headers=headers) as got:
            assert got.headers["content-type"] == "application/x-ndjson"
            records = await lines(got)
    assert records[0] == {"type": "start", "id": got.headers["coppice-rollout-id"]}
    kinds = [record["type"] for record in records[1:-1]]
    assert sorted(kinds) == ["group", "group", "sample", "sample", "sample"]
    assert records[-1]["type"] == "end"
    assert records[-1]["outcome"] == "done"


async def test_stream_sends_each_sample_as_it_ends(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1), stream=True)
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            records = got.aiter_lines()
            assert json.loads(await anext(records))["type"] == "start"
            await running_samples(served, 1)
            engine.step(4)
            assert json.loads(await anext(records))["type"] == "sample"
            assert [json.loads(line)["type"] async for line in records] == ["group", "end"]


async def test_abort_returns_the_tokens_so_far_to_both_callers(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1, n=2), stream=True)
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as got:
            await running_samples(served, 2)
            engine.step(3)
            rollout_id = got.headers["coppice-rollout-id"]
            aborted = await served.http.delete(f"/v1/rollouts/{rollout_id}")
            records = await lines(got)
        again = await served.http.delete(f"/v1/rollouts/{rollout_id}")
    answer = aborted.json()
    assert answer["outcome"] == "cancelled" == records[-1]["outcome"]
    for sample in answer["groups"][0]["samples"]:
        assert sample["finish_reason"] == "aborted"
        assert len(sample["token_ids"]) == len(sample["logprobs"]) == 3
    assert again.status_code == 404
    assert again.json()["code"] == "rollout_not_found"
    assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
async def test_closed_connection_aborts_the_samples(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1, n=4), stream=stream)
        async with httpx.AsyncClient(base_url=served.url) as leaving:
            request = asyncio.create_task(leaving.post("/v1/rollouts", json=asked))
            await running_samples(served, 4)
            request.cancel()
        await running_samples(served, 0)
        assert not engine.running


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (body(), "invalid_request"),
        (body(group(1, n=0)), "invalid_request"),
        (body(group(1, n=1025)), "invalid_request"),
        (body(group()), "invalid_request"),
        (body(group(256)), "invalid_request"),
        (body(group(-1)), "invalid_request"),
        (body({"prompt": {}}), "invalid_request"),
        (body({"prompt": {"text": "a", "token_ids": [1]}}), "invalid_request"),
        (body(group(1), sampling={"temperatur": 1.0}), "invalid_request"),
        (body(group(1), sampling={"temperature": -1.0}), "invalid_request"),
        (body(group(1), sampling={"top_p": 0.0}), "invalid_request"),
        (body(group(1), sampling={"stop": [""]}), "invalid_request"),
        (body(group(1), sampling={"min_tokens": 5, "max_tokens": 4}), "invalid_request"),
        (body(group(1), sampling={"logit_bias": {"a": 1.0}}), "invalid_request"),
        (body(group(1), sampling={"structured_outputs": {}}), "invalid_request"),
        (body(group(1), weights={}), "invalid_request"),
        (body(group(1), surprise=True), "invalid_request"),
        (body(*[group(1, n=1024)] * 65), "invalid_request"),
        (body(group(*[1] * 512)), "prompt_too_long"),
        (body({"prompt": {"messages": [{"role": "robot", "content": ""}]}}), "no_chat_template"),
    ],
)
async def test_unservable_request_is_refused_before_anything_starts(
    tmp_path: Path, asked: dict[str, Any], code: str
) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", json=asked)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == code
    assert not engine.running


async def test_error_names_the_field_and_never_repeats_the_prompt(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body({"prompt": {"text": "a secret"}, "n": "many"})
        answer = await served.http.post("/v1/rollouts", json=asked)
    assert answer.json()["errors"][0]["location"] == "groups.0.n"
    assert "secret" not in answer.text and "many" not in answer.text


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"\xff", {}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (
            gzip.compress(b"{}", mtime=0),
            {"content-encoding": "gzip"},
            415,
            "unsupported_media_type",
        ),
        (b"{}", {"content-encoding": "identity"}, 422, "invalid_request"),
        (b"{}", {"accept": "text/html"}, 406, "not_acceptable"),
        (b" " * 5000, {}, 413, "body_too_large"),
    ],
)
async def test_malformed_bodies_are_problems(
    tmp_path: Path, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    sent = {"content-type": "application/json", **headers}
    async with serving(FakeEngine(), tmp_path, limits={"max_body_bytes": 4096}) as served:
        answer = await served.http.post("/v1/rollouts", content=content, headers=sent)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_oversized_body_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    async def endless() -> Any:
        for _ in range(1000):
            yield b" " * 1024

    async with serving(FakeEngine(), tmp_path, limits={"max_body_bytes": 4096}) as served:
        sent = {"content-type": "application/json"}
        answer = await served.http.post("/v1/rollouts", content=endless(), headers=sent)
    assert answer.json()["code"] == "body_too_large"


async def test_engine_death_answers_every_caller_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        plain = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(1))))
        asked = body(group(2), stream=True)
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as stream:
            await running_samples(served, 2)
            engine.die()
            records = await lines(stream)
        answer = await plain
        assert (
            'coppice_groups_total{outcome="failed"} 2.0' in (await served.http.get("/metrics")).text
        )
        later = await served.http.post("/v1/rollouts", json=body(group(1)))
        alive = await served.http.get("/livez")
    assert records[-1]["problem"]["code"] == "engine_dead"
    for refused in (answer, later, alive):
        assert (refused.status_code, refused.json()["code"]) == (503, "engine_dead")
    assert int(answer.headers["retry-after"]) > 0


async def test_samples_have_distinct_seeds_and_priority_reaches_the_engine(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        plain = asyncio.create_task(served.http.post("/v1/rollouts", json=body(group(3))))
        await running_samples(served, 1)
        asked = body(group(1, n=3, seed=7), group(1, n=3, seed=8), group(2), priority=-5)
        urgent = asyncio.create_task(served.http.post("/v1/rollouts", json=asked))
        await running_samples(served, 8)
        first, *requests = [sample.request for sample in engine.running.values()]
        engine.step(4)
        await asyncio.gather(plain, urgent)
    seeds = [request.seed for request in requests]
    assert seeds.pop() is None
    assert len(set(seeds)) == 6, "neighbouring seeds share no stream"
    assert all(request.priority < first.priority for request in requests)
    assert len({request.priority for request in requests}) == 3, "samples of a group share a rank"
