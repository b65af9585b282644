"""P6, P7 and P8 on a real server under load: signals and their effect on server and callers."""

import re
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from engine.runtime.leftover_files import MIN_AGE_SECONDS
from tests.invariants.load import Load, load
from tests.invariants.service_process import ServerHome, ServiceProcess, home, service, until

pytestmark = pytest.mark.engine

FRUGAL = ("--engine.max-sequences", "16")
STOP_SECONDS = 60.0


@pytest.fixture
def place() -> Iterator[ServerHome]:
    with home() as made:
        yield made


def warm(running: Load, num_calls: int) -> None:
    until(lambda: len(running.calls) >= num_calls, seconds=90, what="calls are answered")


def probe(server: ServiceProcess, path: str) -> int:
    return httpx.get(f"{server.url}{path}", timeout=30).status_code


def status(server: ServiceProcess) -> dict[str, int]:
    told: dict[str, int] = httpx.get(f"{server.url}/v1/status", timeout=30).json()
    return told


def rollouts_running(server: ServiceProcess) -> int:
    """Rollouts of callers that send one request after another: for an instant there may be none."""
    seen = (status(server)["num_rollouts_running"] for _ in range(1000))
    return next(filter(None, seen), 0)


def counted(server: ServiceProcess) -> dict[str, int]:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = re.findall(r'^coppice_groups_total\{outcome="(\w+)"\} (\S+)', text, re.M)
    return {outcome: int(float(count)) for outcome, count in found if float(count)}


def test_sigterm_under_load_answers_every_earlier_request(place: ServerHome) -> None:
    with service(place, *FRUGAL) as server:
        with load(server.url, max_tokens=24) as early:
            warm(early, 12)
        assert all(call.outcomes == ["done"] * 2 for call in early.calls)
        assert counted(server) == {"done": 2 * len(early.calls)}

        # All running calls can end in one step, and the drain with them. One long call, just
        # started, keeps the server up until every caller has sent its next request.
        with (
            load(server.url, max_tokens=200, num_threads=3) as running,
            load(server.url, max_tokens=450, num_threads=1) as long,
        ):
            warm(long, 1)
            server.record_open_files()
            until(lambda: rollouts_running(server) == 4, seconds=60, what="all are back")
            num_answered = len(running.calls) + len(long.calls)
            num_admitted = rollouts_running(server)
            told = time.monotonic()
            server.signal(signal.SIGTERM)
            until(
                lambda: any(c.code == "draining" for c in [*running.calls, *long.calls]),
                seconds=STOP_SECONDS,
                what="new callers are sent away",
            )
            assert server.wait(STOP_SECONDS) == 0
        assert "Warning: " not in server.log
        calls = [*running.calls, *long.calls]
        done = [call for call in calls if call.outcomes == ["done"] * 2]
        assert num_admitted and len(done) >= num_answered + num_admitted
        for call in calls:
            assert call in done or call.code == "draining" or (call.broken and call.began > told)
        until(
            lambda: not server.surviving_processes(), seconds=60, what="the engine's processes end"
        )
    assert place.leftover_files() == []


@pytest.mark.exhaustive
def test_second_ctrl_c_ends_everything_at_once(place: ServerHome) -> None:
    with service(place, *FRUGAL, "--server.drain-seconds", "600") as server:
        with load(server.url, max_tokens=900) as running:
            until(
                lambda: status(server)["num_samples_running"] >= 8,
                seconds=60,
                what="samples run",
            )
            server.record_open_files()
            server.signal(signal.SIGINT, group=True)
            until(lambda: probe(server, "/readyz") == 503, seconds=60, what="it drains")
            assert probe(server, "/livez") == 200
            assert {call.code for call in running.calls} <= {"draining"}, "the engine goes on"
            server.signal(signal.SIGINT, group=True)
            assert server.wait(STOP_SECONDS) == 0
        codes = {call.code for call in running.calls if call.code}
        assert "engine_dead" in codes and codes <= {"engine_dead", "draining"}
        until(
            lambda: not server.surviving_processes(), seconds=60, what="the engine's processes end"
        )
    assert place.leftover_files() == []


@pytest.mark.exhaustive
def test_killed_service_leaves_no_orphan_and_the_next_start_cleans_up(place: ServerHome) -> None:
    with service(place, *FRUGAL) as server:
        upload = httpx.put(f"{server.url}/v1/weights/v1/files/a.safetensors", content=b"w")
        assert upload.json()["state"] == "incomplete"
        with load(server.url, max_tokens=200) as running:
            warm(running, 2)
            server.record_open_files()
            server.signal(signal.SIGKILL)
            until(
                lambda: not server.surviving_processes(),
                seconds=60,
                what="the engine ends with its service",
            )
    time.sleep(MIN_AGE_SECONDS)
    assert place.leftover_files()

    flags = ("--engine.step-seconds", "5")
    with service(place, *FRUGAL, *flags) as next_one:
        with load(next_one.url, max_tokens=200) as running:
            warm(running, 2)
            assert all(call.outcomes == ["done"] * 2 for call in running.calls)
            next_one.core.send_signal(signal.SIGSTOP)
            for path in ("/livez", "/readyz"):
                until(lambda p=path: probe(next_one, p) == 503, seconds=60, what=path)  # type: ignore[misc]
            hung = len(running.calls)
            until(lambda: len(running.calls) >= hung + 4, seconds=60, what="everybody is told")
        assert {call.code for call in running.calls[hung:]} == {"engine_dead"}
        assert probe(next_one, "/livez") == 503
        next_one.signal(signal.SIGTERM)
        assert next_one.wait(STOP_SECONDS) == 0
        until(
            lambda: not next_one.surviving_processes(),
            seconds=60,
            what="the engine's processes end",
        )
    assert place.leftover_files() == []
