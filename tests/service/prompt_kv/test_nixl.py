"""The arena's NIXL agent: its visibility, its memory, its lifetime, and servers without it."""

import asyncio
import base64
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.wire.prompt_kv import KvAgent
from service.kv.handles import nixl_agent
from tests.fake_engine import FakeEngine
from tests.nixl_agent import PATIENCE_SECONDS, agent_process, needs_nixl
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import export_handle, rollout_body
from tests.serving import Served, serving


async def with_agent(served: Served) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while served.server.prompt_kv.agent is None:
            await asyncio.sleep(0.02)


@needs_nixl
@pytest.mark.slow
async def test_agent_is_visible_only_to_readers_of_a_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of the server")
    keys = write_keys(
        tmp_path / "keys.yaml", mine="rollout,kv", yours="rollout,kv", plain="rollout"
    )
    server = {"keys_file": tmp_path / "keys.yaml"}
    engine = FakeEngine(prompt_kv=True)
    async with serving(engine, tmp_path, server=server, kv={"nixl": True}) as served:
        await with_agent(served)
        mine = bearer(keys["mine"])
        answer = await served.http.post("/v1/rollouts", json=rollout_body(), headers=mine)
        known = answer.json()["groups"][0]["kv"]
        shm, agent, http = known["locators"]
        path = f"/v1/kv/{known['handle']}/agent"
        agent_info = KvAgent.model_validate((await served.http.get(path, headers=mine)).json())
        assert (agent["transport"], agent["offset"]) == ("nixl", shm["offset"])
        assert agent_info.agent == agent["agent"]
        assert base64.b64decode(agent_info.metadata)
        refused = [
            (await served.http.get(path, headers=headers)).status_code
            for headers in ({}, bearer(keys["plain"]), bearer(keys["yours"]))
        ]
        assert refused == [401, 403, 404]
        process = agent_process()
        assert "A_SECRET" not in process.environ(), "who reaches the agent reads all it has"
        process.kill()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while served.server.prompt_kv.agent is not None:
                await asyncio.sleep(0.02)
        assert (await served.http.get(path, headers=mine)).json()["code"] == "kv_not_found"
        answer = await served.http.post("/v1/rollouts", json=rollout_body(), headers=mine)
        assert len(answer.json()["groups"][0]["kv"]["locators"]) == 2


@needs_nixl
@pytest.mark.slow
def test_agent_exits_with_a_killed_server(tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(bytes(2**20))
    command = [
        sys.executable,
        "-m",
        "service.kv.handles.nixl_agent",
        str(tmp_path / "arena"),
        str(2**20),
    ]
    agent_environment = nixl_agent.agent_environment()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=agent_environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        KvAgent.model_validate_json(process.stdout.readline())
        process.stdin.close()  # the only remaining sign of a killed server
        assert process.wait(timeout=PATIENCE_SECONDS) == 0


async def test_without_nixl_the_server_reports_it_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_agent, "installed", lambda: False)
    async with serving(FakeEngine(prompt_kv=True), tmp_path, kv={"nixl": True}) as served:
        known = await export_handle(served)
        answer = await served.http.get(f"/v1/kv/{known.handle}/agent")
    assert [locator.transport for locator in known.locators] == ["shm", "http"]
    assert (answer.status_code, answer.json()["code"]) == (404, "kv_not_found")
    assert [r.message for r in caplog.records if "NIXL" in r.message] == [nixl_agent.NOT_INSTALLED]


async def test_server_runs_without_an_agent_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_agent, "installed", lambda: True)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with serving(FakeEngine(prompt_kv=True), tmp_path, kv={"nixl": True}) as served:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "the NIXL agent has exited" not in caplog.text:
                await asyncio.sleep(0.02)
        assert len((await export_handle(served)).locators) == 2
