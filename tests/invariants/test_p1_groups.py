"""P1: no accepted group disappears.

It ends once, its caller and the metrics report the same outcome, and none of its samples outlives
it in the engine.
"""

import asyncio
from pathlib import Path

import httpx
import pytest

from coppice.wire.rollouts import RolloutRequest
from service.errors import Draining
from service.rollouts.request import NewRollout
from service.rollouts.rollout import Rollout
from service.server import Server
from tests.fake_engine import FakeEngine
from tests.invariants.yielding_engine import YieldingEngine, yield_loop
from tests.service.test_rollouts import body, group, lines, running_samples
from tests.serving import serving, settings_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stream", [False, True])
async def test_closed_connection_ends_the_samples_of_every_group(
    tmp_path: Path, stream: bool
) -> None:
    engine = YieldingEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(*[group(i + 1, n=2) for i in range(8)], stream=stream)
        async with httpx.AsyncClient(base_url=served.url) as leaving:
            request = asyncio.create_task(leaving.post("/v1/rollouts", json=asked))
            await running_samples(served, 16)
            request.cancel()
        async with asyncio.timeout(10):
            await running_samples(served, 0)
            assert not engine.running
            await served.server.rollouts.wait_until_idle()
        served.server.admission.check()
        metrics = (await served.http.get("/metrics")).text
    assert 'coppice_groups_total{outcome="cancelled"} 8.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_before_the_start_samples_nothing(tmp_path: Path, stream: bool) -> None:
    engine = YieldingEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        async with served.server.rollouts.close_gate():
            async with httpx.AsyncClient(base_url=served.url) as leaving:
                asked = body(group(1, n=2), group(2), stream=stream)
                request = asyncio.create_task(leaving.post("/v1/rollouts", json=asked))
                while served.server.admission.num_samples != 3:
                    await asyncio.sleep(0.001)
                request.cancel()
            await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            while served.server.admission.num_samples or engine.running:
                await asyncio.sleep(0.001)


async def test_disconnect_of_a_second_reader_of_a_stream_ends_nothing(tmp_path: Path) -> None:
    engine = YieldingEngine(instant=False)
    async with serving(engine, tmp_path) as served:
        asked = body(group(1, n=2), stream=True)
        async with served.http.stream("POST", "/v1/rollouts", json=asked) as first:
            await running_samples(served, 2)
            place = f"/v1/rollouts/{first.headers['coppice-rollout-id']}"
            ndjson = {"accept": "application/x-ndjson"}
            async with (
                httpx.AsyncClient(base_url=served.url) as other,
                other.stream("GET", place, headers=ndjson) as second,
            ):
                await anext(second.aiter_lines())
            await asyncio.sleep(0.05)
            assert len(engine.running) == 2
            engine.step(4)
            records = await lines(first)
    assert records[-1]["outcome"] == "done"


async def test_rollout_cancelled_before_its_first_step_ends(tmp_path: Path) -> None:
    server = Server(settings_for(tmp_path), FakeEngine())
    started: list[Rollout] = []

    async def broken() -> None:
        async with server.rollouts.running():
            request = RolloutRequest.model_validate(body(group(1)))
            started.append(
                await server.rollouts.start(NewRollout.of(request, owner="local", can_move=False))
            )
            raise RuntimeError("the server breaks")

    with pytest.raises(ExceptionGroup):
        await broken()
    async with asyncio.timeout(30):
        with pytest.raises(Draining):
            await started[0].answer()
    assert server.rollouts.num_running == server.admission.num_samples == 0


@pytest.mark.parametrize("how", ["delete", "leave", "break"])
async def test_end_at_any_iteration_of_the_loop_leaves_no_sample(tmp_path: Path, how: str) -> None:
    """Covers every await of a rollout and its groups.

    Before the first step, around the submission, while sampling, and within an abort.
    """
    for num_turns in range(24):
        engine = YieldingEngine(instant=False)
        server = Server(settings_for(tmp_path), engine)
        owner = asyncio.create_task(_own(server))
        await yield_loop(2)
        request = RolloutRequest.model_validate(body(group(1, n=2), group(2, n=2)))
        rollout = await server.rollouts.start(NewRollout.of(request, owner="local", can_move=False))
        await yield_loop(num_turns)
        match how:
            case "delete":
                await server.rollouts.cancel(rollout)
            case "leave":
                server.rollouts.on_disconnect(rollout)
            case "break":
                owner.cancel()
        async with asyncio.timeout(30):
            await rollout.wait()
            await yield_loop()
        assert not engine.running and server.admission.num_samples == 0, num_turns
        assert how == "break" or rollout.error is None, num_turns
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)


async def _own(server: Server) -> None:
    async with server.rollouts.running():
        await asyncio.Event().wait()
