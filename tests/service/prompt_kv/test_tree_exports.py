"""Prompt KV of a tree: of its prompt, and of every path with children."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts, Branching, Kv, KvSource, PromptKV
from coppice.rollout_results import result_of_packed
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import unpack
from tests.fake_engine import FakeEngine
from tests.fake_export import fake_kv
from tests.service.prompt_kv.test_exports import activate_weights, data, exporting
from tests.service.test_external_trees import Opened, open_tree
from tests.service.test_rollouts import running_samples
from tests.service.trees import BLOCK, PROMPT, path, tree_request
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

KV = {"kv": {"lease_seconds": 60}}
CAPACITY: dict[str, Any] = {"capacity_bytes": 2**24}


async def run_tree(served: Served, mode: str = "interval", /, **fields: Any) -> dict[str, Any]:
    body = tree_request(mode, rest=KV, **fields)
    answer = await served.http.post("/v1/rollouts", json=body)
    assert answer.status_code == 200, answer.text
    served.server.prompt_kv.check()
    group: dict[str, Any] = answer.json()["groups"][0]
    return group


def tokens(group: dict[str, Any], segment: str, prompt: list[int] = PROMPT) -> list[int]:
    return prompt + [token for each in path(group, segment) for token in each["token_ids"]]


def inner_segments(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Segments with children."""
    return [each for each in group["segments"] if each["id"] not in group["leaves"]]


async def assert_kv_is_of_every_inner_path(
    served: Served, group: dict[str, Any], prompt: list[int] = PROMPT
) -> None:
    for segment in group["segments"]:
        if segment["id"] in group["leaves"]:
            assert (segment["kv"], segment["kv_reason"]) == (None, "not_continued")
            continue
        covered = tokens(group, segment["id"], prompt)[:-1]
        assert (segment["kv_reason"], segment["kv"]["num_tokens"]) == (None, len(covered))
        stored, expected = await data(served, segment["kv"]["handle"]), fake_kv(covered, "v0")
        for layer in range(2):
            assert (stored[f"k.{layer}"] == expected[layer, 0]).all()
            assert (stored[f"v.{layer}"] == expected[layer, 1]).all()


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("interval", {"prompt": [7, 8, 9]}),
        ("interval", {"first_split": 40, "factor": 3}),
        ("entropy", {"first_split": 20, "max_leaves": 5}),
    ],
)
async def test_every_path_with_children_has_a_handle_except_on_its_last_token(
    tmp_path: Path, mode: str, fields: dict[str, Any]
) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        group = await run_tree(served, mode, **fields)
        assert len(inner_segments(group)) >= 1
        prompt = fields.get("prompt", PROMPT)
        await assert_kv_is_of_every_inner_path(served, group, prompt)
        assert group["kv_reason"] == (None if len(prompt) > 1 else "prompt_too_short")


async def test_first_child_to_run_exports_and_equal_paths_share_bytes(
    tmp_path: Path,
) -> None:
    engine = exporting()
    async with serving(engine, tmp_path, kv=CAPACITY) as served:
        group = await run_tree(served, prompt=[7, 8, 9], factor=[2, 4], max_leaves=8)
        writers = [sample for sample in engine.submitted if sample.export is not None]
        assert [len(sample.prompt_token_ids) for sample in writers] == [3, 65]
        one, other = inner_segments(group)  # the fake engine's siblings are identical
        assert one["kv"]["handle"] != other["kv"]["handle"]
        assert one["kv"]["locators"][0] == other["kv"]["locators"][0]


async def test_packed_answers_contain_the_handles(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        body, accept = tree_request(rest=KV), {"Accept": PACKED_MEDIA_TYPE}
        answer = await served.http.post("/v1/rollouts", json=body, headers=accept)
    [group] = result_of_packed(unpack(answer.content)).groups
    assert group.tree is not None
    reasons = {
        segment.id: (segment.kv is None, segment.kv_reason) for segment in group.tree.segments
    }
    assert {reasons[leaf] for leaf in group.tree.leaves} == {(True, "not_continued")}
    assert {known for name, known in reasons.items() if name not in group.tree.leaves} == {
        (False, None)
    }


async def test_client_fetches_the_kv_of_a_path(tmp_path: Path) -> None:
    branching = Branching(mode="interval", interval=BLOCK, max_depth=2, max_leaves=4)
    async with (
        serving(exporting(), tmp_path, kv=CAPACITY) as served,
        AsyncRollouts(served.url) as rollouts,
    ):
        result = await rollouts.rollout([PROMPT], max_tokens=99, branching=branching, kv=Kv())
        tree = result.groups[0].tree
        assert tree is not None
        segment = tree.segments[0]
        assert segment.kv is not None, segment.kv_reason
        assert {tree.segment(leaf).kv_reason for leaf in tree.leaves} == {"not_continued"}
        for transport in ("http", "shm"):
            source = KvSource(served.url, transports=[transport])
            kv = await asyncio.to_thread(PromptKV.fetch, segment.kv, source)
            assert kv is not None, source.counts
            expected = fake_kv(PROMPT + segment.token_ids.tolist()[:-1], "v0")
            assert (kv.tensors()["k.0"] == expected[0, 0]).all()
        await asyncio.to_thread(source.release, segment.kv.handle)
        assert (
            served.server.prompt_kv.status().num_handles
            == len(tree.segments) - len(tree.leaves) - 1
        )


async def test_stream_sends_the_handle_of_a_path_while_its_children_run(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path, kv=CAPACITY) as served:
        body = tree_request(max_tokens=100, rest={"stream": True, **KV})
        async with served.http.stream("POST", "/v1/rollouts", json=body) as got:
            lines = got.aiter_lines()
            await running_samples(served, 2)
            engine.step(32)
            await running_samples(served, 4)
            engine.step(1)
            records = []
            async for line in lines:
                records.append(json.loads(line))
                if sum(record["type"] == "kv" for record in records) == 2:
                    break
            assert len(engine.running) == 4
            named = {record["segment"] for record in records if record["type"] == "kv"}
            assert named == {r["segment"]["id"] for r in records if r["type"] == "segment"}
            engine.step(250)
            rest = [json.loads(line) async for line in lines]
    leaves = rest[-2]["group"]["leaves"]
    reasons = [(r["segment"], r["kv_reason"]) for r in rest if r["type"] == "kv"]
    assert sorted(reasons) == sorted((leaf, "not_continued") for leaf in leaves)


async def test_leases_of_paths_start_at_the_end_of_the_rollout(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path, kv=CAPACITY) as served:
        body = tree_request(max_tokens=100, rest={"kv": {"lease_seconds": 0.1}})
        rollout = asyncio.create_task(served.http.post("/v1/rollouts", json=body))
        await running_samples(served, 2)
        engine.step(32)
        await running_samples(served, 4)
        engine.step(1)
        kv = served.server.prompt_kv
        while kv.status().num_handles < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        kv.handles.sweep()
        assert kv.status().num_handles == 2, "held while the tree grows"
        engine.step(250)
        [group] = (await rollout).json()["groups"]
        assert [segment["kv"]["lease_seconds"] for segment in inner_segments(group)] == [0.1] * 2
        while kv.status().free_bytes < kv.status().capacity_bytes:
            await asyncio.sleep(0.01)


async def test_full_arena_costs_only_handles(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv={"capacity_bytes": 2**20}) as served:
        long = [token % 256 for token in range(500)]
        group = await run_tree(served, prompt=long, max_tokens=10, first_split=5)
        assert (group["outcome"], len(group["leaves"])) == ("done", 1)
        group = await run_tree(served, prompt=long[:300], max_tokens=150)
        metrics = (await served.http.get("/metrics")).text
    assert group["outcome"] == "done"
    assert {segment["kv_reason"] for segment in inner_segments(group)} == {"arena_full"}
    assert 'coppice_kv_exports_total{outcome="arena_full"} 2.0' in metrics
    assert 'coppice_kv_exports_total{outcome="not_continued"} 5.0' in metrics


async def test_paths_without_kv_have_a_reason(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        group = await run_tree(served)
    assert {segment["kv_reason"] for segment in inner_segments(group)} == {"disabled"}


async def test_without_a_request_paths_have_neither_handle_nor_reason(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        answer = await served.http.post("/v1/rollouts", json=tree_request())
        [group] = answer.json()["groups"]
        assert {(s["kv"], s["kv_reason"]) for s in group["segments"]} == {(None, None)}
        assert served.server.prompt_kv.status().num_handles == 0


async def test_path_belongs_to_the_version_that_prefilled_it_again(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path, kv=CAPACITY) as served:
        body = tree_request(max_tokens=100, prompt=[7, 8, 9], rest=KV)
        rollout = asyncio.create_task(served.http.post("/v1/rollouts", json=body))
        await running_samples(served, 2)
        engine.step(16)
        await activate_weights(served, "v1")
        engine.instant = True
        engine.step(250)
        [group] = (await rollout).json()["groups"]
        assert group["kv"]["version"] == "v0"
        for segment in inner_segments(group):
            assert [span["version"] for span in segment["versions"]] == ["v0", "v1"]
            assert segment["kv"]["version"] == "v1"


# Externally grown trees


async def test_branch_returns_the_handle_of_its_parent_path(tmp_path: Path) -> None:
    async with open_tree(tmp_path, exporting(), {"kv": CAPACITY}, rest=KV) as tree:
        one, other = await tree.branch(n=2, max_tokens=20)
        assert (one["kv"], one["kv_reason"]) == (None, None)
        await tree.branch(segment=one["id"], n=3, max_tokens=20)
        await tree.branch(segment=one["id"], max_tokens=20)
        group = await tree.closed()
        assert [segment["id"] for segment in inner_segments(group)] == [one["id"]]
        assert other["id"] in group["leaves"]
        await assert_kv_is_of_every_inner_path(tree.served, group)


async def dropped(tree: Opened, segment: str) -> None:
    assert (await tree.drop(segment)).status_code == 200
    kv = tree.served.server.prompt_kv
    while kv.status().free_bytes < kv.status().capacity_bytes:
        await asyncio.sleep(0.001)
    kv.check()


async def test_dropped_segment_frees_its_bytes_at_once(tmp_path: Path) -> None:
    async with open_tree(tmp_path, exporting(), {"kv": CAPACITY}, rest=KV) as tree:
        [trunk] = await tree.branch(max_tokens=20)
        await tree.branch(segment=trunk["id"], n=2, max_tokens=20)
        kv = tree.served.server.prompt_kv
        while not kv.status().num_handles:
            await asyncio.sleep(0.001)
        await dropped(tree, trunk["id"])
        assert (await tree.closed())["segments"] == []


async def test_path_dropped_before_its_prefill_frees_its_slot(
    tmp_path: Path,
) -> None:
    engine = exporting()
    async with open_tree(tmp_path, engine, {"kv": CAPACITY}, rest=KV) as tree:
        [trunk] = await tree.branch(max_tokens=20)
        engine.instant = False
        growing = asyncio.create_task(tree.branch(segment=trunk["id"], max_tokens=20))
        while not engine.running:
            await asyncio.sleep(0.001)
        assert tree.served.server.prompt_kv.status().reserved_bytes > 0
        await dropped(tree, trunk["id"])
        assert await growing == []


async def test_engine_death_under_a_tree_frees_every_slot(tmp_path: Path) -> None:
    engine = exporting(instant=False)
    async with serving(engine, tmp_path, kv=CAPACITY) as served:
        body = tree_request(max_tokens=100, rest=KV)
        rollout = asyncio.create_task(served.http.post("/v1/rollouts", json=body))
        await running_samples(served, 2)
        engine.step(32)
        await running_samples(served, 4)
        engine.die()
        assert (await rollout).json()["code"] == "engine_dead"
        kv = served.server.prompt_kv
        while kv.status().free_bytes < kv.status().capacity_bytes:
            await asyncio.sleep(0.001)
        kv.check()
