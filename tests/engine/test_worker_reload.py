"""The reload of a checkpoint in a worker, with a model that vLLM's loaders do not know."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

# Importing vLLM emits unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


class Model(torch.nn.Linear):
    """A layer that reads vLLM's current configuration while it loads, as some MoE layers do."""

    config: Any = None

    def load_weights(self, tensors: Any) -> None:
        from vllm.config import get_current_vllm_config

        self.config = get_current_vllm_config()
        self.load_state_dict(dict(tensors))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    from engine.weights import worker_reload

    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(worker_reload, name, lambda *_: None)
    target, draft = Model(3, 2), Model(3, 2)
    # Model Runner V2 has no attribute `drafter`.
    runner = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft)
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.speculative_config = SimpleNamespace(draft_model_config=None)
    return SimpleNamespace(
        model_runner=runner,
        model_config=None,
        vllm_config=config,
        device=torch.device("cpu"),
        parallel_config=config.parallel_config,
        synchronize_device=lambda: None,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    from engine.weights.checkpoint import read_checkpoint

    save_file(
        {"bias": torch.ones(2), "weight": torch.full((2, 3), 2.0)}, tmp_path / "model.safetensors"
    )
    return read_checkpoint(tmp_path)


@pytest.mark.parametrize("drafter", [False, True])
def test_model_and_drafter_load_with_the_current_configuration(
    worker: Any, checkpoint: Any, drafter: bool
) -> None:
    from engine.weights import worker_reload

    with worker_reload.open_tensors(worker, checkpoint, drafter=drafter) as tensors:
        worker_reload.load(worker, tensors, drafter=drafter)
    assert worker_reload.num_bytes_loaded(worker, drafter=drafter) == 8 * 4
    runner = worker.model_runner
    loaded, other = runner.get_model(), runner.get_draft_model()
    if drafter:
        loaded, other = other, loaded
    assert loaded.config is worker.vllm_config and other.config is None
    assert loaded.weight.eq(2).all() and loaded.bias.eq(1).all()


def layer(in_use: torch.Tensor, loaded: torch.Tensor) -> torch.nn.Module:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(in_use, requires_grad=False)
    get_layerwise_info(module).restore_metadata = ({"weight": loaded.to("meta")}, {})
    return module


def test_kv_cache_leaves_room_for_the_largest_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from engine.patches import reload_memory

    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 10_000)
    reload_memory.install.__wrapped__()
    same, converted = torch.ones(30), torch.ones(40, dtype=torch.int8)
    target = torch.nn.ModuleList([layer(same, same), layer(converted, torch.ones(40))])
    draft = torch.nn.ModuleList([layer(same, same)])
    runner = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft)
    cache = SimpleNamespace(kv_cache_memory_bytes=None)
    fake = SimpleNamespace(model_runner=runner, cache_config=cache)
    assert Worker.determine_available_memory(fake) == 10_000 - (40 * 4 + 40)
    runner.get_draft_model = lambda: torch.nn.ModuleList([layer(torch.ones(900), torch.ones(900))])
    assert Worker.determine_available_memory(fake) == 10_000 - 900 * 4
    cache.kv_cache_memory_bytes = 10_000
    assert Worker.determine_available_memory(fake) == 10_000
