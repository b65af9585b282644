"""Rollouts that run independently of the client's connection."""

import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from coppice import (
    BadAnswer,
    ConnectionFailed,
    EngineUnavailable,
    Finish,
    NotFound,
    Retry,
    StreamBroken,
    TimedOut,
)
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import pack
from coppice.wire.rollouts import RunningAnswer
from tests.client.answers import ANSWER, LINES, RECORDS
from tests.client.app import Answer, App, Body, answering, failing, refusing, streaming
from tests.client.conftest import Connect
from tests.client.fake_clock import FakePace
from tests.client.faulty import Faulty, faulty_server, stream_bytes
from tests.client.test_rollout import assert_is_the_answer

RUNNING = answering(RunningAnswer(id="r1", num_samples=3, num_samples_done=1), 202)


def packing(body: bytes = pack(ANSWER)) -> Answer:
    return lambda request: httpx.Response(
        200, content=body, headers={"Content-Type": PACKED_MEDIA_TYPE}
    )


@pytest.fixture
def server() -> Iterator[Faulty]:
    with faulty_server() as server:
        yield server


def test_rollout_is_submitted_and_awaited(connect: Connect) -> None:
    app = App(RUNNING, RUNNING, packing())
    pending = connect(app, clock=FakePace()).submit(["hello"], n=3, finish=Finish(num_samples=2))
    assert (pending.id, "'r1'" in repr(pending)) == ("r1", True)
    assert_is_the_answer(pending.wait())
    start, first, second = app.requests
    assert start.headers["Prefer"] == "respond-async"
    body = json.loads(start.content)
    assert (body["stream"], body["finish"]) == (False, {"num_samples": 2, "select": "first"})
    assert [request.url.raw_path for request in (first, second)] == [b"/v1/rollouts/r1?wait=30"] * 2
    assert first.headers["Accept"] == PACKED_MEDIA_TYPE


def test_server_may_answer_without_packing(connect: Connect) -> None:
    assert_is_the_answer(connect(App(answering(ANSWER))).attach("r1").wait())


def test_arrays_are_owned_by_the_caller(connect: Connect) -> None:
    result = connect(App(packing())).attach("r1").wait()
    first, second = result.groups[0].samples
    assert first.token_ids.dtype == np.int64
    assert first.logprobs.dtype == np.float32
    first.token_ids[:] = 0
    assert second.token_ids.tolist() == [5, 6, 8]


@pytest.mark.parametrize("body", [b"", b"<html>", pack(ANSWER)[:-4]])
def test_malformed_packed_answer_is_a_bad_answer(connect: Connect, body: bytes) -> None:
    with pytest.raises(BadAnswer):
        connect(App(packing(body))).attach("r1").wait()


def test_submission_answered_at_once_returns_a_handle(connect: Connect) -> None:
    assert connect(App(answering(ANSWER))).submit(["hello"]).id == "r1"


def test_resubmission_starts_nothing_new(connect: Connect, server: Faulty) -> None:
    server.cuts = [0, 10, 61]
    client = connect(base_url=server.url, retry=Retry(), clock=FakePace())
    assert client.submit(["hello"]).id == "r1"
    assert (server.num_started, len(server.keys), len(set(server.keys))) == (1, 4, 1)


def test_waiting_survives_lost_connections(connect: Connect, server: Faulty) -> None:
    server.cuts = [0, 10, 150, 301, 302]
    server.num_running_answers = 2
    client = connect(base_url=server.url, retry=Retry(), clock=FakePace())
    assert_is_the_answer(client.attach("r1").wait())
    assert not server.deleted


def test_streaming_survives_lost_connections_and_leaving(connect: Connect, server: Faulty) -> None:
    server.cuts = [len(stream_bytes("r1")) // 2] * 2
    pending = connect(base_url=server.url, retry=Retry(), clock=FakePace()).attach("r1")
    assert [record.type for record in pending.stream()].count("sample") == 3
    records = pending.stream()
    next(records)
    records.close()
    assert not server.deleted


def test_streaming_without_retries_breaks(connect: Connect) -> None:
    app = App(streaming(Body(LINES[:3])))
    records = connect(app).attach("r/1").stream()
    with pytest.raises(StreamBroken):
        list(records)
    assert app.request.url.raw_path == b"/v1/rollouts/r%2F1"
    assert app.request.headers["Accept"] == "application/x-ndjson"


def test_every_stream_begins_with_the_first_record(connect: Connect) -> None:
    app = App(streaming(Body(LINES)), streaming(Body(LINES)))
    pending = connect(app).attach("r1")
    assert list(pending.stream()) == list(pending.stream()) == RECORDS


def test_wait_has_a_timeout_and_may_be_repeated(connect: Connect) -> None:
    clock = FakePace()

    def hold(request: httpx.Request) -> httpx.Response:
        clock.time += float(request.url.params["wait"])
        return RUNNING(request)

    app = App(hold, hold, hold, packing())
    pending = connect(app, clock=clock).attach("r1")
    with pytest.raises(TimedOut, match="r1 is still running after 70 s"):
        pending.wait(70)
    waits = [request.url.params["wait"] for request in app.requests]
    assert waits == ["30", "30", "10"]
    assert_is_the_answer(pending.wait(0))
    assert app.requests[-1].url.params["wait"] == "0"


def test_wait_ends_in_time_without_an_answer(connect: Connect) -> None:
    clock = FakePace()
    app = App(failing(httpx.ConnectError("refused")))
    with pytest.raises(ConnectionFailed):
        connect(app, clock=clock, retry=Retry()).attach("r1").wait(5)
    assert sum(clock.slept) <= 5


def test_server_without_long_polling_is_polled_with_pauses(connect: Connect) -> None:
    clock = FakePace()
    app = App(*[RUNNING] * 20, packing())
    connect(app, clock=clock).attach("r1").wait()
    assert clock.slept == [0.5] * 20


def test_silence_is_expected_during_a_long_poll(connect: Connect) -> None:
    app = App(packing())
    connect(app, timeout=5).attach("r1").wait()
    timeout = app.request.extensions["timeout"]
    assert (timeout["connect"], timeout["read"]) == (5, 35)


def test_rollout_lost_with_the_engine_is_reported_at_once(connect: Connect) -> None:
    app = App(refusing("engine_dead", 503))
    with pytest.raises(EngineUnavailable):
        connect(app, retry=Retry(), clock=FakePace()).attach("r1").wait()
    assert len(app.requests) == 1


def test_expired_rollout_is_not_found(connect: Connect) -> None:
    app = App(refusing("rollout_not_found", 404))
    with pytest.raises(NotFound):
        connect(app, retry=Retry()).attach("r1").wait()


def test_handle_aborts(connect: Connect) -> None:
    app = App(answering(ANSWER))
    assert_is_the_answer(connect(app).attach("r1").abort())
    assert (app.request.method, app.request.url.path) == ("DELETE", "/v1/rollouts/r1")
