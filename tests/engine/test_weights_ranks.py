"""Weights updates under tensor parallelism: every rank loads, or none does."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.random_models import make_models
from tests.engine.stepped_engine import FAULTY, LiveEngine, assert_same, live_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = (list(range(5, 8)), list(range(10, 110)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture
def engine(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveEngine]:
    cpus = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[-1]}")
    with live_engine(models["v7"], extension=FAULTY, tensor_parallel_size=2) as engine:
        yield engine


def test_ranks_update_together(engine: LiveEngine, models: dict[str, Path]) -> None:
    before = engine.ask(*PROMPTS, max_tokens=20)

    engine.rpc("coppice_fail_next", 9, 1, 1)
    first, second = engine.load(models["v8"])
    assert first == {"ok": False, "error": "failed on ranks [1]", "restored": True}
    assert second == {"ok": False, "error": "OSError: the disk is gone", "restored": True}
    assert_same(engine.ask(*PROMPTS, max_tokens=20), before)

    engine.rpc("coppice_fail_next", 9, 2, 1)
    assert [answer["restored"] for answer in engine.load(models["v8"])] == [False, False]
    engine.rpc("coppice_reset")

    with engine.paused():
        answers = engine.load(models["v8"])
    size = sum(path.stat().st_size for path in models["v8"].glob("*.safetensors"))
    assert all(size / 2 < answer["num_bytes"] + 4096 < 0.6 * size for answer in answers)
    engine.swap(models["v8"])
    assert [info["rank"] for info in engine.rpc("coppice_info")] == [0, 1]
    swapped = engine.ask(*PROMPTS, max_tokens=20)
    engine.close()
    with live_engine(models["v8"]) as one_rank:
        assert_same(swapped, one_rank.ask(*PROMPTS, max_tokens=20))
