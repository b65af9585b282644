"""`keep_kv` and activations with `kv: keep_running`: chains, versions of KV, refused requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, Branching, ChainKeepKv, KvVersionSpan
from engine.types.info import KeptKvReason
from tests.fake_engine import BLOCK_SIZE, FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.sessions.agents import HELLO, training
from tests.service.test_resume import resume_request, started
from tests.service.test_rollouts import body, group, running_samples
from tests.service.trees import tree_request
from tests.serving import Served, serving

PROMPT = list(range(1, 2 * BLOCK_SIZE + 2))


async def activate(served: Served, version: str, **fields: Any) -> dict[str, Any]:
    await served.http.put(f"/v1/weights/{version}", content=b"x")
    answer = await served.http.post(f"/v1/weights/{version}/activate", json=fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def plain(spans: Any) -> list[tuple[str, int, int, int]]:
    return [(span.version, span.start, span.end, span.first_token) for span in spans]


async def test_chain_continues_on_its_kv_and_reports_the_versions(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        first = await rollouts.rollout([PROMPT], max_tokens=4, keep_kv=ChainKeepKv())
        answer = await activate(served, "v1", kv="keep_running")
        kept: dict[str, Any] = {"max_tokens": 8, "continue_from": [first.groups[0].samples]}
        own = await rollouts.rollout([PROMPT], **kept, keep_kv=ChainKeepKv(chain=first.id))
        other = await rollouts.rollout([PROMPT], **kept, keep_kv=ChainKeepKv())
        exact = await rollouts.rollout([PROMPT], **kept)
    num, end = 2 * BLOCK_SIZE, len(PROMPT) + 7
    assert answer["num_kept_tokens"] == num
    [sample] = own.groups[0].samples
    assert plain(sample.kv_versions) == [
        ("v0", 0, len(PROMPT) + 3, 0),
        ("v0", 0, num, 4),
        ("v1", num, end, 4),
    ]
    for result in (other, exact):
        [sample] = result.groups[0].samples
        assert plain(sample.kv_versions)[1:] == [("v1", 0, end, 4)]


async def test_activation_that_resets_drops_the_kv_of_chains(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        keep = ChainKeepKv(chain="episode-1")
        await rollouts.rollout([PROMPT], max_tokens=4, keep_kv=keep)
        assert (await activate(served, "v1"))["num_kept_tokens"] == 0
        result = await rollouts.rollout([PROMPT], max_tokens=4, keep_kv=keep)
    assert result.groups[0].num_cached_tokens == 0
    assert [call for call in engine.calls if "swap" in call] == ["swap v1"]


async def test_running_sample_reports_the_kv_that_it_keeps(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        running = asyncio.create_task(rollouts.rollout([[1, 2, 3]], max_tokens=6))
        await running_samples(served, 1)
        engine.step(2)
        await activate(served, "v1")
        engine.step(6)
        [sample] = (await running).groups[0].samples
    assert [span.version for span in sample.versions] == ["v0", "v1"]
    assert sample.kv_versions == (
        KvVersionSpan(version="v0", start=0, end=4),
        KvVersionSpan(version="v1", start=4, end=8),
    )


async def test_segments_and_rows_of_a_tree_report_the_kv_of_their_path(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        branching = Branching(mode="interval", max_leaves=2, max_depth=2, interval=32, flatten=True)
        keep = ChainKeepKv()
        result = await rollouts.rollout([[1]], max_tokens=64, branching=branching, keep_kv=keep)
        salts = {request.kept_kv for request in engine.submitted}
    [group_] = result.groups
    assert group_.tree is not None and len(salts) == 1 and None not in salts
    starts = {None: 1} | {
        segment.id: 1 + sum(len(each.token_ids) for each in group_.tree.path(segment.id))
        for segment in group_.tree.segments
    }
    for segment in group_.tree.segments:
        assert plain(segment.kv_versions) == [("v0", 0, starts[segment.id] - 1, 0)]
    for row in (*group_.samples, *group_.tree.rows()):
        assert plain(row.kv_versions) == [("v0", 0, 64, 0)]


async def test_calls_of_a_session_share_a_chain(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        first, second = await trainer.create(
            n=2, sampling={"max_tokens": 3}, keep_kv={"max_lag": 2}
        )
        [plain_one] = await trainer.create(sampling={"max_tokens": 3})
        for agent in (first, first, second, plain_one):
            await agent.text(HELLO)
        kept = [request.kept_kv for request in trainer.engine.submitted]
        answer = await trainer.finish(first)
    assert kept[0] == kept[1] and kept[0] is not None and kept[0].max_lag == 2
    assert kept[2] not in (kept[0], None) and kept[3] is None
    segments = answer["groups"][0]["segments"]
    assert [segment["kv_versions"] for segment in segments] == [
        [{"version": "v0", "start": 0, "end": len(b"hello") + 2}]
    ] * 2


async def test_chain_of_another_key_cannot_be_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, a="rollout", b="rollout")
    engine = FakeEngine()
    async with serving(engine, tmp_path, server={"keys_file": file}) as served:
        for name in ("a", "b", "a"):
            request = body(group(1), keep_kv={"chain": "x"})
            answer = await served.http.post(
                "/v1/rollouts", json=request, headers=bearer(secrets[name])
            )
            assert answer.status_code == 200, answer.text
    first, second, third = (request.kept_kv for request in engine.submitted)
    assert first == third != second


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv": {}}, "one weights version"),
    ({"kv_reuse": {"mode": "splice"}}, "kv_reuse"),
    ({"weights": {"exact_version": "v0"}}, "exact_version"),
    ({"keep_kv": {"max_lag": -1}}, "max_lag"),
    ({"keep_kv": {"chain": "a b"}}, "chain"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED)
async def test_options_that_need_one_version_are_refused(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    engine = FakeEngine(prompt_kv=True)
    async with serving(engine, tmp_path) as served:
        request = body(group(1, 2), **{"keep_kv": {}, **fields})
        answer = await served.http.post("/v1/rollouts", json=request)
    assert answer.status_code == 422 and said in answer.text, answer.text
    assert engine.submitted == []


@pytest.mark.parametrize("reason", ["prefix_caching_off", "kv_offloading", "unsupported_cache"])
async def test_engine_that_cannot_keep_kv_refuses(tmp_path: Path, reason: KeptKvReason) -> None:
    engine = FakeEngine()
    engine.kept_kv_reason = reason
    async with serving(engine, tmp_path) as served:
        answers = [
            await served.http.post("/v1/rollouts", json=body(group(1), keep_kv={})),
            await served.http.post("/v1/rollouts", json=tree_request(rest={"keep_kv": {}})),
            await served.http.post("/v1/sessions", json={"keep_kv": {}}),
        ]
    assert [answer.status_code for answer in answers] == [422] * 3
    assert all("keep_kv" in answer.text for answer in answers)


async def test_recomputation_cannot_keep_kv(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        await served.http.put("/v1/weights/v1", content=b"x")
        answer = await served.http.post(
            "/v1/weights/v1/activate", json={"mode": "recompute", "kv": "keep_running"}
        )
    assert answer.status_code == 422
    (detail,) = answer.json()["errors"]
    assert detail["location"] == "kv" and "recompute" in detail["message"]


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "v0", "start": 0, "end": 3}],
        [{"version": "v0", "start": 1, "end": 4}],
        [{"version": "v0", "start": 0, "end": 4, "first_token": 3}],
        [
            {"version": "v0", "start": 0, "end": 2, "first_token": 1},
            {"version": "v0", "start": 0, "end": 4},
        ],
    ],
)
async def test_given_kv_versions_must_cover_the_tokens(
    tmp_path: Path, spans: list[dict[str, Any]]
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        given = started(90, 91, 92, kv_versions=spans)
        answer = await served.http.post("/v1/rollouts", json=resume_request(given))
    assert answer.status_code == 422 and "KV version spans" in answer.text
