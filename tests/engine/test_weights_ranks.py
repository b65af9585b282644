"""Weights updates under tensor parallelism: every rank loads, or none does."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True)
def separate_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[-1]}")


@pytest.fixture
def engine(models: dict[str, Path]) -> Iterator[LiveEngine]:
    with live_engine(models["v7"], extension=FAULTY, tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture
def receiver(models: dict[str, Path]) -> Iterator[LiveEngine]:
    """An engine that receives weights in memory."""
    from vllm.config import WeightTransferConfig

    from tests.engine.transfer_worker import TRANSFER

    config = WeightTransferConfig(backend="ipc")
    with live_engine(
        models["v7"], extension=TRANSFER, tensor_parallel_size=2, weight_transfer_config=config
    ) as engine:
        yield engine


def test_ranks_update_together(engine: LiveEngine, models: dict[str, Path]) -> None:
    before = engine.ask(*PROMPTS, max_tokens=20)

    engine.rpc("coppice_fail_next", 9, 1, 1)
    first, second = engine.load(models["v8"])
    failure = {"ok": False, "restored": True, "has_reloaded": True}
    assert first == failure | {"error": "failed on ranks [1]"}
    assert second == failure | {"error": "OSError: the disk is gone"}
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


def test_ranks_receive_tensors_together(receiver: LiveEngine, models: dict[str, Path]) -> None:
    """Both ranks read all tensors, and each loads its part."""
    from tests.engine.transfer_worker import shared, tensors_of

    engine, tensors = receiver, tensors_of(models["v8"])
    before = engine.ask(*PROMPTS, max_tokens=20)
    with shared(tensors) as handed_over, engine.paused():
        values = [tensor.to_dict() for tensor in handed_over]
        first_only = [
            replace(tensor, handles={"cpu-0": tensor.handles["cpu-0"]}).to_dict()
            for tensor in handed_over
        ]
        reasons = engine.rpc("coppice_open_transfer", first_only)
        assert reasons == ["failed on ranks [1]", "KeyError: 'cpu-1'"]
        engine.rpc("coppice_fail_next", 9, 1, 1)
        failed = transfer(engine, values)
        assert [(answer["restored"], answer["has_reloaded"]) for answer in failed] == [
            (True, True),
            (True, True),
        ]
    assert_same(engine.ask(*PROMPTS, max_tokens=20), before)
    with shared(tensors) as handed_over, engine.paused():
        answers = transfer(engine, [tensor.to_dict() for tensor in handed_over])
        assert all(answer["ok"] for answer in answers), answers
        engine.core.coppice_reset_prefix_cache(False)
    transferred = engine.ask(*PROMPTS, max_tokens=20)
    engine.close()
    with live_engine(models["v8"]) as one_rank:
        assert_same(transferred, one_rank.ask(*PROMPTS, max_tokens=20))


def transfer(engine: LiveEngine, tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert engine.rpc("coppice_open_transfer", tensors) == [None, None]
    answers: list[dict[str, Any]] = engine.rpc("coppice_load_transfer", str(engine.serving))
    return answers
