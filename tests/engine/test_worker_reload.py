"""The reload of a checkpoint in a worker, with a model that vLLM's loaders do not know."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointRefused

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

    worker_reload.load(worker, worker_reload.read_tensors(checkpoint), drafter=drafter)
    runner = worker.model_runner
    loaded, other = runner.get_model(), runner.get_draft_model()
    if drafter:
        loaded, other = other, loaded
    assert loaded.config is worker.vllm_config and other.config is None
    assert loaded.weight.eq(2).all() and loaded.bias.eq(1).all()


def test_tensors_have_memory_of_their_own(checkpoint: Any) -> None:
    """vLLM refers to all tensors of a layer at once."""
    from engine.weights import worker_reload

    tensors = dict(worker_reload.read_tensors(checkpoint))
    assert tensors["bias"].tolist() == [1, 1] and tensors["weight"].eq(2).all()


def test_read_error_reaches_the_caller(checkpoint: Any, tmp_path: Path) -> None:
    from engine.weights import worker_reload

    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointRefused, match="ends within"):
        list(worker_reload.read_tensors(checkpoint))


def test_abandoned_reads_end(checkpoint: Any) -> None:
    import threading

    from engine.weights import worker_reload

    tensors = worker_reload.read_tensors(checkpoint)
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("read-weights") for thread in threading.enumerate())
