"""P7: a service that was suspended, as with its machine, does not kill its healthy engine."""

import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.invariants.service_process import ServerHome, ServiceProcess, home, service

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

STEP_SECONDS = 3
STANDSTILL_SECONDS = 24.0
BODY = {
    "groups": [{"prompt": {"token_ids": [1, 2, 3]}, "n": 2}],
    "sampling": {"max_tokens": 5, "ignore_eos": True},
}


@pytest.fixture
def place() -> Iterator[ServerHome]:
    with home() as made:
        yield made


def stand_still(server: ServiceProcess) -> None:
    server.signal(signal.SIGSTOP)
    time.sleep(STANDSTILL_SECONDS)
    server.signal(signal.SIGCONT)


def test_suspended_service_continues_to_serve(place: ServerHome) -> None:
    with service(place, "--engine.step-seconds", str(STEP_SECONDS)) as server:
        stand_still(server)
        assert httpx.get(f"{server.url}/livez", timeout=30).status_code == 200
        time.sleep(STEP_SECONDS)  # in which the watchdog checks again
        answer = httpx.post(f"{server.url}/v1/rollouts", json=BODY, timeout=60)
        assert answer.status_code == 200, answer.text
