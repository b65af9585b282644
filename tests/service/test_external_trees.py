"""Externally grown trees: opened, branched, pruned and abandoned."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from coppice import BranchRequest
from service.errors import EngineGone
from service.rollouts.trees.external_tree import ExternalTree
from tests.fake_engine import FakeEngine
from tests.invariants.yielding_engine import YieldingEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.loop_time import forward, in_forwardable_loop
from tests.service.test_rollouts import running_samples
from tests.service.trees import BLOCK, PROMPT, check_cuts, check_tree, tree_request
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

ASYNC = {"Prefer": "respond-async"}


@dataclass(frozen=True)
class Opened:
    served: Served
    address: str

    async def post(
        self, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return await self.served.http.post(f"{self.address}/branch", json=body, headers=headers)

    async def branch(self, **body: Any) -> list[dict[str, Any]]:
        answered = await self.post(body)
        assert answered.status_code == 200, answered.text
        segments: list[dict[str, Any]] = answered.json()["segments"]
        return segments

    async def drop(self, segment: str) -> httpx.Response:
        return await self.served.http.delete(f"{self.address}/segments/{segment}")

    async def closed(self) -> dict[str, Any]:
        return group_of(await self.served.http.delete(self.address))

    async def ended(self) -> dict[str, Any]:
        return group_of(await self.served.http.get(f"{self.address}?wait=10"))


def group_of(answered: httpx.Response) -> dict[str, Any]:
    assert answered.status_code == 200, answered.text
    group: dict[str, Any] = answered.json()["groups"][0]
    check_tree(group)
    check_cuts(group, len(PROMPT))
    return group


async def opened(served: Served, rest: dict[str, Any] | None = None, **fields: Any) -> Opened:
    wide = {"max_leaves": 8, "max_depth": 8, **fields}
    body = tree_request("external", rest=rest, **wide)
    started = await served.http.post("/v1/rollouts", json=body, headers=ASYNC)
    assert started.status_code == 202, started.text
    return Opened(served, started.headers["location"])


@asynccontextmanager
async def open_tree(
    folder: Path,
    engine: FakeEngine | None = None,
    sections: dict[str, Any] | None = None,
    /,
    **fields: Any,
) -> AsyncIterator[Opened]:
    async with serving(engine or FakeEngine(), folder, **(sections or {})) as served:
        yield await opened(served, **fields)


async def test_search_grows_a_tree_step_by_step(tmp_path: Path) -> None:
    async with open_tree(tmp_path) as tree:
        first = await tree.branch(n=3, max_tokens=20)
        assert [(s["finish_reason"], len(s["token_ids"])) for s in first] == [("cut", BLOCK)] * 3
        best = first[1]["id"]
        second = await tree.branch(segment=best, n=2, max_tokens=40)
        assert [len(s["token_ids"]) for s in second] == [2 * BLOCK] * 2
        assert {s["parent"] for s in second} == {best}
        [whole] = await tree.branch(segment=second[0]["id"])
        assert whole["finish_reason"] == "length"
        group = await tree.closed()
    assert group["outcome"] == "done"
    assert len(group["leaves"]) == 4
    assert {s["id"]: s["num_leaves"] for s in group["segments"]}[best] == 2


async def test_dropped_segment_removes_its_subtree(tmp_path: Path) -> None:
    async with open_tree(tmp_path) as tree:
        one, other = await tree.branch(n=2, max_tokens=20)
        [below] = await tree.branch(segment=one["id"], max_tokens=20)
        dropped = await tree.drop(one["id"])
        assert dropped.json()["dropped"] == sorted([one["id"], below["id"]])
        again = await tree.drop(one["id"])
        assert (again.status_code, again.json()["code"]) == (404, "segment_not_found")
        group = await tree.closed()
    assert [s["id"] for s in group["segments"]] == [other["id"]]
    assert group["num_dropped"] == 2


async def test_running_segments_below_a_dropped_one_are_aborted(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with open_tree(tmp_path, engine) as tree:
        one, other = await tree.branch(n=2, max_tokens=20)
        engine.instant = False
        growing = asyncio.create_task(tree.branch(segment=one["id"], n=2))
        kept = asyncio.create_task(tree.branch(segment=other["id"]))
        await running_samples(tree.served, 3)
        await tree.drop(one["id"])
        assert await growing == []
        assert len(engine.running) == 1
        engine.step(250)
        assert len(await kept) == 1
        assert len((await tree.closed())["segments"]) == 2


@in_forwardable_loop
async def test_open_tree_ends_when_its_lease_expires(tmp_path: Path) -> None:
    async with open_tree(tmp_path, lease_seconds=2) as tree:
        await tree.branch(n=2, max_tokens=20)
        await forward(2)
        group = await tree.ended()
        late = await tree.post({"n": 1})
    assert group["outcome"] == "done"
    assert (late.status_code, late.json()["code"]) == (409, "tree_closed")


@in_forwardable_loop
async def test_lease_is_paused_while_segments_run_and_renewed_by_use(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(instant=False)
    async with open_tree(tmp_path, engine, lease_seconds=3) as tree:
        growing = asyncio.create_task(tree.branch(max_tokens=20))
        await running_samples(tree.served, 1)
        await forward(3.3)
        engine.instant = True
        engine.step(BLOCK)
        await growing
        for _ in range(4):
            await forward(1)
            # A repeated request grows nothing, but renews the lease.
            retried = await tree.post({"max_tokens": 20}, {"Idempotency-Key": "k"})
            assert retried.status_code == 200, retried.text
        await forward(3)
        assert len((await tree.ended())["segments"]) == 2


@in_forwardable_loop
async def test_lease_is_capped_and_the_cap_reported(tmp_path: Path) -> None:
    limits = {"max_lease_seconds": 2}
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        tree = await opened(served, lease_seconds=3600)
        answered = await tree.post({"max_tokens": 20})
        assert answered.json()["lease_seconds"] == 2
        await forward(2)
        await tree.ended()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 9}, "max_leaves is 8"),
    ({"segment": "0.0", "n": 2, "max_tokens": 20}, "a segment that ended as"),
    ({"segment": "0.1", "max_tokens": 20}, "max_depth is 1"),
]


@pytest.mark.parametrize(("body", "said"), REFUSED)
async def test_bounds_of_an_open_tree_hold(tmp_path: Path, body: dict[str, Any], said: str) -> None:
    async with open_tree(tmp_path, max_depth=1) as tree:
        await tree.branch()
        await tree.branch(max_tokens=20)
        refused = await tree.post(body)
    assert refused.status_code == 422
    assert said in refused.json()["detail"]


async def test_open_tree_has_a_token_budget(tmp_path: Path) -> None:
    async with open_tree(tmp_path, max_new_tokens_total=40) as tree:
        [first] = await tree.branch(max_tokens=20)
        [second] = await tree.branch(segment=first["id"], max_tokens=20)
        assert (len(second["token_ids"]), second["finish_reason"]) == (8, "budget")
        refused = await tree.post({"n": 1})
    assert "max_new_tokens_total" in refused.json()["detail"]


async def test_retry_with_its_key_grows_nothing(tmp_path: Path) -> None:
    async with open_tree(tmp_path) as tree:
        headers = {"Idempotency-Key": "once"}
        answers = [await tree.post({"n": 2, "max_tokens": 20}, headers) for _ in range(2)]
        assert answers[0].json() == answers[1].json()
        other = await tree.post({"n": 3, "max_tokens": 20}, headers)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
        assert len((await tree.closed())["segments"]) == 2


async def test_branch_without_a_waiting_caller_ends_unless_it_has_a_key(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with open_tree(tmp_path, engine) as tree:
        for key in ({}, {"Idempotency-Key": "k"}):
            asking = asyncio.create_task(tree.post({"n": 2}, key))
            await running_samples(tree.served, 2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            if not key:
                await running_samples(tree.served, 0)
        await asyncio.sleep(0.05)
        assert len(engine.running) == 2
        engine.instant = True
        engine.step(250)
        answered = await tree.post({"n": 2}, {"Idempotency-Key": "k"})
        assert [s["finish_reason"] for s in answered.json()["segments"]] == ["length"] * 2


async def test_tree_belongs_to_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = {name: bearer(key) for name, key in write_keys(file, a="rollout", b="rollout").items()}
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        body = tree_request("external")
        started = await served.http.post("/v1/rollouts", json=body, headers={**ASYNC, **keys["a"]})
        address = started.headers["location"]
        for who, status in (("b", 404), ("a", 200)):
            answered = await served.http.post(
                f"{address}/branch", json={"max_tokens": 20}, headers=keys[who]
            )
            assert answered.status_code == status
        refused = await served.http.delete(f"{address}/segments/0.0", headers=keys["b"])
        assert (refused.status_code, refused.json()["code"]) == (404, "rollout_not_found")


async def test_automatic_tree_refuses_branches(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        started = await served.http.post("/v1/rollouts", json=tree_request(), headers=ASYNC)
        tree = Opened(served, started.headers["location"])
        assert (await tree.post({"n": 1})).json()["code"] == "tree_closed"
        assert (await tree.drop("0.0")).json()["code"] == "tree_closed"


async def test_waiting_activation_does_not_wait_for_an_idle_tree(tmp_path: Path) -> None:
    async with open_tree(tmp_path) as tree:
        [first] = await tree.branch(max_tokens=20)
        await tree.served.http.put("/v1/weights/v1", content=b"x")
        await tree.served.http.post("/v1/weights/v1/activate", json={"mode": "wait"})
        [second] = await tree.branch(segment=first["id"], max_tokens=20)
        assert [s["version"] for s in first["versions"]] == ["v0"]
        assert [s["version"] for s in second["versions"]] == ["v1"]


async def test_activation_ends_an_open_tree_with_an_exact_version(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        tree = await opened(served, rest={"weights": {"exact_version": "v0"}})
        await tree.branch(max_tokens=20)
        await served.http.put("/v1/weights/v1", content=b"x")
        await served.http.post("/v1/weights/v1/activate", json={})
        group = await tree.ended()
        assert group["outcome"] == "partial"
        assert (await tree.post({"n": 1})).json()["code"] == "tree_closed"


async def test_drain_does_not_wait_for_the_lease_of_an_idle_tree(tmp_path: Path) -> None:
    async with open_tree(tmp_path, lease_seconds=60) as tree:
        await tree.branch(max_tokens=20)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(tree.served.server.drain(30))
            assert (await tree.ended())["outcome"] == "done"


async def test_engine_death_is_reported_to_callers_of_a_branch(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with open_tree(tmp_path, engine) as tree:
        asking = asyncio.create_task(tree.post({"n": 2}))
        await running_samples(tree.served, 2)
        engine.die()
        assert (await asking).json()["code"] == "engine_dead"


async def test_open_tree_releases_its_reservation(tmp_path: Path) -> None:
    async with open_tree(tmp_path) as tree:
        assert tree.served.server.admission.num_samples == 8
        await tree.closed()
        assert tree.served.server.admission.num_samples == 0


async def test_engine_death_before_a_branch_starts_ends_the_tree(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with open_tree(tmp_path, engine) as tree:
        await tree.branch(max_tokens=20)
        engine.alive = False  # not yet noticed
        [rollout] = tree.served.server.rollouts.in_flight()
        [group] = rollout.groups
        assert isinstance(group.sampler, ExternalTree)
        with pytest.raises(EngineGone):
            await group.sampler.branch(BranchRequest(), None)
        await rollout.wait()
        assert isinstance(rollout.error, EngineGone)
        while tree.served.server.rollouts.num_running:
            await asyncio.sleep(0.001)
        assert tree.served.server.admission.num_samples == 0


async def test_segment_dropped_during_submission_does_not_grow(
    tmp_path: Path,
) -> None:
    engine = YieldingEngine()
    async with open_tree(tmp_path, engine) as tree:
        [segment] = await tree.branch(max_tokens=20)
        engine.instant = False
        growing = asyncio.create_task(tree.branch(segment=segment["id"], n=3))
        [rollout] = tree.served.server.rollouts.in_flight()
        while not rollout.num_running:
            await asyncio.sleep(0)
        assert not engine.running, "they have entered already"
        assert (await tree.drop(segment["id"])).status_code == 200
        assert await growing == []
        assert not engine.running
