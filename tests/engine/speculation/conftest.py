"""Fixtures of the tests with Model Runner V2."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from engine.runtime.feature_guard import FeatureState


@pytest.fixture
def second_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Model Runner V2 without a GPU; afterwards a failed feature is on again."""
    from engine.speculation.core import scheduler_drafts
    from tests.engine.speculation.second_runner import without_gpu

    with without_gpu(monkeypatch):
        yield
    scheduler_drafts.FEATURE.state = FeatureState(on=True, num_failures=0, reason=None)


@pytest.fixture(scope="session")
def created_config() -> Any:
    from tests.engine.speculation.second_runner import vllm_config

    return vllm_config()


@pytest.fixture
def config(created_config: Any) -> Any:
    return copy.deepcopy(created_config)
