"""Engines on a GPU: shared prefixes and reloads under captured graphs, against float32 models.

Tokens are judged one by one by the reference, given those before them, because an engine may take
either token at a near tie.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.attention import register as attention
from engine.attention.counters import COUNTERS
from engine.attention.settings import AttentionSettings
from engine.runtime.process_environment import CACHE_ENV
from tests.engine.greedy import logit_gap_to_greedy
from tests.engine.random_models import make_models
from tests.engine.seedling import reference, teacher_forced
from tests.engine.stepped_engine import Answer, LiveEngine
from tests.gpu.device import CAN_RUN, ON_GPU
from tests.gpu.live import LOGPROB_TOLERANCE, TIE, engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CAN_RUN, reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),
]

SHARED = [[(17 * i + i * i) % 500 for i in range(140)]] * 6 + [[(3 * i) % 400 for i in range(75)]]
OTHERS = [[(11 * i + 29 * j) % 500 for i in range(40 + 9 * j)] for j in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


def judge(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        assert float(logit_gap_to_greedy(model, prompt, answer.token_ids).max()) <= TIE
        expected = teacher_forced(model, list(prompt), answer.token_ids)
        assert answer.logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    live: LiveEngine
    mode: str


# vLLM keeps the first backend that it selects, so the registering modes come first.
@pytest.fixture(scope="module", params=["always", "auto", "off"])
def served(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    os.environ[CACHE_ENV] = str(tmp_path_factory.mktemp("attention"))
    attention.install(AttentionSettings(shared_prefix=request.param))
    with engine(models["v7"]) as live:
        yield Served(live=live, mode=request.param)


def test_shared_prefixes_do_not_change_what_is_sampled(
    served: Served, models: dict[str, Path]
) -> None:
    served.live.swap(models["v7"])
    before = COUNTERS.steps_grouped
    served.live.ask(*SHARED[:1], max_tokens=1)  # then the prefix is cached
    answers = served.live.ask(*SHARED, *OTHERS, max_tokens=40)
    judge(reference(models["v7"]), [*SHARED, *OTHERS], answers)
    if served.mode != "auto":
        assert (COUNTERS.steps_grouped > before) == (served.mode == "always")


def test_reload_takes_effect_in_captured_graphs(served: Served, models: dict[str, Path]) -> None:
    truth = {name: reference(path) for name, path in models.items()}
    for name in ("v8", "v7", "v8"):
        served.live.swap(models[name])
        for prompts in (SHARED, OTHERS):
            judge(truth[name], prompts, served.live.ask(*prompts, max_tokens=24))


def test_samples_in_progress_go_on_under_the_new_weights(
    served: Served, models: dict[str, Path]
) -> None:
    served.live.swap(models["v7"])
    names = [served.live.submit(prompt, max_tokens=40) for prompt in OTHERS]
    served.live.step(12)
    served.live.swap(models["v8"])
    answers = served.live.finish(*names)
    assert all([span.version for span in answer.versions] == ["v7", "v8"] for answer in answers)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs exist on a GPU only")
def test_only_steps_with_shared_prefixes_leave_their_full_graphs(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    modes: list[str] = []
    dispatch = CudaGraphManager.dispatch

    def recorded(self: Any, *args: Any, **named: Any) -> Any:
        chosen = dispatch(self, *args, **named)
        modes.append(chosen.cg_mode.name)
        return chosen

    monkeypatch.setattr(CudaGraphManager, "dispatch", recorded)
    for prompts, shares in ((OTHERS, False), (SHARED[:6], served.mode == "always")):
        served.live.ask(prompts[0], max_tokens=1)
        del modes[:]
        served.live.ask(*prompts, max_tokens=20)
        decoding = modes[-10:]  # all samples are past their prompts
        if served.mode != "auto":
            assert set(decoding) == ({"PIECEWISE"} if shares else {"FULL"})
