"""Retry conditions, attempt limits and deadlines."""

import logging
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice import (
    BadAnswer,
    ConnectionFailed,
    CoppiceError,
    EndRecord,
    EngineUnavailable,
    Overloaded,
    PauseAnswer,
    Problem,
    Retry,
    Rollouts,
    TimedOut,
)
from coppice.wire.problem_catalogue import PROBLEMS
from tests.client.answers import ACTIVATION, LINES, RECORDS, USAGE, VERSION
from tests.client.app import Answer, App, Body, answering, failing, refusing, streaming
from tests.client.checkpoints import single
from tests.client.conftest import Connect
from tests.client.fake_clock import FakePace

PAUSED = answering(PauseAnswer(paused=True))
LOST = failing(httpx.ReadError("lost"))
UNREACHED = failing(httpx.ConnectError("refused"))
BUSY = refusing("overloaded", 503)


def patient(connect: Connect, app: App, **options: Any) -> Rollouts:
    return connect(app, **{"retry": Retry(), "clock": FakePace(), **options})


@pytest.mark.parametrize("code", PROBLEMS)
def test_only_transient_problems_are_retried(connect: Connect, code: str) -> None:
    kind = PROBLEMS[code]
    app = App(refusing(code, kind.status), PAUSED)
    client = patient(connect, app)
    if kind.retryable:
        assert client.pause().paused
    else:
        with pytest.raises(CoppiceError):
            client.pause()
    assert len(app.requests) == 1 + kind.retryable


@pytest.mark.parametrize(
    "failure",
    [LOST, UNREACHED, failing(httpx.ReadTimeout("")), failing(httpx.RemoteProtocolError(""))],
)
def test_lost_connection_is_retried(connect: Connect, failure: Answer) -> None:
    app = App(failure, failure, PAUSED)
    assert patient(connect, app).pause().paused


def test_gateway_error_is_retried(connect: Connect) -> None:
    app = App(lambda request: httpx.Response(504, text="gateway timeout"), PAUSED)
    assert patient(connect, app).pause().paused


def test_bad_answer_is_not_retried(connect: Connect) -> None:
    app = App(lambda request: httpx.Response(200, text="hello"))
    with pytest.raises(BadAnswer):
        patient(connect, app).pause()
    assert len(app.requests) == 1


def test_waits_double_up_to_their_maximum(connect: Connect) -> None:
    clock = FakePace()
    with pytest.raises(Overloaded):
        patient(connect, App(BUSY), clock=clock).status()
    assert clock.slept == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_waits_are_a_random_fraction(connect: Connect) -> None:
    clock = FakePace(share=0.25)
    with pytest.raises(Overloaded):
        patient(connect, App(BUSY), clock=clock, retry=Retry(attempts=3)).status()
    assert clock.slept == [0.125, 0.25]


def test_retry_after_is_honoured(connect: Connect) -> None:
    clock = FakePace(share=0.5)
    app = App(refusing("quota_exceeded", 429, {"Retry-After": "9"}), PAUSED)
    assert patient(connect, app, clock=clock).pause().paused
    assert clock.slept == [9.25]


def test_retry_after_beyond_the_deadline_is_not_awaited(connect: Connect) -> None:
    clock = FakePace()
    app = App(refusing("draining", 503, {"Retry-After": "301"}))
    with pytest.raises(EngineUnavailable):
        patient(connect, app, clock=clock).status()
    assert (len(app.requests), clock.slept) == (1, [])


@given(
    attempts=st.integers(1, 12),
    base=st.floats(0, 5),
    longest=st.floats(5, 50),
    total=st.floats(0, 200),
    share=st.floats(0, 1, exclude_max=True),
    took=st.floats(0, 30),
    retry_after=st.none() | st.integers(0, 60),
)
def test_attempts_and_their_duration_are_bounded(
    attempts: int,
    base: float,
    longest: float,
    total: float,
    share: float,
    took: float,
    retry_after: int | None,
) -> None:
    clock = FakePace(share)
    failed: list[float] = []
    begun: list[float] = []
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def answer(request: httpx.Request) -> httpx.Response:
        begun.append(clock.time)
        clock.time += took
        failed.append(clock.time)
        return refusing("overloaded", 503, headers)(request)

    retry = Retry(attempts=attempts, base_seconds=base, max_seconds=longest, total_seconds=total)
    transport = httpx.MockTransport(App(answer))
    client = Rollouts("http://coppice.test", retry=retry, clock=clock, transport=transport)
    with client, pytest.raises(Overloaded):
        client.status()
    assert len(begun) <= attempts
    assert begun[-1] <= failed[0] + total + 1e-6
    assert all(wait >= (retry_after or 0) for wait in clock.slept)


def test_slow_first_attempt_is_retried(connect: Connect) -> None:
    clock = FakePace()

    def slow(request: httpx.Request) -> httpx.Response:
        clock.time += 10_000
        raise httpx.ReadError("lost")

    assert patient(connect, App(slow, PAUSED), clock=clock).pause().paused


def test_rollout_is_retried_with_its_key(connect: Connect) -> None:
    app = App(BUSY, LOST, refusing("idempotency_in_progress", 409), streaming(Body(LINES)))
    client = patient(connect, app)
    assert client.rollout(["hello"]).id == "r1"
    keys = [request.headers["Idempotency-Key"] for request in app.requests]
    assert len(keys) == 4
    assert len(set(keys)) == 1
    assert len({request.content for request in app.requests}) == 1
    app.answers[-1] = streaming(Body(LINES))
    client.rollout(["hello"])
    assert app.requests[-1].headers["Idempotency-Key"] not in keys


def test_failed_rollout_is_not_retried(connect: Connect) -> None:
    problem = Problem(type="/problems/engine_dead", title="Dead", status=503, code="engine_dead")
    end = EndRecord(outcome="failed", usage=USAGE, problem=problem)
    lines = [record.model_dump_json().encode() + b"\n" for record in [RECORDS[0], end]]
    app = App(streaming(Body(lines)))
    with pytest.raises(EngineUnavailable):
        patient(connect, app).rollout(["hello"])
    assert len(app.requests) == 1


def test_upload_is_read_again(connect: Connect, tmp_path: Path) -> None:
    path = single(tmp_path / "model.safetensors")
    app = App(LOST, BUSY, answering(VERSION, 201))
    assert patient(connect, app).upload_weights("v7", path) == VERSION
    assert [request.content for request in app.requests] == [path.read_bytes()] * 3


def test_upload_of_a_state_dict_is_read_again(connect: Connect) -> None:
    app = App(LOST, answering(VERSION, 201))
    assert patient(connect, app).upload_weights("v7", {"w": np.ones(3)}) == VERSION
    first, second = (request.content for request in app.requests)
    assert first == second


def test_activation_is_retried(connect: Connect) -> None:
    app = App(LOST, answering(ACTIVATION))
    assert patient(connect, app).activate_weights("v7") == ACTIVATION


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("activate_weights", {"version": "v7", "allow_rollback": True}),
        ("stage_weights", {"version": "v7", "path": "/weights/7"}),
        ("delete_weights", {"version": "v7"}),
    ],
)
def test_non_idempotent_call_is_retried_only_if_it_was_not_executed(
    connect: Connect, name: str, arguments: dict[str, Any]
) -> None:
    app = App(LOST)
    with pytest.raises(ConnectionFailed):
        getattr(patient(connect, app), name)(**arguments)
    assert len(app.requests) == 1
    done = answering(ACTIVATION.model_copy(update={"state": "staged", "num_bytes": 1}))
    app = App(UNREACHED, failing(httpx.ConnectTimeout("")), BUSY, done)
    if name == "stage_weights":
        app.answers[-1] = answering(VERSION)
    getattr(patient(connect, app), name)(**arguments)
    assert len(app.requests) == 4


def test_readiness_wait_has_its_own_timeout(connect: Connect) -> None:
    clock = FakePace()
    with pytest.raises(TimedOut, match="not ready after 10 s"):
        patient(connect, App(UNREACHED), clock=clock).wait_until_ready(10)
    assert sum(clock.slept) == pytest.approx(10)


def test_series_of_retries_is_logged_once(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="coppice"):
        patient(connect, App(BUSY, BUSY, BUSY, PAUSED)).pause()
    assert caplog.messages == ["overloaded (503): No; trying again in 0.5 s"]


@pytest.mark.parametrize(
    "bounds",
    [
        {"attempts": 0},
        {"base_seconds": -1.0},
        {"base_seconds": 2.0, "max_seconds": 1.0},
        {"total_seconds": -1.0},
        {"total_seconds": float("nan")},
    ],
)
def test_invalid_bounds_are_refused(bounds: Any) -> None:
    with pytest.raises(ValueError):
        Retry(**bounds)


def test_any_wait_can_be_counted() -> None:
    assert Retry(attempts=10**6).longest_wait(10**6) == 30.0
    assert not Retry.none().is_enabled
