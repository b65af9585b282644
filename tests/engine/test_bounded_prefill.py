"""Prefills that are bounded per step, as those of recomputed KV, next to others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.random_models import make_models
from tests.engine.stepped_engine import LiveEngine, live_engine
from tests.engine.test_kept_kv import BLOCK

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BOUND = 40
CONTEXT = [(7 * i + i * i) % 500 for i in range(6 * BLOCK + 5)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[LiveEngine]:
    with live_engine(models["v7"]) as engine:
        yield engine


class Steps:
    """Tokens that each step of an engine computes, by request."""

    def __init__(self, engine: LiveEngine) -> None:
        self.scheduled: list[dict[str, int]] = []
        self._schedule = engine.core.scheduler.schedule
        engine.core.scheduler.schedule = self._record

    def _record(self, *args: Any, **named: Any) -> Any:
        output = self._schedule(*args, **named)
        if output.num_scheduled_tokens:
            self.scheduled.append(
                {name.split("-")[0]: num for name, num in output.num_scheduled_tokens.items()}
            )
        return output

    def of(self, name: str) -> list[int]:
        return [step[name] for step in self.scheduled if name in step]


def test_bounded_prefill_computes_at_most_that_many_tokens_per_step(engine: LiveEngine) -> None:
    steps = Steps(engine)
    engine.ask([3, 4], max_tokens=1)
    bounded = engine.submit(CONTEXT, max_tokens=2, prefill_tokens_per_step=BOUND)
    engine.step()
    other = engine.submit([9, *CONTEXT], max_tokens=2)  # is not bounded, and does not wait
    [answer, _] = engine.finish(bounded, other)
    assert steps.of(bounded) == [BOUND] * 4 + [len(CONTEXT) - 4 * BOUND, 1]
    assert steps.of(other)[0] == len(CONTEXT) + 1
    assert bounded in steps.scheduled[2] and other in steps.scheduled[2]
    [unbounded] = engine.ask([8, *CONTEXT][1:], max_tokens=2, salt="other")
    assert answer.logprobs == pytest.approx(unbounded.logprobs, abs=1e-4)
