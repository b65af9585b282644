"""One engine for all modules of this folder, with the settings of most engine tests.

Each module gets it with the weights and the version of its start, and with an empty prefix cache.
A test that starts another engine in the same process does not belong here: vLLM then removes the
metrics of this one. Other tests collect this file too, so vLLM is imported only in a fixture.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.serving import Served, serving

if TYPE_CHECKING:
    from tests.engine.default_engine.shared_engine import SharedEngine


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_engine() -> AsyncIterator[SharedEngine]:
    from tests.engine.default_engine.shared_engine import SharedEngine

    engine = SharedEngine()
    try:
        await engine.launch()
        yield engine
    finally:
        await engine.shut_down()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def engine(shared_engine: SharedEngine) -> SharedEngine:
    await shared_engine.reset()
    return shared_engine


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def served(
    engine: SharedEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    async with serving(engine, folder, kv={"capacity_bytes": 2**24}) as served:
        yield served
        # The server removes published weights when it stops. vLLM would have none to go back to.
        await engine.reset()
