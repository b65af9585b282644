"""API keys that change while many callers use them."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import yaml

from service.auth.keys import CHECK_SECONDS, generate_key
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer
from tests.service.test_rollouts import body, group
from tests.serving import Served, serving

CALLERS = 8


async def call_until(served: Served, secret: str, end: asyncio.Event) -> Counter[int]:
    statuses: Counter[int] = Counter()
    while not end.is_set():
        answer = await served.http.post(
            "/v1/rollouts", json=body(group(1, 2)), headers=bearer(secret)
        )
        statuses[answer.status_code] += 1
    return statuses


async def status_of(served: Served, secret: str) -> int:
    return (await served.http.get("/v1/status", headers=bearer(secret))).status_code


@pytest.mark.slow
async def test_keys_rotate_under_load_without_refused_callers(
    tmp_path: Path,
) -> None:
    """Added before callers switch and removed afterwards, as the documentation recommends."""
    file = tmp_path / "keys.yaml"
    old, old_lines = generate_key("old", ["rollout"])
    new, new_lines = generate_key("new", ["rollout"])

    def replace(content: str) -> None:
        written = tmp_path / "next"
        written.write_text(content)
        written.rename(file)

    async def until(served: Served, secret: str, status: int) -> None:
        async with asyncio.timeout(20 * CHECK_SECONDS):
            while await status_of(served, secret) != status:
                await asyncio.sleep(0.05)

    replace(old_lines)
    async with serving(FakeEngine(), tmp_path, server={"keys_file": file}) as served:
        moved, finished = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            with_old = [tasks.create_task(call_until(served, old, moved)) for _ in range(CALLERS)]
            assert await status_of(served, new) == 401
            replace(old_lines + new_lines)
            await until(served, new, 200)
            with_new = [
                tasks.create_task(call_until(served, new, finished)) for _ in range(CALLERS)
            ]
            moved.set()
            await asyncio.wait(with_old)
            replace("- {name: [half a file")  # a broken file changes nothing
            await asyncio.sleep(1.5 * CHECK_SECONDS)
            replace(new_lines)
            await until(served, old, 401)
            finished.set()
        for task in with_old + with_new:
            statuses = task.result()
            assert statuses.keys() == {200}
            assert statuses[200] > 0
    assert [entry["name"] for entry in yaml.safe_load(file.read_text())] == ["new"]
