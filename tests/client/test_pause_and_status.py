import json
import time

import httpx
import pytest

from coppice import PauseAnswer, SleepAnswer, StatusAnswer, TimedOut, Unauthorized
from coppice.wire.status import HealthAnswer
from tests.client.app import App, answering, failing, refusing
from tests.client.conftest import Connect

READY = answering(HealthAnswer(stage="serving"))
STATUS = StatusAnswer(
    version="0.1.0",
    stage="starting",
    paused=False,
    weights_version="v0",
    weights_sequence=0,
    num_rollouts_running=0,
    num_samples_running=0,
    uptime_seconds=1.5,
    engine=None,
)


def test_pause_sends_its_mode(connect: Connect) -> None:
    app = App(answering(PauseAnswer(paused=True)))
    assert connect(app).pause("wait", timeout=5).paused
    assert (app.request.method, app.request.url.path) == ("POST", "/v1/pause")
    assert json.loads(app.request.content) == {"mode": "wait", "lease_seconds": 120.0}
    assert app.request.extensions["timeout"]["read"] == 5


@pytest.mark.parametrize("lease_seconds", [5.0, None])
def test_pause_can_have_another_lease_or_none(
    connect: Connect, lease_seconds: float | None
) -> None:
    app = App(answering(PauseAnswer(paused=True)))
    connect(app).pause(lease_seconds=lease_seconds)
    assert json.loads(app.request.content) == {"mode": "keep", "lease_seconds": lease_seconds}


def test_resume_can_end_the_pauses_of_all_keys(connect: Connect) -> None:
    app = App(answering(PauseAnswer(paused=False)))
    connect(app).resume(all=True)
    assert json.loads(app.request.content) == {"all": True}


SLEEPING = SleepAnswer(level=2, sleeping_tags=["kv_cache", "weights"], paused=True)


def test_sleep_sends_its_level_tags_and_lease(connect: Connect) -> None:
    app = App(answering(SLEEPING))
    assert connect(app).sleep(2, mode="abort", lease_seconds=None, timeout=5) == SLEEPING
    assert (app.request.method, app.request.url.path) == ("POST", "/v1/sleep")
    assert json.loads(app.request.content) == {
        "level": 2,
        "tags": ["kv_cache", "weights"],
        "mode": "abort",
        "lease_seconds": None,
    }
    assert app.request.extensions["timeout"]["read"] == 5


def test_wake_sends_its_tags(connect: Connect) -> None:
    app = App(answering(SLEEPING))
    connect(app).wake(tags=["weights"], all=True)
    assert (app.request.method, app.request.url.path) == ("POST", "/v1/wake")
    assert json.loads(app.request.content) == {"tags": ["weights"], "all": True}


def test_resume_returns_whether_the_server_is_paused(connect: Connect) -> None:
    app = App(answering(PauseAnswer(paused=False)))
    assert not connect(app).resume().paused
    assert (app.request.method, app.request.url.path) == ("POST", "/v1/resume")


def test_status_is_parsed(connect: Connect) -> None:
    app = App(answering(STATUS))
    assert connect(app).status() == STATUS
    assert (app.request.method, app.request.url.path) == ("GET", "/v1/status")


def test_client_waits_for_a_starting_server(connect: Connect) -> None:
    app = App(
        failing(httpx.ConnectError("refused")),
        lambda request: httpx.Response(502, text="no upstream"),
        refusing("not_ready", 503),
        READY,
    )
    connect(app).wait_until_ready(30)
    assert [request.url.path for request in app.requests] == ["/readyz"] * 4


def test_server_that_does_not_start_fails_with_the_reason(connect: Connect) -> None:
    app = App(refusing("not_ready", 503, detail="loading"))
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"not ready after 0\.2 s: .*loading") as caught:
        connect(app).wait_until_ready(0.2)
    assert time.monotonic() - started >= 0.2
    assert type(caught.value.__cause__).__name__ == "EngineUnavailable"


def test_permanent_refusal_is_raised_at_once(connect: Connect) -> None:
    app = App(refusing("unauthorized", 401))
    with pytest.raises(Unauthorized):
        connect(app).wait_until_ready(30)


def test_zero_timeout_probes_the_server_once(connect: Connect) -> None:
    app = App(READY)
    connect(app).wait_until_ready(0)
    assert app.request.extensions["timeout"]["read"] <= 0.05
