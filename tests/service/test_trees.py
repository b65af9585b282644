"""`branching`: a group that grows as a tree."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, Branching
from coppice.rollout_results import result_of_packed
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import unpack
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import running_samples
from tests.service.trees import (
    BLOCK,
    PROMPT,
    check_cuts,
    check_tree,
    lengths,
    path,
    stop_after,
    tree_request,
)
from tests.serving import Served, serving


async def grown(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    answered = await served.http.post("/v1/rollouts", json=body)
    assert answered.status_code == 200, answered.text
    [group] = answered.json()["groups"]
    check_tree(group)
    check_cuts(group, len(body["groups"][0]["prompt"]["token_ids"]))
    found: dict[str, Any] = group
    return found


def depths(group: dict[str, Any]) -> list[int]:
    return [segment["depth"] for segment in group["segments"]]


async def test_paths_split_at_the_prompt_and_at_every_interval(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        group = await grown(served, tree_request(max_tokens=100))
    assert sorted(depths(group)) == [1, 1, 2, 2, 2, 2]
    assert [len(s["token_ids"]) for s in group["segments"] if s["depth"] == 1] == [32] * 2
    assert lengths(group) == [100] * 4
    assert group["outcome"] == "done"
    assert group["samples"] == []


async def test_later_first_split_counts_no_depth_before_it(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        group = await grown(served, tree_request(first_split=40, max_depth=1, factor=3))
    assert depths(group) == [0, 1, 1, 1]
    assert len(group["segments"][0]["token_ids"]) == 64


async def test_factor_may_differ_by_depth(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        group = await grown(served, tree_request(factor=[3, 2, 2], max_depth=3, max_leaves=64))
    assert sorted(depths(group)) == [1] * 3 + [2] * 6 + [3] * 12


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 8])
async def test_leaves_never_exceed_the_requested_maximum(tmp_path: Path, most: int) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        group = await grown(served, tree_request(max_leaves=most, max_depth=3))
    assert len(group["leaves"]) == most


async def test_positions_set_where_paths_are_cut(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        group = await grown(served, tree_request("positions", positions=[10, 100], max_depth=4))
    cuts = [sum(len(s["token_ids"]) for s in path(group, each["id"])) for each in group["segments"]]
    assert sorted(set(cuts)) == [32, 128, 200]


async def test_cuts_keep_their_distance(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        body = tree_request(
            "positions", positions=[30, 40, 50], min_gap=64, max_depth=4, max_leaves=8
        )
        group = await grown(served, body)
    cut = [s for s in group["segments"] if s["finish_reason"] == "cut"]
    assert sorted({len(s["token_ids"]) for s in cut}) == [32, 64]


async def test_budget_counts_shared_tokens_once_and_is_never_exceeded(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        for budget in (1, 7, 50, 100, 333, 400):
            body = tree_request(max_new_tokens_total=budget, max_leaves=8, max_depth=3)
            group = await grown(served, body)
            assert sum(len(s["token_ids"]) for s in group["segments"]) <= budget
            finishes = [s["finish_reason"] for s in group["segments"] if s["id"] in group["leaves"]]
            assert "budget" in finishes
            assert group["outcome"] == "done"


async def test_leaves_of_a_path_that_stops_early_restart_at_its_parent(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = asyncio.create_task(grown(served, tree_request()))
        await running_samples(served, 2)
        stop_after(engine, 5, 0)
        engine.step(5)
        await running_samples(served, 2)
        engine.instant = True
        engine.step(250)
        group = await request
    assert len(group["leaves"]) == 4
    at_prompt = [len(s["token_ids"]) for s in group["segments"] if not s.get("parent")]
    assert sorted(at_prompt) == [5, 32, 200]


async def test_leaves_of_a_path_that_stops_early_may_be_dropped(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = asyncio.create_task(grown(served, tree_request(on_early_stop="none")))
        await running_samples(served, 2)
        stop_after(engine, 5, 0)
        engine.instant = True
        engine.step(250)
        group = await request
    assert lengths(group) == [5, 200, 200]


async def test_paths_are_cut_at_the_highest_entropy(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.entropy = lambda place: {70: 5.0, 140: 3.0, 150: 4.0, 10: 9.0}.get(place, 0.1)
    async with serving(engine, tmp_path) as served:
        body = tree_request("entropy", first_split=20, max_leaves=3, max_depth=2)
        group = await grown(served, body)
    first, second, rest = group["segments"][:3]
    assert (len(first["token_ids"]), first["finish_reason"]) == (96, "cut")
    assert (len(second["token_ids"]), second["finish_reason"]) == (64, "cut")
    assert rest["finish_reason"] == "length"
    assert [s.get("parent") for s in group["segments"][3:]] == [first["id"], second["id"]]
    assert group["segments"][0]["entropy"][70 - 1] == 5.0


async def test_entropy_may_come_from_the_top_logprobs(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        body = tree_request("entropy", entropy={"source": "sampled_token"}, max_leaves=4)
        group = await grown(served, body)
    assert {value for s in group["segments"] for value in s["entropy"]} == {0.5}
    assert len(group["leaves"]) == 4


async def test_flattened_rows_are_the_paths_of_the_leaves(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        group = await grown(served, tree_request(flatten=True))
    assert [row["index"] for row in group["samples"]] == [0, 1, 2, 3]
    for row, leaf in zip(group["samples"], group["leaves"], strict=True):
        assert row["token_ids"] == [t for s in path(group, leaf) for t in s["token_ids"]]
        assert row["versions"] == [{"version": "v0", "start": 0, "end": 200}]
        assert row["finish_reason"] == "length"


async def test_stream_sends_segments_as_they_end(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        body = tree_request(rest={"stream": True}, max_tokens=100)
        async with served.http.stream("POST", "/v1/rollouts", json=body) as got:
            records = got.aiter_lines()
            await anext(records)
            await running_samples(served, 2)
            engine.step(32)
            first = json.loads(await anext(records))
            assert (first["type"], first["segment"]["finish_reason"]) == ("segment", "cut")
            assert "num_leaves" not in first["segment"]
            engine.instant = True
            engine.step(250)
            rest = [json.loads(line) async for line in records]
    assert [record["type"] for record in rest] == ["segment"] * 5 + ["group", "end"]
    assert len(rest[-2]["group"]["leaves"]) == 4
    assert rest[-1]["usage"] == {
        "num_prompt_tokens": 1,
        "num_generated_tokens": 336,
        "num_samples": 4,
    }


async def test_stream_includes_rows_on_request(tmp_path: Path) -> None:
    branching = Branching(mode="interval", interval=BLOCK, max_depth=2, max_leaves=4, flatten=True)
    async with serving(FakeEngine(), tmp_path) as served, AsyncRollouts(served.url) as rollouts:
        [group] = (await rollouts.rollout([PROMPT], max_tokens=99, branching=branching)).groups
    assert group.tree is not None
    rows = [row.token_ids.tolist() for row in group.tree.rows()]
    assert [sample.token_ids.tolist() for sample in group.samples] == rows
    assert len(rows) == 4


async def test_packed_answers_contain_trees(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        body = tree_request("entropy", flatten=True)
        answered = await served.http.post(
            "/v1/rollouts", json=body, headers={"Accept": PACKED_MEDIA_TYPE}
        )
        plain = (await served.http.post("/v1/rollouts", json=body)).json()["groups"][0]
    [group] = result_of_packed(unpack(answered.content)).groups
    assert group.tree is not None
    assert [s.token_ids.tolist() for s in group.tree.segments] == [
        s["token_ids"] for s in plain["segments"]
    ]
    assert [row.token_ids.tolist() for row in group.tree.rows()] == [
        sample.token_ids.tolist() for sample in group.samples
    ]
    for segment, wanted in zip(group.tree.segments, plain["segments"], strict=True):
        assert segment.entropy is not None
        assert segment.entropy.tolist() == wanted["entropy"]


async def test_deadline_returns_the_tree_as_it_is(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        body = tree_request(rest={"finish": {"deadline_seconds": 1.5}})
        request = asyncio.create_task(grown(served, body))
        await running_samples(served, 2)
        engine.step(7)
        group = await request
    assert group["outcome"] == "partial"
    assert [s["finish_reason"] for s in group["segments"]] == ["deadline"] * 2
    assert lengths(group) == [7, 7]


async def test_enough_leaves_end_the_others_and_start_no_more(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = asyncio.create_task(
            grown(served, tree_request(rest={"finish": {"num_samples": 1}}))
        )
        await running_samples(served, 2)
        stop_after(engine, 5, 0)
        engine.step(5)
        group = await request
        assert not engine.running
    assert group["outcome"] == "done"
    assert [s["finish_reason"] for s in group["segments"]] == ["stop", "surplus"]


async def test_aborted_tree_keeps_its_segments(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        headers = {"Prefer": "respond-async"}
        started = await served.http.post("/v1/rollouts", json=tree_request(), headers=headers)
        await running_samples(served, 2)
        engine.step(32)
        await running_samples(served, 4)
        answered = await served.http.delete(started.headers["location"])
        assert not engine.running
    [group] = answered.json()["groups"]
    check_tree(group)
    assert group["outcome"] == "cancelled"
    assert [s["finish_reason"] for s in group["segments"]] == ["cut"] * 2 + ["aborted"] * 4


async def test_tree_with_an_exact_version_ends_with_it(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        body = tree_request(rest={"weights": {"exact_version": "v0"}})
        request = asyncio.create_task(grown(served, body))
        await running_samples(served, 2)
        engine.step(32)
        await running_samples(served, 4)
        engine.step(2)
        await served.http.put("/v1/weights/v1", content=b"x")
        activated = await served.http.post("/v1/weights/v1/activate", json={})
        assert activated.json()["samples_ended"] == 4
        group = await request
    assert group["outcome"] == "partial"
    assert [s["finish_reason"] for s in group["segments"]] == ["cut"] * 2 + ["version_changed"] * 4


async def test_segments_report_the_version_of_their_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = asyncio.create_task(grown(served, tree_request(flatten=True, max_tokens=100)))
        await running_samples(served, 2)
        engine.step(32)
        await running_samples(served, 4)
        engine.step(2)
        await served.http.put("/v1/weights/v1", content=b"x")
        await served.http.post("/v1/weights/v1/activate", json={})
        engine.step(200)
        group = await request
    assert [s["versions"] for s in group["segments"] if s["depth"] == 2] == [
        [
            {"version": "v0", "start": 0, "end": 2},
            {"version": "v1", "start": 2, "end": 68},
        ]
    ] * 4
    assert group["samples"][0]["versions"] == [
        {"version": "v0", "start": 0, "end": 34},
        {"version": "v1", "start": 34, "end": 100},
    ]


async def test_tree_reserves_as_many_samples_as_its_maximum_of_leaves(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    limits = {"max_samples_per_key": 6}
    async with serving(engine, tmp_path, limits=limits) as served:
        request = asyncio.create_task(grown(served, tree_request(max_leaves=4)))
        await running_samples(served, 2)
        assert served.server.admission.num_samples == 4
        refused = await served.http.post("/v1/rollouts", json=tree_request(max_leaves=3))
        assert refused.json()["code"] == "quota_exceeded"
        engine.instant = True
        engine.step(250)
        await request
        assert served.server.admission.num_samples == 0


async def test_engine_death_ends_a_tree(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        request = asyncio.create_task(served.http.post("/v1/rollouts", json=tree_request()))
        await running_samples(served, 2)
        engine.step(32)
        await running_samples(served, 4)
        engine.die()
        assert (await request).json()["code"] == "engine_dead"
        assert served.server.admission.num_samples == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    (tree_request("positions"), "needs positions"),
    (tree_request("interval", positions=[5]), "positions has no effect in mode interval"),
    (tree_request("external", factor=4), "factor has no effect in mode external"),
    (tree_request("positions", positions=[9, 9]), "ascending"),
    ({**tree_request(), "groups": [{"prompt": {"token_ids": [1]}, "n": 2}]}, "n = 1"),
    (tree_request(rest={"finish": {"num_samples": 5}}), "fewer samples"),
    (tree_request("external"), "respond-async"),
]


@pytest.mark.parametrize(("body", "said"), REFUSED)
async def test_invalid_branching_is_refused(
    tmp_path: Path, body: dict[str, Any], said: str
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        refused = await served.http.post("/v1/rollouts", json=body)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
    assert said in refused.json()["detail"]


async def test_seed_determines_every_path_of_a_tree(tmp_path: Path) -> None:
    """Independent of timing: a path's random stream depends only on its place in the tree."""
    engine = FakeEngine(instant=False)
    seeds: list[list[int | None]] = []
    async with serving(engine, tmp_path) as served:
        for turn in range(2):
            body = tree_request()
            body["groups"][0]["seed"] = 7
            request = asyncio.create_task(grown(served, body))
            await running_samples(served, 2)
            first = [run.request.seed for run in engine.running.values()]
            for sample in list(engine.running.values())[:: 1 if turn else -1]:
                sample.token_versions += ["v0"] * 32
                engine._finish(sample, "length")
                await asyncio.sleep(0.01)
            await running_samples(served, 4)
            rest = sorted(run.request.seed or 0 for run in engine.running.values())
            seeds.append([*first, *rest])
            engine.step(250)
            await request
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 6
