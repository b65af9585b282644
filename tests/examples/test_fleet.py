"""Two replicas behind nginx, as examples/fleet sets it up."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import AsyncOpenAI

from coppice import AsyncRollouts, Rollouts
from service.cluster.in_memory_registry import InMemoryRegistry
from tests.cluster import sees
from tests.examples.nginx import nginx
from tests.fake_engine import FakeEngine
from tests.invariants.service_process import home, service
from tests.ports import free_port
from tests.redis_server import redis_server
from tests.service.test_rollouts import body, group
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

NUM_SESSIONS = 24
CHAT_PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
}


class Front:
    """nginx's address, and the replicas by name."""

    def __init__(self, url: str, replicas: dict[str, Served]) -> None:
        self.url = url
        self.replicas = replicas

    def place_of(self, rollout_id: str) -> str:
        (name,) = (
            n for n, r in self.replicas.items() if rollout_id.startswith(r.server.cluster.own_id)
        )
        return name


def replica(
    tmp_path: Path, name: str, port: int, shared: InMemoryRegistry
) -> AbstractAsyncContextManager[Served]:
    settings: dict[str, Any] = {
        "server": {"advertised_url": f"http://127.0.0.1:{port}/replica/{name}"},
        "weights": {"peers": [f"http://127.0.0.1:{port}"]},
    }
    return serving(FakeEngine(), tmp_path / name, shared=shared, **settings)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    port, shared = free_port(), InMemoryRegistry()
    async with AsyncExitStack() as stack:
        replicas = {
            name: await stack.enter_async_context(replica(tmp_path, name, port, shared))
            for name in "ab"
        }
        for served in replicas.values():
            await sees(served, 2)
        places = {f"coppice-{n}": urlsplit(r.url).netloc for n, r in replicas.items()}
        yield Front(stack.enter_context(nginx(tmp_path, places, port=port)), replicas)


async def places(front: Front, sessions: range) -> list[str]:
    async with AsyncRollouts(front.url) as rollouts:
        results = [
            await rollouts.rollout([[1, 2, 3]], max_tokens=4, session=f"s-{session}")
            for session in sessions
        ]
    return [front.place_of(result.id) for result in results]


async def new_session(http: httpx.AsyncClient) -> dict[str, Any]:
    created = await http.post("/v1/sessions", json={"n": 1})
    session: dict[str, Any] = created.json()["sessions"][0]
    return session


def key_of(session: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {session['key']}"}


async def test_session_stays_with_its_replica_and_sessions_are_spread(front: Front) -> None:
    first, second = [await places(front, range(NUM_SESSIONS)) for _ in "ab"]
    assert first == second
    assert set(Counter(first)) == {"a", "b"}


async def test_draining_replica_gets_nothing_new_and_sessions_stay(front: Front) -> None:
    before = await places(front, range(NUM_SESSIONS))
    await front.replicas["a"].server.drain(1)
    after = await places(front, range(NUM_SESSIONS))
    assert set(after) == {"b"}
    assert "a" in before


async def test_request_refused_by_all_leaves_the_next_one_alone(front: Front) -> None:
    too_new = body(group(1), weights={"min_version": "v7"})
    async with httpx.AsyncClient(base_url=front.url) as http:
        for _ in "ab":
            refused = await http.post("/v1/rollouts", json=too_new)
            assert (refused.status_code, refused.json()["code"]) == (503, "version_unavailable")
            assert (await http.post("/v1/rollouts", json=body(group(1)))).status_code == 200


async def test_rollout_is_found_through_the_one_address(front: Front) -> None:
    async with AsyncRollouts(front.url) as rollouts:
        pending = [await rollouts.submit([[1, 2, 3]], max_tokens=4) for _ in range(24)]
        assert {front.place_of(one.id) for one in pending} == {"a", "b"}
        for one in pending:
            for _ in range(3):
                assert (await one.wait(30)).id == one.id


async def test_retry_reaches_the_replica_of_the_first_try(front: Front) -> None:
    async with httpx.AsyncClient(base_url=front.url) as http:
        for number in range(8):
            key = {"idempotency-key": f"k-{number}"}
            answers = [
                await http.post("/v1/rollouts", json=body(group(1)), headers=key) for _ in "abc"
            ]
            assert len({answer.json()["id"] for answer in answers}) == 1


async def test_agent_reaches_its_session_through_the_one_address(front: Front) -> None:
    async with httpx.AsyncClient(base_url=front.url, follow_redirects=True) as http:
        for _ in range(NUM_SESSIONS):
            session = await new_session(http)
            assert session["base_url"].startswith(f"{front.url}/replica/")
            for url in (session["base_url"], front.url + session["path"]):
                answer = await http.post(f"{url}{CHAT_PATH}", json=CHAT, headers=key_of(session))
                assert answer.status_code == 200, answer.text


async def test_agent_continues_its_session_after_its_replica_has_left(tmp_path: Path) -> None:
    """The client is OpenAI's, which sends its key again only to the same host."""
    port, shared = free_port(), InMemoryRegistry()
    async with replica(tmp_path, "b", port, shared) as b, AsyncExitStack() as leaving:
        a = await leaving.enter_async_context(replica(tmp_path, "a", port, shared))
        for served in (a, b):
            await sees(served, 2)
        places = {f"coppice-{n}": urlsplit(r.url).netloc for n, r in (("a", a), ("b", b))}
        with nginx(tmp_path, places, port=port):
            session = await new_session(a.http)
            base_url = f"{session['base_url']}/v1"
            async with AsyncOpenAI(base_url=base_url, api_key=session["key"]) as agent:
                for leave in (lambda: a.server.drain(30), leaving.aclose, None):
                    await agent.chat.completions.create(**CHAT)
                    if leave is not None:
                        await leave()
            status = (await b.http.get(f"/v1/sessions/{session['id']}")).json()
    assert (status["state"], status["usage"]["num_turns"]) == ("open", 3)


async def test_calls_with_one_id_in_the_path_reach_one_replica(front: Front) -> None:
    found = set()
    async with httpx.AsyncClient(base_url=front.url) as http:
        for _ in range(NUM_SESSIONS):
            session = await new_session(http)
            url, headers = session["path"] + CHAT_PATH, key_of(session)
            answers = [await http.post(url, json=CHAT, headers=headers) for _ in range(4)]
            (status,) = {answer.status_code for answer in answers}
            found.add(status)
    assert found == {200, 307}, "some ids belong to the replica that is chosen by their hash"


@pytest.mark.engine
@pytest.mark.exhaustive
def test_second_turn_of_a_session_hits_the_cache_of_the_first(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        places = {}
        for name in "ab":
            replica = stack.enter_context(
                service(
                    stack.enter_context(home()),
                    *("--server.advertised-url", f"http://127.0.0.1:{port}/replica/{name}"),
                    *("--cluster.redis-url", redis.url),
                )
            )
            places[f"coppice-{name}"] = urlsplit(replica.url).netloc
        url = stack.enter_context(nginx(tmp_path, places, port=port))
        rollouts = stack.enter_context(Rollouts(url))
        replicas: set[str] = set()
        for session in range(24):  # nginx hashes the replicas' addresses, which are new each time
            if session >= 4 and len(replicas) == 2:
                break
            prompt = [5 + session, *range(3, 83)]
            cached = []
            for _ in range(2):
                result = rollouts.rollout(
                    [prompt], max_tokens=8, ignore_eos=True, session=f"s-{session}"
                )
                (one,) = result.groups
                cached.append(one.num_cached_tokens)
                prompt = [*prompt, *map(int, one.samples[0].token_ids), *range(7, 20)]
            replicas.add(result.id.partition(".")[0])
            assert cached[0] == 0
            assert cached[1] > 0, cached
        assert len(replicas) == 2
