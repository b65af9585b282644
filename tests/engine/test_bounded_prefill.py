"""Prefills bounded per step, as recomputed kept KV has them, compared with teacher forcing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.harness.kv_teacher_forcing import Teacher, Turn
from tests.engine.random_models import make_models
from tests.engine.stepped_engine import Answer, LiveEngine, live_engine
from tests.engine.test_kept_kv import BLOCK, kv

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BOUND = 40
CONTEXT = [(7 * i + i * i) % 500 for i in range(6 * BLOCK + 5)]
CLOSE = 1e-3


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


def forced(models: dict[str, Path], version: str, prompt: Sequence[int], answer: Answer) -> float:
    """Greatest difference of an answer's logprobs from teacher forcing over its stated KV."""
    turn = Turn(
        version=version,
        token_ids=[*prompt, *answer.token_ids],
        logprobs=answer.logprobs,
        kv_versions=answer.kv_versions,
    )
    return max(map(abs, Teacher(models).force(turn).log_ratio_stated))


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


def test_kv_computed_again_across_updates_has_exact_labels(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """A recomputation that an update interrupts continues behind what is young enough."""
    engine.swap(models["v7"])
    engine.ask(CONTEXT, max_tokens=1, chain="a", max_lag=1)
    engine.swap(models["v8"], keep_kv=True)
    engine.swap(models["v7"], keep_kv=True)
    again = engine.submit(
        CONTEXT, max_tokens=1, chain="a", max_lag=1, prefill_tokens_per_step=2 * BLOCK
    )
    engine.step(2)
    engine.abort(again)
    engine.swap(models["v8"], keep_kv=True)
    [rest] = engine.ask(CONTEXT, max_tokens=1, chain="a", max_lag=1, prefill_tokens_per_step=BOUND)
    assert rest.num_cached_tokens == 4 * BLOCK
    prompt = [*CONTEXT, 17, 18]
    [answer] = engine.ask(prompt, max_tokens=9, chain="a", max_lag=1)
    assert answer.num_cached_tokens == 6 * BLOCK
    num_positions = len(prompt) + 8
    assert answer.kv_versions == kv(("v7", 0, 4 * BLOCK), ("v8", 4 * BLOCK, num_positions))
    assert forced(models, "v8", prompt, answer) <= CLOSE
    [exact] = engine.ask(prompt, max_tokens=9)
    assert answer.logprobs != pytest.approx(exact.logprobs, abs=CLOSE)
