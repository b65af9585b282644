"""Admission limits: every reservation is released exactly once, however the request ends."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from service.config.limits import LimitsSettings
from service.errors import InvalidRequest, Overloaded, QuotaExceeded, ServiceError
from service.rollouts.admission import Admission, Reservation
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

LIMITS = LimitsSettings(max_samples_per_key=8, max_prompt_tokens_per_key=20, max_samples_running=12)


class Books(RuleBasedStateMachine):
    """The controller against a model: a list of the reservations."""

    reserved = Bundle("reserved")

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(LIMITS)
        self.model: list[tuple[str, int, int]] = []

    @rule(
        target=reserved,
        key=st.sampled_from("abc"),
        samples=st.integers(1, 14),
        tokens=st.integers(1, 24),
    )
    def reserve(self, key: str, samples: int, tokens: int) -> Reservation | None:
        mine = [entry for entry in self.model if entry[0] == key]
        expected: type[ServiceError] | None = None
        if samples > 8 or tokens > 20:
            expected = InvalidRequest
        elif sum(e[1] for e in mine) + samples > 8 or sum(e[2] for e in mine) + tokens > 20:
            expected = QuotaExceeded
        elif sum(e[1] for e in self.model) + samples > 12:
            expected = Overloaded
        if expected is not None:
            with pytest.raises(expected):
                self.admission.reserve(key, samples=samples, prompt_tokens=tokens)
            return None
        self.model.append((key, samples, tokens))
        return self.admission.reserve(key, samples=samples, prompt_tokens=tokens)

    @rule(reservation=consumes(reserved), again=st.booleans())
    def release(self, reservation: Reservation | None, again: bool) -> None:
        if reservation is None:
            return
        self.admission.release(reservation)
        if again:
            self.admission.release(reservation)
        self.model.remove((reservation.key, reservation.samples, reservation.prompt_tokens))

    @invariant()
    def conserved(self) -> None:
        self.admission.check()
        assert self.admission.num_samples == sum(entry[1] for entry in self.model)


TestBooks = Books.TestCase


def test_reservation_for_a_block_is_released_when_it_raises() -> None:
    admission = Admission(LIMITS)
    with pytest.raises(RuntimeError), admission.reserved("a", samples=3, prompt_tokens=3):
        assert admission.num_samples == 3
        raise RuntimeError
    assert admission.num_samples == 0
    admission.check()


def test_supports_of_all_keys_together_are_limited() -> None:
    admission = Admission(LimitsSettings(max_support_bytes=100))
    first = admission.reserve("a", samples=1, prompt_tokens=1, support_bytes=60)
    with pytest.raises(Overloaded):
        admission.reserve("b", samples=1, prompt_tokens=1, support_bytes=41)
    admission.reserve("b", samples=1, prompt_tokens=1, support_bytes=40)
    admission.check()
    admission.release(first)
    admission.release(first)
    admission.reserve("a", samples=1, prompt_tokens=1, support_bytes=60)
    admission.check()


@given(samples=st.integers(1, 2**31), tokens=st.integers(1, 2**31))
def test_without_per_key_limits_only_server_limits_apply(samples: int, tokens: int) -> None:
    admission = Admission(LimitsSettings(max_samples_running=2**31))
    with admission.reserved("a", samples=samples, prompt_tokens=tokens):
        admission.check()


# Over HTTP


async def post(served: Served, n: int = 1, tokens: int = 1, **options: Any) -> httpx.Response:
    asked = body(group(*[1] * tokens, n=n))
    return await served.http.post("/v1/rollouts", json=asked, **options)


async def test_key_over_its_sample_limit_gets_429_and_others_are_served(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = {name: bearer(key) for name, key in write_keys(file, a="rollout", b="rollout").items()}
    engine = FakeEngine(instant=False)
    sections: dict[str, Any] = {"server": {"keys_file": file}, "limits": {"max_samples_per_key": 3}}
    async with serving(engine, tmp_path, **sections) as served, asyncio.TaskGroup() as tasks:
        tasks.create_task(post(served, 2, headers=keys["a"]))
        await running_samples(served, 2)
        refused = await post(served, 2, headers=keys["a"])
        assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        tasks.create_task(post(served, 3, headers=keys["b"]))
        await running_samples(served, 5)
        engine.step(4)
        await running_samples(served, 0)
        engine.instant = True
        assert (await post(served, 3, headers=keys["a"])).status_code == 200


async def test_prompt_tokens_count_once_per_group(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    limits = {"max_prompt_tokens_per_key": 10}
    async with serving(engine, tmp_path, limits=limits) as served, asyncio.TaskGroup() as tasks:
        tasks.create_task(post(served, n=8, tokens=6))
        await running_samples(served, 8)
        assert (await post(served, tokens=5)).json()["code"] == "quota_exceeded"
        tasks.create_task(post(served, tokens=4))
        await running_samples(served, 9)
        engine.step(4)


async def test_full_server_answers_503(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    limits = {"max_samples_running": 2}
    async with serving(engine, tmp_path, limits=limits) as served, asyncio.TaskGroup() as tasks:
        tasks.create_task(post(served, 2))
        await running_samples(served, 2)
        refused = await post(served)
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert not [sample for sample in engine.running.values() if sample.done.done()]
        engine.step(4)


@pytest.mark.parametrize(
    ("limits", "n", "tokens"),
    [
        ({"max_samples_per_key": 2}, 3, 1),
        ({"max_samples_running": 2}, 3, 1),
        ({"max_prompt_tokens_per_key": 2}, 1, 3),
    ],
)
async def test_request_that_can_never_fit_is_not_retryable(
    tmp_path: Path, limits: dict[str, int], n: int, tokens: int
) -> None:
    async with serving(FakeEngine(), tmp_path, limits=limits) as served:
        refused = await post(served, n, tokens)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")


async def _done(served: Served, engine: FakeEngine, asked: asyncio.Task[httpx.Response]) -> None:
    engine.step(4)


async def _left(served: Served, engine: FakeEngine, asked: asyncio.Task[httpx.Response]) -> None:
    asked.cancel()


async def _deleted(served: Served, engine: FakeEngine, asked: asyncio.Task[httpx.Response]) -> None:
    [rollout_id] = served.server.rollouts._running
    await served.http.delete(f"/v1/rollouts/{rollout_id}")


async def _died(served: Served, engine: FakeEngine, asked: asyncio.Task[httpx.Response]) -> None:
    engine.die()


@pytest.mark.parametrize("end", [_done, _left, _deleted, _died])
@pytest.mark.parametrize("stream", [False, True])
async def test_rollout_releases_its_reservation_however_it_ends(
    tmp_path: Path, end: Any, stream: bool
) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = {**body(group(1, 2, n=3)), "stream": stream}
        waiting = asyncio.create_task(served.http.post("/v1/rollouts", json=asked))
        await running_samples(served, 3)
        assert served.server.admission.num_samples == 3
        await end(served, engine, waiting)
        await asyncio.wait([waiting])
        while served.server.rollouts.num_running:
            await asyncio.sleep(0.001)
        assert served.server.admission.num_samples == 0
        served.server.admission.check()


async def test_request_refused_after_admission_releases_its_reservation(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(group(1), weights={"exact_version": "v9"})
        assert (await served.http.post("/v1/rollouts", json=asked)).status_code == 409
        assert served.server.admission.num_samples == 0


async def test_scoring_reserves_one_sample_per_response_and_all_tokens(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.score_gate = asyncio.Event()
    item = {"prompt": {"token_ids": [1, 2]}, "responses": [[3, 4], [5]]}
    limits = {"max_prompt_tokens_per_key": 5, "max_samples_per_key": 2}
    async with serving(engine, tmp_path, limits=limits) as served, asyncio.TaskGroup() as tasks:
        asked = served.http.post("/v1/score", json={"items": [item]})
        scoring = tasks.create_task(asked)
        while engine.scored < 2:
            await asyncio.sleep(0.001)
        assert (await post(served)).json()["code"] == "quota_exceeded"
        engine.score_gate.set()
        assert (await scoring).status_code == 200
        assert served.server.admission.num_samples == 0


async def test_retry_of_a_running_rollout_reserves_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path, limits={"max_samples_per_key": 1}) as served:
        headers = {"idempotency-key": "a", "prefer": "respond-async"}
        for _ in range(3):
            assert (await post(served, headers=headers)).status_code == 202
        assert served.server.admission.num_samples == 1
        engine.step(4)
        await running_samples(served, 0)


async def test_stop_releases_every_reservation(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        waiting = asyncio.create_task(post(served, 4))
        await running_samples(served, 4)
        waiting.cancel()
    assert served.server.admission.num_samples == 0
    served.server.admission.check()
