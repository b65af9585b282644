"""Groups from several callers through every request API, during weights activations.

Every group must end as done, except those whose caller disconnects.
"""

import json
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import unpack
from tests.engine.seedling import MODEL

GROUPS_A_REQUEST = 10
SAMPLES = 4
TOKENS = 8
MODES = ("plain", "stream", "keyed", "packed", "async", "leaving")
GROUPS_A_VERSION = 1000
CALL_SECONDS = 300.0


@dataclass
class Groups:
    """`num_done` and `num_disconnected` add up to the number of groups requested."""

    url: str
    total: int
    num_done: int = 0
    num_disconnected: int = 0
    num_activations: int = 0
    failures: list[str] = field(default_factory=list)
    _asked: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_ended(self) -> int:
        return self.num_done + self.num_disconnected

    def run(self, num_threads: int) -> None:
        threads = [threading.Thread(target=self._caller) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _caller(self) -> None:
        with httpx.Client(base_url=self.url, timeout=CALL_SECONDS) as http:
            while (turn := self._turn()) is not None:
                try:
                    self._ask(http, turn)
                except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                    self.failures.append(f"{MODES[turn % len(MODES)]}: {error!r}")

    def _turn(self) -> int | None:
        with self._lock:
            if self.failures or self._asked >= self.total:
                return None
            self._asked += GROUPS_A_REQUEST
            return self._asked // GROUPS_A_REQUEST

    def _ask(self, http: httpx.Client, turn: int) -> None:
        if turn % (GROUPS_A_VERSION // GROUPS_A_REQUEST) == 0:
            self._activate(http, f"s{turn}")
        mode = MODES[turn % len(MODES)]
        outcomes = getattr(self, f"_{mode}")(http, _body(turn))
        assert outcomes is None or outcomes == ["done"] * GROUPS_A_REQUEST, outcomes
        with self._lock:
            self.num_done += GROUPS_A_REQUEST if outcomes else 0
            self.num_disconnected += 0 if outcomes else GROUPS_A_REQUEST

    def _activate(self, http: httpx.Client, version: str) -> None:
        content = (MODEL / "model.safetensors").read_bytes()
        http.put(f"/v1/weights/{version}", content=content).raise_for_status()
        answer = http.post(
            f"/v1/weights/{version}/activate", json={"mode": "keep", "allow_rollback": True}
        )
        answer.raise_for_status()
        self.num_activations += 1

    def _plain(self, http: httpx.Client, body: Any) -> list[str]:
        return _outcomes(http.post("/v1/rollouts", json=body))

    def _keyed(self, http: httpx.Client, body: Any) -> list[str]:
        """Requested twice, sampled once."""
        key = {"idempotency-key": uuid.uuid4().hex}
        first, again = (http.post("/v1/rollouts", json=body, headers=key) for _ in "ab")
        assert first.json()["id"] == again.json()["id"]
        return _outcomes(first)

    def _packed(self, http: httpx.Client, body: Any) -> list[str]:
        answer = http.post("/v1/rollouts", json=body, headers={"accept": PACKED_MEDIA_TYPE})
        return [group.outcome for group in unpack(answer.content).answer.groups]

    def _async(self, http: httpx.Client, body: Any) -> list[str]:
        accepted = http.post("/v1/rollouts", json=body, headers={"prefer": "respond-async"})
        place = accepted.headers["location"]
        while (answer := http.get(place, params={"wait": 60})).status_code == 202:
            pass
        return _outcomes(answer)

    def _stream(self, http: httpx.Client, body: Any) -> list[str]:
        answer = http.post("/v1/rollouts", json=body | {"stream": True})
        records = [json.loads(line) for line in answer.text.splitlines()]
        assert records[-1]["type"] == "end", records[-1]
        return [record["group"]["outcome"] for record in records if record["type"] == "group"]

    def _disconnecting(self, http: httpx.Client, body: Any) -> None:
        with http.stream("POST", "/v1/rollouts", json=body | {"stream": True}) as answer:
            next(answer.iter_bytes())


def _body(turn: int) -> dict[str, Any]:
    text = f"Compute {turn % 100}+{turn % 89}.\n"
    return {
        "groups": [{"prompt": {"text": text}, "n": SAMPLES}] * GROUPS_A_REQUEST,
        "sampling": {"max_tokens": TOKENS, "ignore_eos": True},
    }


def _outcomes(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [group["outcome"] for group in answer.json()["groups"]]
