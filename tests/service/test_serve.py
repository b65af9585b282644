"""The server's lifecycle, from readiness to the end of the drain."""

import asyncio
import gc
import logging
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext

import httpx
import pytest
from fastapi import FastAPI

from engine.errors import StartFailed
from engine.types.info import EngineHealth, EngineStage
from service.config.settings import LogSettings, ServerSettings, Settings
from service.http.serve import example_command, open_listener, run_server, server_url
from service.http.shutdown import StopDeadline


class ServerLifecycle:
    """An app that runs `script` once it is up, and an engine whose stage the script sets."""

    def __init__(self, stage: EngineStage = "starting", reason: str | None = None) -> None:
        self.stage: EngineStage = stage
        self.reason = reason
        self.has_weights = True
        self.app = FastAPI(lifespan=self._lifespan)
        self.app.get("/v1/status")(self.status)
        self.answers: list[int] = []

    def health(self) -> EngineHealth:
        return EngineHealth(stage=self.stage, alive=True, age_seconds=0.0, reason=self.reason)

    def is_ready(self) -> bool:
        return self.stage == "serving" and self.has_weights

    async def drain(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        pass

    async def status(self) -> None:
        await asyncio.sleep(0.3)

    async def script(self) -> None:
        """Serves, and receives a stop signal while a request is running."""
        self.stage = "serving"
        await asyncio.sleep(0.3)
        async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
            request = group.create_task(client.get(f"{self.url}/v1/status"))
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
        self.answers.append(request.result().status_code)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.script())
            yield

    def run(self, settings: Settings, deadline: StopDeadline | None = None) -> None:
        with open_listener("127.0.0.1", 0) as listener:
            self.url = server_url(listener)
            run_server(self.app, self, settings, listener, deadline)


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """Collects what a server leaves: `ast.parse` of CPython 3.11 fails if it does so meanwhile."""
    yield
    gc.collect()


def test_curl_example_is_printed_when_the_engine_serves(capsys: pytest.CaptureFixture[str]) -> None:
    life = ServerLifecycle()
    life.run(Settings())
    assert example_command(life.url) in capsys.readouterr().out


def test_json_mode_prints_only_records(capsys: pytest.CaptureFixture[str]) -> None:
    ServerLifecycle().run(Settings(log=LogSettings(format="json")))
    assert capsys.readouterr().out == ""


def test_running_request_is_answered_before_the_end() -> None:
    life = ServerLifecycle()
    life.run(Settings())
    assert life.answers == [200]


def test_engine_death_during_the_start_stops_the_server_with_its_reason() -> None:
    class Dying(ServerLifecycle):
        async def script(self) -> None:
            self.stage = "dead"

    with pytest.raises(StartFailed, match="the engine did not start: out of memory"):
        Dying(reason="out of memory").run(Settings())


def test_server_is_reported_ready_once_it_has_the_weights_of_the_cluster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "service.http.serve")

    class Late(ServerLifecycle):
        async def script(self) -> None:
            self.stage, self.has_weights = "serving", False
            await asyncio.sleep(0.3)
            before = caplog.text
            self.has_weights = True
            await asyncio.sleep(0.3)
            assert ("ready: " in before, "ready: " in caplog.text) == (False, True)
            self.answers.append(200)
            os.kill(os.getpid(), signal.SIGINT)

    life = Late()
    life.run(Settings())
    assert life.answers == [200]


def test_stop_during_the_engine_start_is_no_failure() -> None:
    class Slow(ServerLifecycle):
        async def script(self) -> None:
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    Slow().run(Settings())


def test_failed_lifespan_is_a_failed_start() -> None:
    @asynccontextmanager
    async def fail(app: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no")
        yield

    life = ServerLifecycle()
    life.app.router.lifespan_context = fail
    with pytest.raises(StartFailed, match="the engine did not start: see the log"):
        life.run(Settings())


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ServerLifecycle().run(Settings())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("place", ["drain", "lifespan"])
def test_process_is_ended_if_the_stop_hangs(place: str) -> None:
    exited, codes = threading.Event(), list[int]()

    class Hanging(ServerLifecycle):
        killed = False

        def kill(self) -> None:
            self.killed = True

        async def drain(self, seconds: float) -> None:
            if place == "drain":
                assert exited.wait(30)  # blocks the event loop

        @asynccontextmanager
        async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
            async with super()._lifespan(app):
                yield
            assert exited.wait(30)

    def exit_process(code: int) -> None:
        codes.append(code)
        exited.set()

    life = Hanging()
    settings = Settings(server=ServerSettings(drain_seconds=0))
    life.run(settings, StopDeadline(life, 0.2, exit_process=exit_process))
    assert (codes[0], life.killed) == (1, True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_process_is_ended_if_the_kill_fails() -> None:
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    class Failing(ServerLifecycle):
        def kill(self) -> None:
            raise RuntimeError("no")

    StopDeadline(Failing(), 0.01, exit_process=codes.put).start()
    assert codes.get(timeout=30) == 1


def test_process_is_ended_if_a_hanging_thread_holds_a_lock_of_logging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.http.shutdown.LOG_SECONDS", 0.01)
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    held = logging.StreamHandler()
    log = logging.getLogger("service.http.shutdown")
    log.addHandler(held)
    try:
        with held.lock or nullcontext():
            StopDeadline(ServerLifecycle(), 0.01, exit_process=codes.put).start()
            assert codes.get(timeout=30) == 1
    finally:
        log.removeHandler(held)


def test_stop_deadline_is_only_moved_forward() -> None:
    now = 100.0
    deadline = StopDeadline(ServerLifecycle(), 1000.0, clock=lambda: now)
    deadline.start(drain_seconds=60)
    assert deadline.ends_at == 1160
    now = 110.0  # the drain has ended early
    deadline.start()
    assert deadline.ends_at == 1110
    now = 150.0
    deadline.start()
    assert deadline.ends_at == 1110


def test_failed_drain_does_not_prevent_the_stop() -> None:
    class Failing(ServerLifecycle):
        async def drain(self, seconds: float) -> None:
            raise OSError("no")

    life = Failing()
    life.run(Settings())
    assert life.answers == [200]


def test_process_is_ended_if_a_thread_does_not_return() -> None:
    program = """
import threading, time
from service.http.shutdown import StopDeadline

class Lifecycle:
    def kill(self):
        print("killed", flush=True)

threading.Thread(target=time.sleep, args=(600,)).start()
StopDeadline(Lifecycle(), 0.2).start()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "killed\n")


def test_curl_example_is_one_shell_command() -> None:
    words = shlex.split(example_command("http://127.0.0.1:8000"))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/rollouts"]
    assert words[-1].startswith('{"groups"')


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])
def test_printed_address_can_be_connected_to(host: str, shown: str) -> None:
    with open_listener(host, 0) as listener:
        assert server_url(listener) == f"http://{shown}:{listener.getsockname()[1]}"


def test_unavailable_host_prints_one_sentence() -> None:
    with pytest.raises(StartFailed, match="cannot listen on 192.0.2.1 port 0: Cannot assign"):
        open_listener("192.0.2.1", 0)
