"""Callers in threads, each with a new connection per request, and the results of their calls."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPT = {"text": "Compute 12+34.\n"}
OUTCOMES = {"done", "partial", "failed", "cancelled"}
CALL_SECONDS = 120.0
KINDS = ("plain", "stream", "keyed")


@dataclass(frozen=True, kw_only=True)
class Call:
    """`outcome` of its groups, or the `code` of the problem; `broken`: no complete answer."""

    began: float
    outcomes: list[str] = field(default_factory=list)
    code: str | None = None
    broken: str | None = None


@dataclass
class Load:
    url: str
    max_tokens: int
    num_groups: int = 2
    n: int = 2
    calls: list[Call] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, num_threads: int) -> None:
        for number in range(num_threads):
            kind = KINDS[number % len(KINDS)]
            thread = threading.Thread(target=self._loop, args=(kind,))
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Joins every caller; one that hangs fails here."""
        self._over.set()
        for thread in self._threads:
            thread.join(CALL_SECONDS + 30)
            assert not thread.is_alive(), "a caller hangs"

    def _loop(self, kind: str) -> None:
        while not self._over.is_set():
            call = self._call(kind)
            self.calls.append(call)
            if call.code or call.broken:
                time.sleep(0.05)

    def _call(self, kind: str) -> Call:
        body: dict[str, Any] = {
            "groups": [{"prompt": PROMPT, "n": self.n}] * self.num_groups,
            "sampling": {"max_tokens": self.max_tokens, "ignore_eos": True},
            "stream": kind == "stream",
        }
        headers = {"connection": "close"}
        if kind == "keyed":
            headers["idempotency-key"] = uuid.uuid4().hex
        began = time.monotonic()
        try:
            answer = httpx.post(
                f"{self.url}/v1/rollouts", json=body, headers=headers, timeout=CALL_SECONDS
            )
        except httpx.TransportError as error:
            return Call(began=began, broken=type(error).__name__)
        return _read(began, kind, answer)


def _read(began: float, kind: str, answer: httpx.Response) -> Call:
    if answer.status_code != 200:
        return Call(began=began, code=answer.json()["code"])
    if kind != "stream":
        return Call(began=began, outcomes=[g["outcome"] for g in answer.json()["groups"]])
    records = [json.loads(line) for line in answer.text.splitlines()]
    last = records[-1]
    if last["type"] != "end":
        return Call(began=began, broken="a stream without an end")
    if "problem" in last:
        return Call(began=began, code=last["problem"]["code"])
    groups = [record["group"] for record in records if record["type"] == "group"]
    return Call(began=began, outcomes=[group["outcome"] for group in groups])


@contextmanager
def load(url: str, *, max_tokens: int, num_threads: int = 4) -> Iterator[Load]:
    running = Load(url, max_tokens)
    running.start(num_threads)
    try:
        yield running
    finally:
        running.end()
