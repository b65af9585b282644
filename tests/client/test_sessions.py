"""Client operations on agent sessions, against the real server with the fake engine."""

import inspect
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from coppice import Retry, SessionClosed, StreamBroken
from coppice.client import Sessions
from coppice.operations.sessions import AsyncSessions
from coppice.wire.sessions import SessionAnswer, SessionRecord, SessionsEndRecord, SessionUsage
from tests.client.app import App, Body, refusing, streaming
from tests.client.conftest import Connect
from tests.client.fake_clock import FakePace
from tests.fake_engine import FakeEngine
from tests.serving_thread import serving_in_thread


def test_session_from_creation_to_result(connect: Connect, tmp_path: Path) -> None:
    with serving_in_thread(FakeEngine(), tmp_path) as url:
        sessions = connect(base_url=url).sessions
        group = sessions.create(
            2, sampling={"max_tokens": 3}, overrides=["stop"], metadata={"task": "1"}
        )
        one, two = group.sessions
        assert one.key not in repr(one)
        with OpenAI(base_url=one.openai_url, api_key=one.key) as agent:
            hello: Any = [{"role": "user", "content": "hello"}]
            agent.chat.completions.create(model="any", messages=hello)
        assert sessions.get(one.id).usage.num_turns == 1
        [tree] = sessions.tree(one.id).groups
        assert tree.tree is not None and tree.prompt_token_ids is not None
        assert tree.prompt_token_ids.tolist() == list(b"hello")
        finished = sessions.finish(one.id, rewards={tree.tree.leaves[0]: 1.0})
        assert (finished.state, finished.rewards) == ("finished", {tree.tree.leaves[0]: 1.0})
        with pytest.raises(SessionClosed):
            sessions.finish(one.id, reward=0.0)
        assert sessions.cancel(two.id).state == "cancelled"
        found = list(sessions.stream(group.id))
        assert [session.id for session in found] == [one.id, two.id]
        assert list(sessions.stream(group.id, after=found[0].sequence or 0))[0].id == two.id
    [group_result] = found[0].groups
    assert group_result.tree is not None
    assert group_result.tree.segments[0].token_ids.tolist() == [5, 6, 7]


def line(sequence: int, replica: str = "") -> bytes:
    answer = SessionAnswer(
        id=f"{replica}s{sequence}",
        group="g",
        state="finished",
        sequence=sequence,
        metadata={},
        groups=[],
        turns=[],
        usage=SessionUsage(),
    )
    return SessionRecord(session=answer).model_dump_json().encode() + b"\n"


END = SessionsEndRecord(num_sessions=2, num_finished=2, num_dropped=0).model_dump_json().encode()


def test_broken_stream_is_resumed_after_the_last_session(connect: Connect) -> None:
    broken = Body([line(3), line(4)[:20]], httpx.ReadError("reset"))
    app = App(streaming(broken), streaming(Body([line(4)[:9], line(4)[9:], END + b"\n"])))
    client = connect(app, retry=Retry(), clock=FakePace())
    assert [session.id for session in client.sessions.stream("g")] == ["s3", "s4"]
    assert [request.url.params["after"] for request in app.requests] == ["0", "3"]


def test_stream_without_a_group_is_resumed_on_its_replica(connect: Connect) -> None:
    """A balancer may send each connection to another replica, whose sequences are others.

    Sequences begin at the start of a replica, in microseconds; the second one started earlier.
    """
    reset, late, early = httpx.ReadError("reset"), 1_800_000_000_000_000, 1_700_000_000_000_000
    app = App(
        streaming(Body([line(late + 1, "one.")], reset)),
        streaming(Body([line(late + 2, "one.")], reset)),
        refusing("replica_gone", 410),
        streaming(Body([line(early + 1, "two.")], reset)),
        streaming(Body([line(early + 2, "two.")])),
    )
    client = connect(app, retry=Retry(), clock=FakePace())
    sequences = [late + 1, late + 2, early + 1, early + 2]
    assert [session.sequence for session in client.sessions.stream()] == sequences
    assert [request.url.params.get("replica") for request in app.requests] == [
        *(None, "one", "one", None, "two")
    ]
    assert [int(request.url.params["after"]) for request in app.requests] == [
        *(0, late + 1, late + 2, 0, early + 1)
    ]


def test_sessions_of_a_replica_that_has_joined_again_are_not_repeated(connect: Connect) -> None:
    app = App(
        streaming(Body([line(1, "one."), line(2, "one.")], httpx.ReadError("reset"))),
        refusing("replica_gone", 410),
        streaming(Body([line(1, "one."), line(2, "one."), line(3, "one.")])),
    )
    client = connect(app, retry=Retry(), clock=FakePace())
    assert [session.id for session in client.sessions.stream()] == ["one.s1", "one.s2", "one.s3"]


def test_stream_of_a_group_without_its_end_has_failed(connect: Connect) -> None:
    app = App(streaming(Body([line(1)])))
    with pytest.raises(StreamBroken):
        list(connect(app).sessions.stream("g"))


def test_retried_creation_has_one_idempotency_key(connect: Connect) -> None:
    answer = {"group": "g", "sessions": [{"id": "s", "key": "k", "path": "/sessions/s"}]}
    app = App(lambda request: httpx.Response(502), lambda request: httpx.Response(200, json=answer))
    group = connect(app, retry=Retry(), clock=FakePace()).sessions.create()
    first, second = app.requests
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert group.sessions[0].base_url == "http://coppice.test/sessions/s"


@pytest.mark.parametrize("name", ["create", "get", "tree", "finish", "cancel", "stream"])
def test_both_clients_have_the_same_arguments(name: str) -> None:
    blocking, awaited = getattr(Sessions, name), getattr(AsyncSessions, name)
    assert inspect.signature(blocking).parameters == inspect.signature(awaited).parameters
    assert blocking.__doc__ == awaited.__doc__
