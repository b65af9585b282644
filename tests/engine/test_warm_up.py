"""Callbacks at the end of a GPU worker's warm-up."""

import functools
from typing import Any

import pytest

from engine.runtime import warm_up

# Importing vLLM without a GPU emits unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's worker class, whose own method records that it was called."""
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.setattr(
        Worker, "_maybe_activate_jit_monitor", lambda self: self.calls.append("vllm")
    )
    monkeypatch.setattr(warm_up, "_callbacks", [])
    monkeypatch.setattr(warm_up, "_install", functools.cache(warm_up._install.__wrapped__))
    made: Any = object.__new__(Worker)
    made.calls = []
    return made


def test_callbacks_run_once_in_order_before_the_jit_monitor(worker: Any) -> None:
    def first(warmed: Any) -> None:
        warmed.calls.append("first")

    for callback in (first, lambda warmed: warmed.calls.append("second"), first):
        warm_up.on_warmed_up(callback)
    worker._maybe_activate_jit_monitor()
    assert worker.calls == ["first", "second", "vllm"]
